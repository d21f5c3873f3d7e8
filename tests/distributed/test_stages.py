"""Stages of a pipeline: layers in several workers, one after another, give the logprobs and tokens of one worker."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.executor.test_multiproc import requests
from tests.models.test_parity import SHAPES
from tests.models.test_parity_dense import SHAPES as DENSE
from tests.models.test_parity_gemma4 import SHAPES as GEMMA4
from tests.models.test_parity_moe import SHAPES as MOE
from tests.models.test_parity_recurrent import SHAPES as RECURRENT
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.scheduler_harness import SchedulerHarness
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.tiny_engine import TinyEngine

from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind, group_layers
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.layers.interface import StepInputs
from quire.layers.parallel import StagePlan
from quire.models.features import features_of
from quire.platforms.cpu import CpuPlatform
from quire.request import TokenLogprobs

LAYER_INPUTS = {"layer inputs, nothing shared": ("Gemma4ForCausalLM", {"num_kv_shared_layers": 0})}
ALL: dict[str, tuple[str, dict[str, Any]]] = {**SHAPES, **DENSE, **GEMMA4, **MOE, **RECURRENT, **LAYER_INPUTS}
TOKENS = [(17 * i * i + 5 * i + 3) % 300 + 3 for i in range(41)]


class StagedModel:
    """Stages in one process; what they hand over is copied."""

    def __init__(self, path: Path, split: tuple[int, ...]) -> None:
        plans = [StagePlan(number, len(split), split) for number in range(len(split))]
        self.stages = [build_tiny(path, stage=plan) for plan in plans]
        first, last = self.stages[0], self.stages[-1]
        self.block_size, self.attention_backend, self.device = first.block_size, first.attention_backend, first.device
        max_logits = last.workspace.max_logits
        self.workspace = SimpleNamespace(max_tokens=first.workspace.max_tokens, max_logits=max_logits)

    def kv_cache_specs(self) -> list[Any]:
        return [spec for stage in self.stages for spec in stage.kv_cache_specs()]

    def bind_kv_cache(self, caches: list[torch.Tensor], groups: list[int]) -> None:
        start = 0
        for stage in self.stages:
            end = start + len(stage.kv_cache_specs())
            stage.bind_kv_cache(caches[start:end], groups[start:end])
            start = end

    def forward(self, step: StepInputs) -> None:
        for number, stage in enumerate(self.stages):
            if number:
                payload = self.stages[number - 1].payload(step.num_tokens)
                for name, tensor in stage.payload(step.num_tokens).items():
                    tensor.copy_(payload[name])
            stage.forward(step)

    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        return self.stages[-1].compute_logits(step)


def logprobs(model: Any) -> torch.Tensor:
    driver = ModelDriver(model)
    sequence, other = Sequence(list(TOKENS), row=2), Sequence(TOKENS[::-1][:20], row=1)
    first = driver.step([(other, 20), (sequence, 13)])[1]
    return torch.cat([first, driver.prefill(sequence, 13)])


def splits_of(path: Path) -> list[tuple[int, ...]]:
    """Of so many layers, one layer apart from the rest at either end; and each layer by itself."""
    model = build_tiny(path)
    layers, together = model.spec.layers, model.spec.weights.sublayers
    units = layers // together
    given = [(1, units - 1), (units - 1, 1), (1,) * units] if units > 2 else [(1, 1)] if units == 2 else []
    return [tuple(count * together for count in split) for split in dict.fromkeys(given)]


@pytest.fixture(autouse=True)
def native(kept_selection: None) -> None:
    CpuPlatform().select_kernels()


def check_stages(name: str, folder: Path) -> set[tuple[int, ...]]:
    """Compare each split with the whole model; returns the splits that were refused."""
    architecture, overrides = ALL[name]
    path = make_tiny_model(architecture, folder, tokenizer=False, **overrides)
    whole, refused = logprobs(build_tiny(path)), set[tuple[int, ...]]()
    for split in splits_of(path):
        try:
            model = StagedModel(path, split)
        except ConfigError as error:
            assert error.setting == "pipeline_parallel_size", error
            refused.add(split)
            continue
        error = float((logprobs(model) - whole).abs().max())
        assert error <= 1e-4, (name, split, error)
    return refused


QUICK = {
    "llama": 0,
    "gpt2": 0,
    "gemma3": 0,
    "qwen3 moe": 0,
    "falcon h1": 0,
    "shared keys and values, wide feed-forwards, layer inputs": 3,
    "layer inputs, nothing shared": 0,
}


@pytest.mark.parametrize("name", [name for name in ALL if name in QUICK])
def test_stages_compute_what_one_worker_computes(name: str, tmp_path: Path) -> None:
    assert len(check_stages(name, tmp_path)) == QUICK[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ALL)
def test_stages_of_every_architecture_compute_what_one_worker_computes_or_are_refused(
    name: str, tmp_path: Path
) -> None:
    refused = check_stages(name, tmp_path)
    spec = build_tiny(tmp_path).spec
    parted = set(splits_of(tmp_path)) - refused
    assert features_of(spec).pipeline_parallel or not parted


# --- engines ---


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), num_hidden_layers=5)


def compare(path: Path, engine: TinyEngine) -> None:
    """The same requests twice, the second time from cached prefixes, as one process computes them one step after the other."""
    one = TinyEngine(path, max_num_batched_tokens=16)
    for _ in range(2):
        assert engine.generate(requests()) == one.generate(requests())
        for name in one.news:
            told, expected = ([each.logprobs or TokenLogprobs() for each in of.news[name]] for of in (engine, one))
            for ours, theirs in zip(told, expected, strict=True):
                np.testing.assert_allclose(np.array(ours.logprobs), np.array(theirs.logprobs), rtol=0, atol=1e-4)
    assert sum(each.num_cached_tokens for news in engine.news.values() for each in news) > 60


def staged(path: Path, **settings: Any) -> TinyEngine:
    return TinyEngine(path, depth=settings["pipeline_parallel_size"], max_num_batched_tokens=16, **settings)


@pytest.mark.parametrize("worker", ["auto", "tests.executor.rank_workers.AsyncWorker"])
def test_two_stages_of_uneven_size_draw_what_one_process_draws(
    worker: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_PP_LAYER_PARTITION", "4,1")
    engine = staged(llama, pipeline_parallel_size=2, worker_cls=worker)
    try:
        assert [len(specs) for specs in engine.executor.collective_rpc("kv_cache_specs")] == [4, 1]
        compare(llama, engine)
    finally:
        engine.executor.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (3, 1), (4, 1)])
def test_stages_and_ranks_draw_what_one_process_draws(llama: Path, stages: int, ranks: int) -> None:
    engine = staged(llama, pipeline_parallel_size=stages, tensor_parallel_size=ranks)
    try:
        compare(llama, engine)
        assert engine.config.scheduler.depth == stages
    finally:
        engine.executor.shutdown()


def test_pages_of_a_stage_are_those_of_its_layers() -> None:
    specs = build_specs(6)
    plan = KVCacheConfig(10, group_layers(specs))
    parts = [plan.of_layers(range(*ends)) for ends in ((0, 4), (4, 6))]
    assert [part.num_tensors for part in parts] == [2, 1]
    assert [[group.layers for group in part.groups] for part in parts] == [[(0, 2), (1, 3)], [(0,), (1,)]]
    assert sum(part.page_bytes for part in parts) == plan.page_bytes


def build_specs(count: int) -> list[Any]:
    kinds = (KVKind.FULL, KVKind.SLIDING_WINDOW)
    return [KVCacheSpec(kinds[n % 2], 16, 64, 2, 4, "float32", 8 * (n % 2)) for n in range(count)]


# --- plans ---


def test_rows_are_divided_among_steps_in_flight_so_that_no_stage_waits() -> None:
    engine = SchedulerHarness(depth=2, num_stages=2)
    for number in range(4):
        engine.add(f"r{number}", [number + 1, 2, 3], max_tokens=20)
    engine.plan()
    engine.collect()
    first, second = engine.plan(), engine.plan()
    for _ in range(12):
        assert len(first.rows) == len(second.rows) == 2 and not {*first.rows.tolist()} & {*second.rows.tolist()}
        engine.collect()
        first, second = second, engine.plan()


def test_a_row_waits_for_its_token_and_chunks_of_a_prompt_do_not_wait() -> None:
    engine = SchedulerHarness(depth=2, num_stages=2, max_num_batched_tokens=8)
    engine.add("long", list(range(1, 25)), max_tokens=3)
    chunks = [engine.plan(), engine.plan()]
    assert [step.total_num_tokens for step in chunks] == [8, 8]
    engine.collect()
    last = engine.plan()
    engine.collect()
    assert last.needs_sample.tolist() == [True] and engine.plan().total_num_tokens == 0
    engine.collect()
    following = engine.plan()
    ((row, position, token),) = following.drawn
    assert (row, position, token) == (0, 24, engine.expected["long"].got[0]) and following.total_num_tokens == 1


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_requests_end_right_with_few_pages_and_as_many_steps_in_flight_as_stages(preemption_mode: Any) -> None:
    pages = {"num_blocks": 24, "num_host_blocks": 24 if preemption_mode == "swap" else 0}
    engine = SchedulerHarness(depth=2, num_stages=2, preemption_mode=preemption_mode, **pages)
    for number in range(8):
        engine.add(f"r{number}", [number + 1, 2, 3, 4, 5] * (1 + number % 3), max_tokens=12)
    engine.run()
    assert engine.num_preemptions


# --- refusals ---


@pytest.mark.parametrize(
    ("split", "layers", "together", "message"),
    [
        ((2, 2), 5, 1, "QUIRE_PP_LAYER_PARTITION=2,2.*5 layers"),
        ((3, 1, 1), 5, 1, "QUIRE_PP_LAYER_PARTITION=3,1,1"),
        ((), 1, 1, "too few layers.*1 layers"),
        ((1, 3), 4, 2, "whole groups of 2"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split: tuple[int, ...], layers: int, together: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        StagePlan(0, 2, split).layers(layers, together)
    assert refused.value.setting == "pipeline_parallel_size"


def test_layers_are_divided_evenly_where_nobody_says_otherwise() -> None:
    assert [StagePlan(stage, 3).layers(8) for stage in range(3)] == [range(3), range(3, 6), range(6, 8)]
    assert [StagePlan(stage, 2).layers(6, together=2) for stage in range(2)] == [range(4), range(4, 6)]


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"enable_lora": True}, "enable_lora"),
        ({"load_format": "sharded_state"}, "load_format"),
    ],
)
def test_what_stages_cannot_do_is_refused_by_its_setting(llama: Path, settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 does not go with") as refused:
        EngineArgs(model=str(llama), pipeline_parallel_size=2, **settings).create_engine_config()
    assert refused.value.setting == setting
