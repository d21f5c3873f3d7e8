"""Every sampling feature is used once beside the steps, and a request that needs one waits alone until it was."""

import threading
from pathlib import Path

import pytest
from tests.oracles.async_platform import AsyncCpuRuntime
from tests.worker.test_device_runner import make_engine
from tests.worker.test_end_to_end import greedy_oracle, greedy_requests, make_prompts, run
from tests.worker.tiny_engine import make_request

from quire.platforms.interface import HostMemory
from quire.sample import features
from quire.sample.feature_batches import FeatureBatches
from quire.sample.features import FEATURES, features_of
from quire.sampling_params import SamplingParams, StructuredOutputsParams, Thinking
from quire.worker.feature_uses import FeatureUses


class LateRuntime(AsyncCpuRuntime):
    """A device whose kernels are compiled when a test says so."""

    loads_kernels_late = True

    def __init__(self) -> None:
        super().__init__()
        self.compiled: set[str] = set()
        self.wanted: list[str] = []
        self.has_settled = threading.Event()

    def is_compiled(self, feature: str) -> bool:
        return feature in self.compiled

    def hasten(self, feature: str) -> None:
        self.wanted.append(feature)

    def settled(self) -> None:
        self.has_settled.set()

    def synchronize(self) -> None:
        if threading.current_thread().name == "first-uses":
            raise RuntimeError("operation not permitted when stream is capturing")


class Batches:
    """Notes what is used."""

    def __init__(self) -> None:
        self.used: list[str] = []

    def run(self, name: str) -> None:
        self.used.append(name)
        if name == features.PENALTIES:
            raise RuntimeError("no memory")


def make() -> tuple[LateRuntime, Batches, FeatureUses]:
    runtime, batches = LateRuntime(), Batches()
    return runtime, batches, FeatureUses(runtime, lambda: batches)  # type: ignore[arg-type, return-value]


def test_what_requests_wait_for_is_used_first_and_each_waits_for_its_own_only() -> None:
    runtime, batches, uses = make()
    top_p, bias = SamplingParams(top_p=0.5), SamplingParams(logit_bias={3: 1.0})
    both = SamplingParams(top_p=0.5, logit_bias={3: 1.0})
    assert uses.is_ready(SamplingParams()) and not uses.is_ready(top_p) and not uses.is_ready(bias)
    waiting = uses.when_ready(bias), uses.when_ready(both)
    assert set(runtime.wanted) == {features.EDITS, features.FILTERS}
    runtime.compiled |= {features.EDITS, features.LOGPROBS}
    uses.begin()
    waiting[0].result(timeout=20)
    assert batches.used[0] == features.EDITS
    assert uses.is_ready(bias) and not uses.is_ready(top_p) and not waiting[1].done()
    runtime.compiled.update(FEATURES)
    waiting[1].result(timeout=20)
    assert runtime.has_settled.wait(20)
    assert sorted(batches.used) == sorted(FEATURES), "each is used once, also after one that failed"
    assert uses.is_ready(top_p) and uses.is_ready(SamplingParams(presence_penalty=1.0))
    assert uses.when_ready(both).done()
    uses.join()


def test_who_waits_when_the_engine_ends_is_let_go() -> None:
    runtime, _, uses = make()
    future = uses.when_ready(SamplingParams(top_k=3))
    uses.begin()
    uses.stop()
    future.result(timeout=20)
    uses.join()
    assert runtime.has_settled.is_set()


def test_a_device_that_loads_nothing_late_has_every_feature() -> None:
    uses = FeatureUses(AsyncCpuRuntime(), lambda: pytest.fail("nothing is to be used ahead"))
    uses.rehearse()
    uses.begin()
    assert uses.is_ready(SamplingParams(top_p=0.5, logprobs=3))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_the_batches_can_use_every_feature(llama: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    engine = make_engine(monkeypatch, llama)
    sampler = engine.executor._worker.runner._sampler
    batches = FeatureBatches(sampler, 384, HostMemory(), mode)
    for name in FEATURES:
        batches.run(name)
        batches.run(name)
    assert not batches._sampler.table.objects
    engine.executor.shutdown()


NEEDS = {
    features.FILTERS: {"top_k": 3},
    features.PENALTIES: {"frequency_penalty": 0.1},
    features.LOGPROBS: {"logprobs": 0},
    features.MANY_LOGPROBS: {"logprobs": -1},
    features.NAMED_LOGPROBS: {"logprob_token_ids": [3]},
    features.PROMPT_LOGPROBS: {"prompt_logprobs": 0},
    features.EDITS: {"min_tokens": 2},
    features.ALLOWED: {"allowed_token_ids": [3]},
    features.FORCED: {"thinking_token_budget": 4, "thinking": Thinking(end=[3])},
    features.FORMS: {"structured_outputs": StructuredOutputsParams(regex="a")},
}


@pytest.mark.parametrize("name", NEEDS)
def test_parameters_tell_which_feature_they_need(name: str) -> None:
    assert features_of(SamplingParams(temperature=0.7, **NEEDS[name])) == [name]
    assert features_of(SamplingParams(temperature=0.7, seed=3, max_tokens=5)) == []


def test_a_request_waits_for_its_feature_while_others_get_tokens(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.oracles.async_platform.AsyncCpuRuntime", LateRuntime)
    engine = make_engine(monkeypatch, llama)
    runtime = engine.platform.last_runtime
    assert isinstance(runtime, LateRuntime)
    prompts = make_prompts()
    plain = greedy_requests(prompts)
    late = [make_request("late", prompts[0], logprobs=2)]
    runner = engine.executor._worker.runner
    assert runner.is_prepared(plain[0].sampling_params) and not runner.is_prepared(late[0].sampling_params)
    assert run(engine, plain) == greedy_oracle(llama, prompts)
    waiting = runner.prepare(late[0].sampling_params)
    runtime.compiled.update(FEATURES)
    for future in waiting:
        future.result(timeout=60)
    assert runner.is_prepared(late[0].sampling_params)
    assert run(engine, late) == greedy_oracle(llama, prompts)[:1]
    engine.executor.shutdown()


def test_a_server_runs_its_first_sizes_before_it_is_ready_and_answers_as_without(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.oracles.async_platform.AsyncCpuRuntime", LateRuntime)
    engine = make_engine(monkeypatch, llama)
    graphs = engine.executor._worker.runner._graphs
    shape = graphs.mixed_shape(32, 5, 1, 32, True)
    assert shape not in graphs._captures.ready
    engine.executor.prepare_to_serve(wait=True)
    assert shape in graphs._captures.ready and graphs.num_captured == 0
    prompts = make_prompts()
    assert run(engine, greedy_requests(prompts)) == greedy_oracle(llama, prompts)
    engine.executor.shutdown()
