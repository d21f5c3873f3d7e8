"""Prefill context parallelism: ranks share the tokens of long prompts' steps, and give one process's tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.test_split_context import SETTINGS, answers
from tests.distributed.thread_ranks import on_ranks
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM
from quire.distributed.communicator import Communicator, SingleRank
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.kernels import ops
from quire.layers.decoder import Decoder
from quire.layers.interface import StepInputs
from quire.model_loader.loader import build_model
from quire.platforms.cpu import CpuPlatform
from quire.worker.prompt_split import PromptSplit

KINDS = ["LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"]
"""Plain, with windows, with sinks, with latents and experts."""


class Shared:
    """A model whose long steps are shared by ranks; every token's residual is wanted."""

    def __init__(self, model: Decoder, ranks: Communicator) -> None:
        self._model, self.split, self.num_split = model, PromptSplit(model, ranks), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, step: StepInputs) -> None:
        if not self.split.takes(step):
            self._model.forward(step)
            return
        self.num_split += 1
        every = torch.arange(step.num_tokens, dtype=torch.int32)
        self.split.forward(dataclasses.replace(step, num_logits=step.num_tokens, logits_index=every))


def logprobs(driver: ModelDriver) -> list[torch.Tensor]:
    """Of prompts together, in chunks, of which ranks get parts, and of decoding beside a prompt."""
    one, two, three = (
        Sequence([3 + (i * i + 7 * n) % 300 for i in range(count)], row=n) for n, count in enumerate((70, 41, 90))
    )
    pieces = [*driver.step([(one, 33), (two, 20)]), *driver.step([(one, 1), (two, 20), (three, 50)])]
    pieces += [*driver.step([(three, 5), (one, 30)]), *driver.step([(one, 6), (two, 1), (three, 35)])]
    for sequence in (one, two, three):
        sequence.token_ids += [9, 8]
    return pieces + driver.step([(one, 1), (two, 1), (three, 1)]) + driver.step([(three, 1), (one, 1)])


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_prompts_give_one_rank_s_logprobs(tmp_path: Path, architecture: str, size: int) -> None:
    ops.select("any")
    path = make_tiny_model(architecture, tmp_path, tokenizer=False)
    expected = logprobs(ModelDriver(build_tiny(path)))

    def work(ranks: Communicator) -> list[torch.Tensor]:
        alone = SingleRank()
        alone.prompts = ranks
        driver = ModelDriver(build_tiny(path, communicator=alone))
        shared: Any = Shared(driver.model, ranks)
        driver.model = shared
        given = logprobs(driver)
        assert shared.num_split >= 2
        return given

    for given in on_ranks(size, work):
        for ours, theirs in zip(given, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        *((each, {"prefill_context_parallel_size": 2}) for each in KINDS),
        ("LlamaForCausalLM", {"prefill_context_parallel_size": 4}),
        ("Qwen3MoeForCausalLM", {"prefill_context_parallel_size": 2, "tensor_parallel_size": 2}),
        (
            "LlamaForCausalLM",
            {"prefill_context_parallel_size": 2, "worker_cls": "tests.executor.rank_workers:AsyncWorker"},
        ),
    ],
)
def test_processes_that_share_prompts_give_one_process_s_tokens(
    tmp_path: Path, architecture: str, settings: dict[str, Any]
) -> None:
    path, sizes = make_tiny_model(architecture, tmp_path), {**SETTINGS, "max_num_batched_tokens": 80}
    with LLM(str(path), **sizes) as alone:
        expected = answers(alone)
    with LLM(str(path), **settings, **sizes) as llm:
        for given in (answers(llm), answers(llm)):  # the second time behind cached pages
            assert [list(one.token_ids) for one in given] == [list(one.token_ids) for one in expected]


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("MambaForCausalLM", {}, "has layers of kind Mamba"),
        ("LlamaForCausalLM", {"enable_lora": True}, "does not go with enable_lora"),
        ("LlamaForCausalLM", {"pipeline_parallel_size": 2}, "does not go with pipeline_parallel_size"),
        ("LlamaForCausalLM", {"distributed_executor_backend": "ray"}, "processes of one host"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    tmp_path: Path, architecture: str, settings: dict[str, Any], message: str
) -> None:
    path, communicator = make_tiny_model(architecture, tmp_path, tokenizer=False), SingleRank()
    communicator.prompts = SingleRank()
    with pytest.raises(ConfigError, match=message):
        config = EngineArgs(
            model=str(path), prefill_context_parallel_size=2, **settings, **SETTINGS
        ).create_engine_config()
        build_model(config, CpuPlatform(), torch.device("meta"), 32, 4, communicator)
