"""A scheduler with drafts on a clock of its own: what speculation gains or loses for a device whose times are formulas.

Tokens are numbers of (row, position), guesses are right with a chance that a test chooses, and a step takes as long as the test
says. So the cost of wrong guesses and of trying them is counted exactly, whatever the machine does meanwhile.
"""

import dataclasses
from collections.abc import Callable
from random import Random

import numpy as np

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind, group_layers
from quire.config.speculative import SpeculativeConfig
from quire.core.drafting import Drafting
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.core.request_state import Request
from quire.core.scheduler import Scheduler
from quire.request import EngineRequest
from quire.sampling_params import SamplingParams

VOCAB = 1000


@dataclasses.dataclass
class Device:
    """How long things take, in milliseconds.

    Attributes:
        step_ms: of a step, by its tokens and its rows.
        draft_ms: of one guess for each of so many rows.
        noise: times vary by up to this share, up and down.
        chance: how often a guess is right whose predecessors are.
        host_ms: between a step whose end is waited for and the next plan; else the host works while the device does.
    """

    step_ms: Callable[[int, int], float]
    draft_ms: Callable[[int], float] = lambda rows: 0.0
    noise: float = 0.0
    chance: float = 0.0
    host_ms: float = 0.0


def truth(row: int, position: int) -> int:
    return (7919 * position + 104729 * row) % VOCAB


class Guesser:
    """Guesses for a request, as an n-gram's would come: as many as may be."""

    def __init__(self, run: "DraftClock", request: Request) -> None:
        self._run, self._request, self._count = run, request, 0

    def extend(self, token_ids: list[int]) -> None:
        self._count += len(token_ids)

    def propose(self, most: int) -> list[int]:
        return self._run.guess(self._request.row, self._count, most)


class DraftClock:
    """Requests with or without speculation, on a clock.

    Attributes:
        now_ms: what it shows.
        steps: how many tokens each step had and how many guesses were asked for behind it.
    """

    def __init__(self, device: Device, config: SpeculativeConfig | None, max_num_seqs: int, seed: int = 0) -> None:
        self.device, self.now_ms, self._random, self._names = device, 0.0, Random(seed), 0
        self.steps: list[tuple[int, int]] = []
        scheduler = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1024,
            max_model_len=4096,
            async_scheduling=device.host_ms > 0.0,
        )
        spec = KVCacheSpec(KVKind.FULL, 16, bytes_per_token=16)
        kv_config = KVCacheConfig(max_num_seqs * 300, group_layers([spec]), 0)
        self.scheduler = Scheduler(
            scheduler,
            CacheConfig(block_size=16, enable_prefix_caching=False),
            kv_config,
            clock=lambda: self.now_ms / 1e3,
        )
        if config is not None:
            self.scheduler.speculate(config)
            if type(self.scheduler.drafting) is Drafting:
                self.scheduler.drafting._make_proposer = lambda request: Guesser(self, request)

    def guess(self, row: int, position: int, count: int) -> list[int]:
        return [
            truth(row, position + number) if self._random.random() < self.device.chance else VOCAB + 1
            for number in range(count)
        ]

    def run(self, num_requests: int, num_tokens: int, prompt: int = 16) -> float:
        """Answer requests that come together; the milliseconds until the last one has ended."""
        began = self.now_ms
        for _ in range(num_requests):
            self._names += 1
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            self.scheduler.add_request(EngineRequest(f"r{self._names}", [1] * prompt, sampling_params=params))
        while self.scheduler.has_work():
            step = self.scheduler.schedule()
            if step.total_num_tokens:
                self.scheduler.catch_up()
                waits = self.scheduler.drafting.waits(self.scheduler.flights)
                self.scheduler.update(step, self._execute(step))
                if waits and self.device.host_ms:
                    self._time(self.device.host_ms)
        return self.now_ms - began

    def _time(self, ms: float) -> float:
        ms *= 1.0 + self.device.noise * (2.0 * self._random.random() - 1.0)
        self.now_ms += ms
        return ms

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append((step.total_num_tokens, step.num_drafts))
        rows = step.rows[step.needs_sample]
        tokens, output = [], ModelRunnerOutput(step.step_id, rows, rows)
        batch = self.scheduler._batch
        for row in rows.tolist():
            position = int(batch.known[row])
            right = 0
            drafts = step.drafts.get(row, [])
            while right < len(drafts) and drafts[right] == truth(row, position + right):
                right += 1
            tokens.append(truth(row, position))
            if right:
                output.accepted[row] = [truth(row, position + 1 + number) for number in range(right)]
            if step.num_drafts > 0:
                output.proposals[row] = self.guess(row, position + 1 + right, step.num_drafts)
        output.token_ids = np.array(tokens, dtype=np.int32)
        output.step_ms = self._time(self.device.step_ms(step.total_num_tokens, len(step.rows)))
        if step.num_drafts > 0 and len(rows):
            output.draft_ms = self._time(step.num_drafts * self.device.draft_ms(len(rows)))
        return output


def gain(
    device: Device, config: SpeculativeConfig, num_requests: int, num_tokens: int = 256, rounds: int = 1, seed: int = 0
) -> float:
    """How many times faster requests are answered with speculation, the engine having started without knowing anything."""
    times = [
        sum(DraftClock.run(clock, num_requests, num_tokens) for _ in range(rounds))
        for clock in (DraftClock(device, None, num_requests, seed), DraftClock(device, config, num_requests, seed))
    ]
    return times[0] / times[1]
