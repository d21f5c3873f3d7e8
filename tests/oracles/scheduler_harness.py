"""Drives a scheduler with the hash model behind it, and checks after every turn what must always hold.

Every emitted token is compared with the oracle's stream at once; every page with the tables that hold it.
"""

import dataclasses
from collections import Counter
from random import Random
from typing import Literal

from tests.oracles.free_pages import free_blocks
from tests.oracles.hash_model import MAX_IN_FLIGHT, Faults, HashExecutor, HashModel, stop_ids
from tests.oracles.slow_preparer import SlowPreparer

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig, group_layers
from quire.config.speculative import SpeculativeConfig
from quire.core.block_pool import NULL_BLOCK
from quire.core.drafting import Drafting
from quire.core.output import SchedulerOutput
from quire.core.preparations import Preparations
from quire.core.queue_bounds import Load
from quire.core.request_queue import FairQueue
from quire.core.request_state import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason
from quire.sampling_params import SamplingParams


@dataclasses.dataclass
class Expected:
    """A request that the scheduler accepted: what it must emit, and what it has emitted."""

    request: EngineRequest
    stream: list[int]
    got: list[int]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = -1
    outputs: list[EngineCoreOutput] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Guessing:
    """How drafts are made: tokens of the oracle (or of `stream`), each with some chance of being wrong."""

    num_tokens: int = 4
    max_drafts: int = 16
    accuracy: float = 0.7
    silence: float = 0.2
    is_adaptive: bool = False
    stream: list[int] | None = None
    random: Random = dataclasses.field(default_factory=lambda: Random(3))


class KnowingProposer:
    """Guesses one request's tokens from its stream."""

    def __init__(self, guessing: Guessing, stream: list[int], request: Request) -> None:
        self._guessing, self._stream, self._start = guessing, stream, request.num_prompt_tokens
        self._count = 0

    def extend(self, token_ids: list[int]) -> None:
        self._count += len(token_ids)

    def propose(self, most: int) -> list[int]:
        guessing, random = self._guessing, self._guessing.random
        if random.random() < guessing.silence:
            return []
        position = self._count - self._start
        guess = (self._stream[position : position + most] + [1] * most)[: random.randint(1, most)]
        return [token if random.random() < guessing.accuracy else token + 1 for token in guess]


