"""Experts that copies of a model share: each copy's tokens are those of one process, also where others have none or have died."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.test_expert_balance import skewed
from tests.distributed.thread_ranks import on_ranks
from tests.distributed.whole_engines import SETTINGS, tokens
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.core.output import Turn
from quire.distributed.communicator import Communicator
from quire.distributed.token_exchange import AllToAll, GatherAll, TokenExchange
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import ops
from quire.layers.parallel import ParallelPlan
from quire.processes import family
from quire.worker.shared_steps import SharedSteps


@pytest.mark.parametrize(
    ("architecture", "exchange"), [("Qwen3MoeForCausalLM", AllToAll), ("DeepseekV3ForCausalLM", GatherAll)]
)
def test_a_copy_computes_for_others_while_it_has_no_tokens(
    tmp_path: Path, architecture: str, exchange: type[TokenExchange]
) -> None:
    path = make_tiny_model(architecture, tmp_path, tokenizer=False)
    ops.select("any")
    prompts = [[(17 * i + 5 * n) % 300 + 3 for i in range(5 + 20 * n)] for n in range(4)]
    alone = ModelDriver(build_tiny(path))
    expected = [alone.prefill(Sequence(prompt, row=n), 8) for n, prompt in enumerate(prompts)]

    def work(ranks: Communicator) -> list[torch.Tensor]:
        plan = ParallelPlan(expert_parallel=True, copies=ranks.size, copy=ranks.rank)
        model = build_tiny(path, plan=plan, exchange=exchange(ranks), max_tokens=8)
        driver, shared = ModelDriver(model), SharedSteps(ranks, list(model.mixtures()), torch.device("cpu"))
        given = []
        for number, prompt in enumerate(prompts):
            sequence, pieces = Sequence(prompt, row=number), list[torch.Tensor]()
            while number % ranks.size == ranks.rank and sequence.computed < len(prompt):
                count = min(8, len(prompt) - sequence.computed)
                assert shared.begin(Turn.COMPUTES, num_tokens=count) == (True, False)
                pieces += driver.step([(sequence, count)])
                shared.finish(is_computed=True)
            given += [torch.cat(pieces)] if pieces else []
        may_leave = False
        while not may_leave:
            is_computed, may_leave = shared.begin(Turn.NOTHING)
            shared.finish(is_computed)
        return given

    shares = on_ranks(2, work)
    for number, logprobs in enumerate(expected):
        torch.testing.assert_close(shares[number % 2][number // 2], logprobs, rtol=0, atol=2e-5)


def check_copies(path: Path, **settings: Any) -> None:
    with LLM(str(path), **SETTINGS) as alone:
        expected = tokens(alone)
    with LLM(str(path), enable_expert_parallel=True, **{**SETTINGS, **settings}) as llm:
        assert tokens(llm) == tokens(llm) == expected
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == expected
        llm.llm_engine.call("reload_weights")
        assert tokens(llm) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 4},
        {"data_parallel_size": 2, "all2all_backend": "all_to_all"},
        {"data_parallel_size": 2, "tensor_parallel_size": 2},
        {
            "data_parallel_size": 2,
            "enable_eplb": True,
            "eplb_config": {"step_interval": 10, "window_size": 8, "num_redundant_experts": 2},
        },
        {
            "data_parallel_size": 2,
            "max_num_batched_tokens": 16,
            "worker_cls": "tests.executor.rank_workers:AsyncWorker",
        },
    ],
)
def test_copies_that_share_experts_give_one_process_s_tokens(tmp_path: Path, settings: dict[str, Any]) -> None:
    check_copies(skewed(tmp_path), **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "how"),
    [(1, signal.SIGKILL), (1, signal.SIGSTOP), (2, signal.SIGKILL)],
    ids=["core", "stopped core", "rank"],
)
def test_a_copy_that_dies_takes_the_others_along_and_all_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, how: signal.Signals
) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")
    path = skewed(tmp_path)
    with LLM(str(path), **SETTINGS) as alone:
        expected = tokens(alone)
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": ranks, "enable_expert_parallel": True}
    with LLM(str(path), recovery=True, **sizes, **SETTINGS) as llm:
        assert tokens(llm) == expected
        clients = llm.llm_engine._client.client.clients
        for number in (0, 1):
            before = [client.client.pid for client in clients]
            victim = family(before[number])[-1].pid  # the core, or one of its ranks
            killer = threading.Timer(0.0, os.kill, (victim, how))
            killer.start()
            assert tokens(llm) == expected
            killer.join()
            assert tokens(llm) == expected
            assert not {client.client.pid for client in clients} & set(before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_lora": True}, "data_parallel_size=2 with enable_expert_parallel: adapters do not follow tokens"),
        ({"pipeline_parallel_size": 2}, "does not go with pipeline_parallel_size"),
        ({"load_format": "sharded_state"}, "does not go with load_format"),
    ],
)
def test_what_copies_that_share_experts_cannot_do_is_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path = make_tiny_model("Qwen3MoeForCausalLM", tmp_path, tokenizer=False)
    sizes = {"data_parallel_size": 2, "enable_expert_parallel": True, **settings}
    with pytest.raises(ConfigError, match=message):
        EngineArgs(model=str(path), **sizes, **SETTINGS).create_engine_config()


def test_too_few_experts_for_all_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 experts for tensor_parallel_size=2 and data_parallel_size=3"):
        ParallelPlan(2, 0, expert_parallel=True, copies=3).experts(4)
