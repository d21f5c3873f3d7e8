"""The in-process executor's own behaviour; tokens are proved in `tests/worker/test_end_to_end.py`."""

from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.tiny_engine import TinyEngine

from quire.config import EngineConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError, EngineError, RequestError
from quire.executor import make_executor


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    return TinyEngine(make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model")))


def config_of(engine: TinyEngine, **engine_args: Any) -> EngineConfig:
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True}
    return EngineArgs(model=engine.config.model.path, **(settings | engine_args)).create_engine_config()


def test_collecting_without_a_step_is_an_error(engine: TinyEngine) -> None:
    with pytest.raises(EngineError, match="without a step in flight"):
        engine.executor.collect()


def test_worker_methods_are_called_by_name(engine: TinyEngine) -> None:
    assert engine.executor.collective_rpc("available_kv_bytes") == [8 << 20]
    for method in ("no_such_method", "__init__", "_timings"):
        with pytest.raises(RequestError, match="has no method"):
            engine.executor.collective_rpc(method)
    assert engine.executor.collective_rpc(lambda worker, name: type(worker).__name__ + name, ("!",)) == ["Worker!"]


def test_explain_names_every_kernel_the_backend_and_the_memory(engine: TinyEngine) -> None:
    report = engine.executor.explain()
    assert report["platform"] == "cpu"
    assert {"linear", "paged_attention", "gumbel_argmax"} <= set(report["kernels"])
    assert report["attention_backend"]["chosen"] in ("cpu", "reference")
    assert report["kv_cache_bytes"] > 0
    assert report["memory"]["total"] >= report["memory"]["free"] > 0


def test_the_cache_takes_a_bounded_share_unless_a_size_is_named(engine: TinyEngine) -> None:
    executor = make_executor(config_of(engine))
    assert 0 < executor.available_kv_bytes() <= 4 << 30


def test_a_share_that_leaves_nothing_is_refused_with_the_numbers(engine: TinyEngine) -> None:
    config = config_of(engine, gpu_memory_utilization=1e-9)
    with pytest.raises(ConfigError, match=r"no memory is left for the KV cache: .* GiB") as caught:
        make_executor(config).available_kv_bytes()
    assert caught.value.setting == "gpu_memory_utilization"


@pytest.mark.parametrize(("call", "message"), [("sleep", "level=3"), ("wake_up", "unknown")])
def test_sleep_and_wake_refuse_what_they_do_not_know(engine: TinyEngine, call: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(engine.executor, call)(3 if call == "sleep" else ["moon"])
