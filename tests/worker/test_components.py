"""Parts of a runner: a platform's own take the place of the usual ones, and what is no such part is refused."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.worker.test_end_to_end import greedy_requests, make_prompts, run
from tests.worker.tiny_engine import TinyEngine

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.platforms.cpu import CpuPlatform
from quire.sample.sampler import Sampler
from quire.worker.batch_state import BatchState
from quire.worker.components import RunnerComponents, resolve_components


class CountingState(BatchState):
    """Counts the rows that it was given."""

    num_added = 0

    def add_row(self, request: object) -> None:
        CountingState.num_added += 1
        super().add_row(request)  # type: ignore[arg-type]


class CountingSampler(Sampler):
    """Counts what it sampled."""

    num_steps = 0

    def sample(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        CountingSampler.num_steps += 1
        return super().sample(*args, **kwargs)  # type: ignore[arg-type]


OWN = {"batch_state": f"{__name__}:CountingState", "sampler": f"{__name__}:CountingSampler"}


def test_the_usual_parts_are_taken_where_a_platform_names_none() -> None:
    assert resolve_components({}) == RunnerComponents()


def test_a_platforms_parts_do_the_work_and_give_the_same_tokens(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts()
    expected = run(TinyEngine(llama), greedy_requests(prompts))

    def components(self: CpuPlatform, config: EngineConfig) -> Mapping[str, str]:
        return OWN

    monkeypatch.setattr(CpuPlatform, "runner_components", components)
    CountingState.num_added = CountingSampler.num_steps = 0
    assert run(TinyEngine(llama), greedy_requests(prompts)) == expected
    assert CountingState.num_added >= len(prompts) and CountingSampler.num_steps > 0


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"samplers": f"{__name__}:CountingSampler"}, "did you mean 'sampler'"),
        ({"sampler": f"{__name__}:CountingState"}, "is not a subclass of quire.sample.sampler.Sampler"),
        ({"sampler": "quire.nowhere:Sampler"}, "cannot be imported"),
    ],
)
def test_what_is_no_part_of_a_runner_is_refused(paths: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_components(paths)