class SchedulerHarness:
    """A scheduler, a hash model, and everything they have promised so far.

    Args:
        depth: steps in flight when the next one is planned: 1 collects at once, 2 plans one step ahead.
    """

    def __init__(
        self,
        *,
        model: HashModel | None = None,
        block_size: int = 4,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        depth: int = 1,
        faults: Faults | None = None,
        policy: Literal["fcfs", "priority", "fair"] = "fcfs",
        preemption_mode: Literal["recompute", "swap"] = "recompute",
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 64,
        min_common_tokens: int = 16,
        preparer: SlowPreparer | None = None,
        num_adapters: int = 0,
        guessing: Guessing | None = None,
        **settings: int | float | bool,
    ) -> None:
        self.model = model or HashModel()
        self.executor = HashExecutor(model=self.model, block_size=block_size, faults=faults)
        self.kv_config = KVCacheConfig(num_blocks, group_layers(self.executor.kv_cache_specs()), num_host_blocks)
        self.executor.initialize(self.kv_config)
        config = SchedulerConfig(
            policy=policy,
            preemption_mode=preemption_mode,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            async_scheduling=depth > 1,
            **settings,  # type: ignore[arg-type]
        )
        cache = CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching)
        self.scheduler = Scheduler(config, cache, self.kv_config, hash_key=b"test", min_common_tokens=min_common_tokens)
        self.preparer = preparer
        if preparer is not None:
            self.scheduler.waiting.preparations = Preparations(preparer, num_adapters)
        self.config = config
        self.depth = depth
        if guessing is not None:
            scheduler = self.scheduler
            scheduler.drafting = Drafting(
                SpeculativeConfig(
                    num_speculative_tokens=guessing.num_tokens, enable_adaptive_verification=guessing.is_adaptive
                ),
                scheduler._batch,
                scheduler.kv,
                scheduler.cost_model,
                scheduler._stats.drafts,
                guessing.max_drafts,
                overlaps=depth > 1,
                make_proposer=lambda request: KnowingProposer(
                    guessing, guessing.stream or self.expected[request.request_id].stream, request
                ),
            )
        self.expected: dict[str, Expected] = {}
        self.in_flight: list[SchedulerOutput] = []
        self.steps: list[SchedulerOutput] = []
        self.num_preemptions = 0
        self.num_samples = 0

    # Driving.

    def add(self, request_id: str, prompt: list[int], **fields: object) -> Expected:
        """Add a request; fields of EngineRequest, or of SamplingParams."""
        names = EngineRequest.__struct_fields__
        own = {name: fields.pop(name) for name in list(fields) if name in names}
        params = SamplingParams(**{"max_tokens": 8, **fields})  # type: ignore[arg-type]
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            **{"sampling_params": params, **own},  # type: ignore[arg-type]
        )
        return self.add_request(request)

    def add_request(self, request: EngineRequest) -> Expected:
        """Add a request and remember what it has to emit."""
        self.scheduler.add_request(request)
        room = self.config.max_model_len - len(request.prompt_token_ids)
        params = request.sampling_params
        stream = [] if params is None else self.model.oracle(request.prompt_token_ids, params, request.seed, room)
        self.expected[request.request_id] = Expected(request, stream, list(request.resumed_token_ids))
        return self.expected[request.request_id]

    def abort(self, request_ids: list[str]) -> None:
        """Abort; each living request answers exactly once."""
        living = [name for name in dict.fromkeys(request_ids) if name in self.expected and not self._is_done(name)]
        outputs = self.scheduler.abort(request_ids)
        assert [output.request_id for output in outputs] == living
        self.take(EngineCoreOutputs(outputs=outputs))
        self.check()

    def plan(self) -> SchedulerOutput:
        """Schedule, and start the step if it computes anything."""
        step = self.scheduler.schedule()
        self.take(EngineCoreOutputs(outputs=self.scheduler.take_ended()))
        self.steps.append(step)
        self._check_step(step)
        if step.total_num_tokens:
            self.executor.execute(step)
            self.in_flight.append(step)
        self.check()
        return step

    def collect(self) -> EngineCoreOutputs:
        """Collect the oldest step."""
        step = self.in_flight.pop(0)
        if step.step_id % 3:  # an engine always does; what it leaves undone is done elsewhere
            self.scheduler.catch_up()
        result = self.executor.collect()
        self.num_samples += len(result.rows)
        outputs = self.scheduler.update(step, result)
        self.take(outputs)
        self.check()
        return outputs

    def step(self) -> SchedulerOutput:
        """One turn of the engine's loop."""
        while len(self.in_flight) >= MAX_IN_FLIGHT:
            self.collect()
        step = self.plan()
        while len(self.in_flight) >= self.depth or (self.in_flight and not step.total_num_tokens):
            self.collect()
        return step

    def run(self, max_steps: int = 2000) -> None:
        """Turn until nothing is left; then everything must have ended and every page be free."""
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                break
            was_idle = not self.in_flight
            step = self.step()
            if was_idle and not step.total_num_tokens and self.scheduler.waiting.preparations.wait(1.0):
                continue
            assert step.total_num_tokens or not was_idle, "nothing runs although requests wait"
        assert not self.scheduler.has_unfinished(), f"unfinished after {max_steps} steps"
        while self.in_flight:
            self.collect()
        self.check_idle()

    # Checking.

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Compare every token with the oracle's."""
        assert len(outputs.plain_ids) == len(outputs.plain_tokens)
        for request_id, token in zip(outputs.plain_ids, outputs.plain_tokens, strict=True):
            self._take_tokens(request_id, [token])
        for output in outputs.outputs:
            self._take_tokens(output.request_id, output.new_token_ids)
            expected = self.expected[output.request_id]
            expected.outputs.append(output)
            if output.num_cached_tokens >= 0:
                assert expected.num_cached_tokens < 0, "cached tokens are told once"
                expected.num_cached_tokens = output.num_cached_tokens
            if output.finish_reason is not None:
                self._take_finish(expected, output)
        if outputs.stats is not None:
            self.num_preemptions += outputs.stats.num_preemptions

    def _take_tokens(self, request_id: str, token_ids: list[int]) -> None:
        assert not self._is_done(request_id), f"{request_id} speaks after its end"
        expected = self.expected[request_id]
        expected.got += token_ids
        assert expected.got == expected.stream[: len(expected.got)], f"{request_id} strays from the oracle"

    def _take_finish(self, expected: Expected, output: EngineCoreOutput) -> None:
        expected.finish, expected.stop_reason = output.finish_reason, output.stop_reason
        params = expected.request.sampling_params
        if params is None or output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        assert expected.got == expected.stream, f"{output.request_id} ended early"
        last = expected.got[-1]
        stops = last in stop_ids(params) and len(expected.got) >= params.min_tokens
        assert output.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
        is_eos = last in params.eos_token_ids and not params.ignore_eos
        assert output.stop_reason == (last if stops and not is_eos else None)

    def _is_done(self, request_id: str) -> bool:
        return self.expected[request_id].finish is not None

    def _check_step(self, step: SchedulerOutput) -> None:
        assert step.total_num_tokens == int(step.num_scheduled_tokens.sum()) <= self.config.max_num_batched_tokens
        assert len(set(step.rows.tolist())) == len(step.rows) <= self.config.max_num_seqs
        assert (step.num_scheduled_tokens > 0).all()
        for new in step.new_requests:
            if self.preparer is not None and new.sampling_params and new.sampling_params.structured_outputs is not None:
                assert self.preparer.form_of(new.sampling_params) in self.preparer.known, "a step waits for a form"

    def check(self) -> None:
        """The invariants that hold between any two calls."""
        scheduler = self.scheduler
        pool, batch = scheduler.kv.pool, scheduler._batch
        holders = self._holders()
        references = Counter(block for holder in holders for table in holder.block_ids for block in table)
        hits = [group.shared for group in scheduler.waiting.prefixes._groups.values() if group.shared]
        references.update(block for hit in hits for table in hit.block_ids for block in table)
        del references[NULL_BLOCK]
        for block in range(1, pool.num_blocks):
            assert pool.reference_count(block) == references[block], f"page {block}"
        free = free_blocks(pool)
        assert sorted(free) == [block for block in range(1, pool.num_blocks) if block not in references]
        assert len(free) == pool.num_free and pool.num_free + len(references) == pool.num_usable
        for request in holders:
            self._check_row(request, references)
        used_rows = [request.row for request in batch.requests if request is not None]
        assert sorted(used_rows + batch._free_rows) == list(range(self.config.max_num_seqs))
        assert set(scheduler._leaving) == {r.row for r in holders} - set(batch.order().tolist())
        prefilling = sum(int(batch.computed[row] < batch.prefill_end[row]) for row in batch.order().tolist())
        assert batch.num_prefilling == prefilling
        self._check_queue()

    def _holders(self) -> list[Request]:
        return [request for request in self.scheduler._batch.requests if request is not None]

    def _check_row(self, request: Request, references: Counter[int]) -> None:
        batch, row, size = self.scheduler._batch, request.row, self.kv_config.block_size
        assert batch.collected[row] <= batch.computed[row] <= batch.length[row]
        assert batch.collected[row] <= batch.known[row] <= batch.length[row]
        assert batch.computed[row] <= batch.capacity[row] == len(request.block_ids[0]) * size
        flights = sum(row in step.rows for step in self.in_flight)
        assert flights == batch.in_flight[row]
        assert flights or request.status is RequestStatus.RUNNING
        for table in request.block_ids:
            assert len(table) == len(request.block_ids[0])
            # Pages behind the window may be given up while the step that wrote them is in flight: steps run in order.
            assert NULL_BLOCK not in table[int(batch.computed[row]) // size :]
            for block in table[int(batch.collected[row]) // size :]:
                assert block == NULL_BLOCK or references[block] == 1, f"page {block} is written and shared"

    def _check_queue(self) -> None:
        scheduler = self.scheduler
        waiting = [r for r in scheduler._requests.values() if r.status in (RequestStatus.WAITING, RequestStatus.HELD)]
        assert scheduler.num_waiting == len(waiting)
        assert scheduler.waiting.load.total.num_tokens == sum(len(request.token_ids) for request in waiting)
        assert all(not request.block_ids and request.row < 0 for request in waiting)
        swapped = [block for r in waiting for table in r.host_block_ids for block in table if block]
        host = scheduler.kv.host_pool
        assert len(set(swapped)) == len(swapped) == host.num_usable - host.num_free
        assert {name for name in self.expected if not self._is_done(name)} == set(scheduler._requests)
        for follower, leader in scheduler.waiting.prefixes._leader_of.items():
            assert follower.status is RequestStatus.HELD and leader.status is RequestStatus.RUNNING
            assert leader.rank < follower.rank and follower in scheduler.waiting.prefixes._followers[leader]
        assert set(scheduler.waiting.prefixes._page_of) == set(scheduler.waiting.prefixes._leader_at.values())
        assert all(leader.status is RequestStatus.RUNNING for leader in scheduler.waiting.prefixes._page_of)

    def check_idle(self) -> None:
        """With no request left, everything is free and nothing remembers anybody."""
        scheduler = self.scheduler
        assert not scheduler.has_work() and scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_usable
        assert scheduler.kv.host_pool.num_free == scheduler.kv.host_pool.num_usable
        load = scheduler.waiting.load
        assert load.total == Load() and not load._tenants
        queue = getattr(scheduler.waiting._queue, "_queue", scheduler.waiting._queue)
        assert not isinstance(queue, FairQueue) or not (queue._running or queue._tenants)
        assert not scheduler._leaving and not scheduler.waiting.prefixes._groups
        assert not len(scheduler.waiting.preparations) and not scheduler.waiting.preparations._ahead
        assert not len(scheduler.waiting.prefixes) and not scheduler.waiting.prefixes._page_of
        assert all(expected.finish is not None for expected in self.expected.values())
