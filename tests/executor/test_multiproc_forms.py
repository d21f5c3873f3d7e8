"""Forms over several ranks: a request starts when all of them have compiled its own, and others go on until then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.tiny_engine import make_request

from quire.engine.arg_utils import EngineArgs
from quire.engine.core import EngineCore
from quire.request import EngineRequest
from quire.sampling_params import StructuredOutputsParams

SLOW_FORMS = "tests.executor.rank_workers:SlowFormsWorker"
EOS = 1


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def make_core(path: Path, **settings: Any) -> EngineCore:
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20}
    return EngineCore(EngineArgs(model=str(path), **common | settings).create_engine_config())


@pytest.fixture
def two(llama: Path) -> Iterator[EngineCore]:
    core = make_core(llama, tensor_parallel_size=2, worker_cls=SLOW_FORMS)
    yield core
    core.shutdown()


def requests() -> list[EngineRequest]:
    made: list[EngineRequest] = []
    for number, regex in enumerate(["[a-c]{9}", None, "[d-f]{9}", "[a-c]{9}", None]):
        form = None if regex is None else StructuredOutputsParams(regex=regex)
        made.append(
            make_request(
                f"{regex} {number}",
                [5, 6, number],
                seed=number,
                temperature=1.0,
                max_tokens=20,
                ignore_eos=False,
                eos_token_ids=[EOS],
                structured_outputs=form,
            )
        )
    return made


def step(core: EngineCore, tokens: dict[str, list[int]]) -> None:
    outputs = core.step()
    for name, token in zip(outputs.plain_ids, outputs.plain_tokens, strict=True):
        tokens.setdefault(name, []).append(token)
    for output in outputs.outputs:
        assert output.error is None
        tokens.setdefault(output.request_id, []).extend(output.new_token_ids)


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    core.add_requests(requests())
    while core.has_work():
        step(core, tokens)
    return tokens


def test_a_form_waits_for_the_slowest_rank_and_nobody_else_does(llama: Path, two: EngineCore) -> None:
    tokens: dict[str, list[int]] = {}
    two.add_requests(requests())
    while two.stats().num_running or not tokens:
        step(two, tokens)
    for _ in range(80):
        step(two, tokens)
    assert sorted(tokens) == ["None 1", "None 4"] and two.stats().num_waiting == 3
    two.abort_requests(["[d-f]{9} 2"])
    assert two.collective_rpc("release") == [0, 1]
    while two.has_work():
        step(two, tokens)
    one = make_core(llama)
    alone = run(one)
    assert alone.pop("[d-f]{9} 2")
    assert tokens == alone
    assert run(two)["[a-c]{9} 0"] == alone["[a-c]{9} 0"]  # every form is known
    one.shutdown()


def test_an_engine_ends_while_a_form_is_compiled(two: EngineCore) -> None:
    two.add_requests(requests()[:1])
    for _ in range(5):
        two.step()
    assert two.has_work() and two.stats().num_waiting == 1
    two.shutdown()
