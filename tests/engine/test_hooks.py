"""Hooks of an engine core: called at its turning points in order; extras of a step reach every worker and come back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import make_config
from tests.engine.core_hooks import NotingHooks, SendingHooks
from tests.oracles.hash_model import HashExecutor
from tests.oracles.installed_plugins import restore
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.tiny_engine import make_request

from quire.engine.arg_utils import EngineArgs
from quire.engine.core import EngineCore
from quire.engine.hooks import HOOKS
from quire.errors import ConfigError
from quire.platforms.cpu import CpuPlatform

PATHS = "tests.engine.core_hooks"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    restore(monkeypatch, HOOKS)
    NotingHooks.made.clear()
    SendingHooks.answers.clear()
    yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def test_a_hook_is_called_at_every_turning_point_in_order() -> None:
    HOOKS.register("noting", NotingHooks, owner="a test")
    config = make_config()
    core = EngineCore(config, HashExecutor(config))
    (hook,) = NotingHooks.made
    assert hook.calls == [("ready", core.kv_cache.num_blocks, 0)]
    core.add_requests([make_request("a", [5, 6, 7], max_tokens=3)])
    while core.has_work():
        core.step()
    steps = [call for call in hook.calls[1:] if call != "schedule"]
    assert steps[:2] in ([("planned", 0), ("after", 0)], [("planned", 0), ("planned", 1)])
    assert [call for call in steps if call[0] == "after"] == [("after", number) for number in range(len(steps) // 2)]
    assert hook.calls[1] == "schedule" and hook.calls.count("schedule") >= len(steps) // 2
    assert [core.idle() for _ in range(3)] == [True, True, False]
    core.shutdown()
    core.shutdown()
    assert hook.calls.count("shutdown") == 1


def test_each_core_has_hooks_of_its_own() -> None:
    HOOKS.register("noting", f"{PATHS}:NotingHooks", owner="a test")
    for _ in range(2):
        config = make_config()
        EngineCore(config, HashExecutor(config)).shutdown()
    assert [hook.calls[-1] for hook in NotingHooks.made] == ["shutdown", "shutdown"]


@pytest.mark.parametrize(
    ("path", "message"),
    [(f"{PATHS}:Nothing", "cannot be imported"), (f"{PATHS}:Note", "not a subclass of quire.engine.hooks.CoreHooks")],
)
def test_a_platforms_hook_that_is_none_is_refused(path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "core_hooks", lambda self: [path])
    config = make_config()
    with pytest.raises(ConfigError, match=message):
        EngineCore(config, HashExecutor(config))


@pytest.mark.parametrize("ranks", [1, 2])
def test_extras_of_a_platforms_hook_reach_the_worker_and_its_answers_come_back(
    ranks: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "core_hooks", lambda self: [f"{PATHS}:SendingHooks"])
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 4 << 20}
    settings |= {"device": "cpu", "skip_tokenizer_init": True, "worker_cls": f"{PATHS}:AnsweringWorker"}
    args = EngineArgs(model=str(llama), tensor_parallel_size=ranks, **settings)
    core = EngineCore(args.create_engine_config())
    try:
        core.add_requests([make_request("a", [5, 6, 7], max_tokens=3)])
        while core.has_work():
            core.step()
    finally:
        core.shutdown()
    numbers = [answer.number for answer in SendingHooks.answers]
    assert numbers == [2 * number for number in range(len(numbers))] and len(numbers) >= 3
    assert {tuple(answer.words) for answer in SendingHooks.answers} == {("from", "the", "core", "answered")}
