"""The scheduler: who computes how many tokens in the next step, on which pages, and what a collected step means.

One rule: a request has computed tokens and tokens, and each step gives it some of the difference. Prefill, chunked
prefill, decode, and resumption after preemption are all this rule. Knows nothing of tensors, tokenizers or processes.

`schedule` may be called again before earlier steps are collected (`update`). A request's row and pages are released only
when no step in flight names the row (`_release`, the one place that does it): an abort, a late end of sequence or a
preemption that meets a step in flight waits for it. Freeing twice is thereby impossible by construction.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from quire.config import CacheConfig, SchedulerConfig
from quire.config.kv_spec import KVCacheConfig
from quire.config.speculative import SpeculativeConfig
from quire.core.admission import AdmissionDelay, check_fits, check_settings
from quire.core.common_prefix import MIN_COMMON_TOKENS
from quire.core.cost_model import CostModel
from quire.core.deadlines import Deadlines
from quire.core.drafting import Drafting, NoDrafting
from quire.core.encoding import Encoding
from quire.core.further_tokens import jump, take_accepted
from quire.core.inspection import Inspection
from quire.core.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from quire.core.kv_connector import KVConnectorScheduler
from quire.core.model_drafting import ModelDrafting
from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.core.page_transfers import PageTransfers
from quire.core.policies import policy_class
from quire.core.preemption import PageSaver
from quire.core.prefix_hash import PrefixHasher
from quire.core.publication import PendingPages
from quire.core.queue_bounds import QueueBounds
from quire.core.request_state import Request, RequestStatus
from quire.core.running import RunningBatch
from quire.core.step import (
    NO_ROWS,
    PendingDiff,
    StepInFlight,
    build_error,
    build_flight,
    build_new_request,
    build_output,
    find_errors,
    grow_by_one,
    keep_prompt_logprobs,
    without,
)
from quire.core.step_budget import StepBudget
from quire.core.step_stats import StepStats
from quire.core.stop import compute_finish
from quire.core.timelines import Timelines
from quire.core.waiting import WaitingRoom
from quire.errors import EngineError, RequestError
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, Pooled, SchedulerStats


class Scheduler:
    """Plans steps and takes in their results.

    Args:
        config, cache_config: budgets, policy, preemption; prefix caching. kv_config: pages and groups (`kv_planner`).
        max_model_len: tokens a request may have in all; by default the configuration's.
        hash_key: the prefix cache's secret; by default drawn anew, so that hashes differ by process.
        clock: seconds, comparable with `EngineRequest.arrival_time`; read for `delay_factor` and timelines.
        min_common_tokens: a prompt waits for another that computes at least this much of it.

    Raises:
        ConfigError: settings that cannot work together.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_config: KVCacheConfig,
        *,
        max_model_len: int | None = None,
        hash_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        min_common_tokens: int = MIN_COMMON_TOKENS,
    ) -> None:
        self._config = config
        self._max_model_len = max_model_len or config.max_model_len
        check_settings(config, self._max_model_len, kv_config.num_host_blocks)
        self.cost_model = CostModel()
        algorithm, key = cache_config.prefix_caching_hash_algo, hash_key or secrets.token_bytes(32)
        hasher = PrefixHasher(key, kv_config.block_size, algorithm) if cache_config.enable_prefix_caching else None
        self.kv = KVCacheManager(kv_config, hasher)
        self._batch = RunningBatch(config.max_num_seqs, kv_config.block_size)
        self._pages = PendingPages(self.kv, self._batch)
        self._timelines = Timelines(config.record_timelines, clock)
        self._policy = policy_class(config.policy)(config)
        self.waiting = WaitingRoom(self._policy.make_queue(), self.kv, min_common_tokens, self._timelines)
        self._saver = PageSaver(self.kv, swaps=config.preemption_mode == "swap")
        cache_tokens = self.kv.pool.num_usable * self.kv.block_size
        self.bounds = QueueBounds(config, self._policy, self.waiting.load, self.cost_model, cache_tokens, clock)
        self._deadlines = Deadlines(self.cost_model, config.max_num_batched_tokens, clock)
        self._delay = AdmissionDelay(config.delay_factor, clock)
        self._hindrance, self._has_shortage = "", False
        self._budget = StepBudget(config, self._policy, self._batch, self.cost_model, self._timelines)
        self.drafting = NoDrafting()
        self.encoding = Encoding()
        self._requests: dict[str, Request] = {}
        self._leaving: dict[int, Request] = {}
        self.flights: deque[StepInFlight] = deque()
        self._diff = PendingDiff()
        self._dropped: set[int] = set()
        self._blocked: tuple[Request, int] | None = None
        self._num_arrivals = self._next_step_id = 0
        self._refused: list[EngineCoreOutput] = []
        self._stats = StepStats(self.kv, lambda: self.waiting.num_held)
        self.inspection = Inspection(self.stats, self._requests, self._batch, self.kv, self._timelines)

    def speculate(self, config: SpeculativeConfig) -> None:
        """Guess tokens from now on, and verify several a step. Raises ConfigError: this model's tokens cannot be taken back."""
        most = config.drafts_of_step(self._config.max_num_seqs)
        parts = (self._batch, self.kv, self.cost_model, self._stats.drafts, most)
        kind = ModelDrafting if config.has_model else Drafting
        self.drafting = kind(config, *parts, overlaps=self._config.async_scheduling, clock=self._timelines.clock)

    def connect(self, connector: KVConnectorScheduler) -> None:
        """Take pages that a connector has, and give it those that are computed."""
        self.waiting.preparations.transfers = PageTransfers(connector, self._batch, self.kv.block_size, self.cost_model)

    # What the engine core asks.

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return self._batch.num_active + len(self._leaving)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that are held back."""
        return len(self.waiting)

    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    def unfinished_ids(self) -> list[str]:
        """Ids of requests that have not ended, in order of arrival."""
        return list(self._requests)

    def has_work(self) -> bool:
        """Whether there is anything to schedule or to collect."""
        return bool(self._requests or self.flights or self._leaving)

    def stats(self, *, since_start: bool = True) -> SchedulerStats:
        """Gauges of this moment, and counters since the scheduler was made; or since this was asked not `since_start` last."""
        return self._stats.tell(self.num_running, self.num_waiting, since_start=since_start)

    def add_request(self, source: EngineRequest, *, again: bool = False) -> None:
        """Take in a request. One that comes `again`, is resumed, or goes on with another was accepted before: it finds room.

        Raises:
            RequestError: it can never be served, or its id is in use.
            CapacityError: the queue is full.
        """
        if source.request_id in self._requests:
            raise RequestError(f"request_id {source.request_id!r} is in use", param="request_id")
        check_fits(source, self.kv, self._max_model_len, self._config.max_open_tokens)
        self.encoding.check(source)
        if not (again or source.resumed_token_ids or source.is_continuation):
            self.bounds.check(source)
        request = Request(source, self._num_arrivals, self._max_model_len)
        self._num_arrivals += 1
        request.rank = (source.is_background, *self._policy.rank(source, request.arrival))
        request.cost = len(request.token_ids)
        self._requests[request.request_id] = request
        self.waiting.arrive(request)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests at once; unknown ids are passed over. What a step in flight uses is released when it is collected."""
        outputs: list[EngineCoreOutput] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ABORT)
                outputs.append(EngineCoreOutput(request_id=request_id, finish_reason=FinishReason.ABORT))
        return outputs

    def reset_prefix_cache(self, *, drop_running: bool = False) -> None:
        """Forget all cached prefixes, for example because the weights have changed. Running requests keep their pages, which
        others will not find, or (`drop_running`, with no step in flight) are computed anew."""
        for request in list(self._requests.values()) if drop_running else ():
            if request.status is RequestStatus.RUNNING:
                request.was_lost = True  # nothing of it is kept
                self._preempt(request)
            self._saver.drop_saved(request)
        self.waiting.forget_prefixes()
        self.kv.reset_prefix_cache()
        self.encoding.reset()
        self._timelines.cache_was_reset()
        for request in self._requests.values():
            request.publishes = not (request.block_ids or request.is_swapped)

    # Planning.

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. One without rows needs neither execution nor `update`; nothing in it is lost."""
        self._has_shortage = False
        if self.drafting.waits(self.flights):
            return self._launch(NO_ROWS, NO_ROWS)
        self.waiting.take_ready()
        for request, why in self.waiting.preparations.take_refused():
            self._refuse(request, why, param="model")
        self._make_way()
        self._dropped.clear()
        rows, counts, budget = self._budget.divide(self.waiting, self.encoding)
        counts, budget = self.drafting.join(rows, counts, budget, self._budget.limit.tokens, bool(self.flights))
        rows, counts = self._ensure_pages(rows, counts)
        if budget > 0:
            rows, counts = self._fill(rows, counts, budget)
        self._timelines.queue_stands(self.waiting.next(), self._hindrance)
        return self._launch(rows, counts)

    def take_ended(self) -> list[EngineCoreOutput]:
        """What is to be told of requests that `schedule` has ended: their deadline was missed, or their adapter cannot be had."""
        refused, self._refused = self._refused, []
        return refused

    def _refuse(self, request: Request, why: str, **refusal: str | bool) -> None:
        self._end(request, FinishReason.ERROR)
        self._refused.append(build_error(request, why, **refusal))

    def catch_up(self) -> None:
        """Do what need not delay a step: publish pages that collected steps have completed, and name those of prompts that
        steps in flight compute. Meant for while the device works; what is left undone is done when it is needed."""
        self._pages.publish()
        self.drafting.look_ahead()
        for flight in self.flights:
            for row in flight.prefill_rows:
                self.kv.name_pages(self._batch.request(row))

    def _make_way(self) -> bool:
        """Whether a background request that ran gives way to another kind of request that finds no row, or too few pages."""
        head = self.waiting.next()
        if head is None or head.source.is_background or self._leaving or not self._batch.num_active:
            return False
        lowest, is_without_row = self._batch.lowest_ranked(), self._batch.num_free_rows <= len(self.waiting.prefixes)
        if not lowest.source.is_background or not (is_without_row or self._is_blocked(head)):
            return False
        cause = "rows" if is_without_row else "pages"
        self._timelines.preempted(lowest, int(self._batch.collected[lowest.row]), head, cause)
        self._preempt(lowest)
        return True

    def _fill(self, rows: IntArray, counts: IntArray, budget: int) -> tuple[IntArray, IntArray]:
        """The step's rows with those of requests that start in it or, if nobody can, of prompts that sat it out for them."""
        while self._may_admit():
            new_rows, new_counts = self._admit_waiting(rows, counts, budget)
            if len(new_rows):
                return self._budget.gather(rows, counts, new_rows, new_counts)
            if not self._make_way():
                break
            rows, counts = without(rows, counts, self._dropped)
        if self._leaving or self._has_shortage or not len(self._budget.aside[0]):
            return rows, counts
        return self._ensure_pages(*self._budget.with_aside(rows, counts, budget, self._dropped, self.encoding))

    def _may_admit(self) -> bool:
        """Whether requests that wait may start in this step; `_hindrance` says what keeps them from it."""
        self._hindrance = "pages" if self._has_shortage else "delay"
        head = self.waiting.next()
        if head is None or self._has_shortage:
            return False
        return self._delay.may_admit(head.source.arrival_time, is_idle=not self._batch.num_active)

    def _ensure_pages(self, rows: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Pages for every row's tokens, taken from lower-ranked requests if need be; rows that got none are left out."""
        batch = self._batch
        ends = self.drafting.ends_of_pages(rows, batch.computed[rows] + counts)
        short = (ends > batch.capacity[rows]).nonzero()[0]
        if len(short) > 1 and grow_by_one(self.kv, batch, self._diff, rows[short], ends[short]):
            return rows, counts
        for index in short.tolist():
            row = int(rows[index])
            if row not in self._dropped and not self._grow_or_preempt(batch.request(row), int(ends[index])):
                self._dropped.add(row)
        if self._dropped:
            self._timelines.stand(batch, self._dropped, "pages")
            rows, counts = without(rows, counts, self._dropped)
        return rows, counts

    def _grow_or_preempt(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens`. False where the request has to sit this step out, or gave way itself."""
        row = request.row
        self._pages.publish_row(row)
        self.kv.free_behind_window(request, int(self._batch.collected[row]))
        while True:
            grown = self.kv.grow(request, num_tokens)
            if grown is not None:
                self._diff.new_blocks += [(row, group, blocks) for group, blocks in enumerate(grown)]
                self._batch.capacity[row] = len(request.block_ids[0]) * self.kv.block_size
                return True
            self._has_shortage = True
            if self.waiting.prefixes.drop_references():
                continue
            if self._leaving:
                return False  # Pages are on their way back: they come when the steps in flight are collected.
            victim = self._batch.lowest_ranked()
            self._timelines.preempted(victim, int(self._batch.collected[victim.row]), request)
            self._preempt(victim)
            if victim is request:
                return False

    def _preempt(self, request: Request) -> None:
        """Make a running request give its row and pages back: now, or when no step in flight names it."""
        self._stats.count_preemption(request)
        self._dropped.add(request.row)
        self._batch.deactivate(request)
        request.status = RequestStatus.PREEMPTING
        self.waiting.lose_leader(request)
        self._leave(request)

    def _admit_waiting(self, rows: IntArray, counts: IntArray, budget: int) -> tuple[IntArray, IntArray]:
        """Give rows to waiting requests, in the queue's order, until one of them does not fit: these rows and their tokens."""
        self._pages.publish()
        new_rows, new_counts = list[int](), list[int]()
        swap_ins_before = len(self._diff.swap_ins)
        max_partial = self._config.max_num_partial_prefills
        num_partial = self._batch.count_partial(rows, counts) if max_partial > 0 else 0
        # A request that waits for a common prefix finds its row free.
        while budget > 0 and self._batch.num_free_rows > len(self.waiting.prefixes):
            request = self.waiting.next()
            running = self._batch.num_active
            if request is None or (running and not self._policy.may_admit(request.source, running)):
                self._hindrance = "delay"
                break
            most = self._budget.most_whole(int(counts.sum()) + sum(new_counts))
            count = self._admit(request, budget, most, may_be_partial=max_partial <= 0 or num_partial < max_partial)
            if request.status in (RequestStatus.HELD, RequestStatus.ENDED):
                continue
            if count == 0:
                break
            num_partial += request.num_computed_tokens + count < len(request.token_ids)
            new_rows.append(request.row)
            new_counts.append(count)
            budget = self._budget.left(budget - count, request)
        else:
            self._hindrance = "rows" if budget > 0 else "tokens"
        self._saver.release_host_blocks(self._diff.swap_ins[swap_ins_before:])
        if new_rows:
            self._delay.admitted()
        return np.array(new_rows, np.int32), np.array(new_counts, np.int32)

    def _admit(self, request: Request, budget: int, most: int, *, may_be_partial: bool) -> int:
        """Admit one request if it fits. Returns its tokens in this step (whole items up to `most`); 0 where it waits on."""
        self._hindrance = "pages"
        if self._is_blocked(request):
            return 0
        hit = NO_HIT if request.is_swapped else self.waiting.find_hit(request)
        external = self.waiting.preparations.transfers.ask(request, hit.num_tokens)
        computed = request.num_computed_tokens if request.is_swapped else hit.num_tokens + external
        if why := self._deadlines.why_missed(request, computed):
            self._refuse(request, why, is_late=True)
            return 0
        remaining = len(request.token_ids) - computed
        wanted = self._budget.chunk(remaining, budget)
        count = self.encoding.fit(request, computed, wanted, most)
        if count == 0 or (count < remaining and not may_be_partial):
            self._hindrance = "partial prefills" if count else "media" if wanted else "whole prompt"
            return 0
        if not self._saver.has_room(request, hit, self._config, is_alone=not self._batch.num_active):
            if self._batch.num_active or self._leaving or not self.waiting.prefixes.drop_references():
                self._blocked = (request, self.kv.pool.num_free)
                return 0
            return self._admit(request, budget, most, may_be_partial=may_be_partial)
        items = self.encoding.go_ahead(
            request, computed, count, others_wait=self._batch.num_active > self._batch.num_prefilling
        )
        if items is not None:
            self.waiting.encode_first(request, items)
            return 0
        if self.waiting.hold_back(request, hit.num_tokens + external):
            return 0
        self._start(request, hit, count)
        return count

    def _is_blocked(self, request: Request) -> bool:
        """Whether this request did not fit before and no page has come free since: it need not be looked at again."""
        if self._blocked is None or self._blocked[0] is not request or self._batch.num_active == 0:
            return False
        return self.kv.pool.num_free <= self._blocked[1]

    def _start(self, request: Request, hit: PrefixHit, count: int) -> None:
        """Give a request its pages and a row."""
        self._blocked = None
        if request.is_swapped:
            self._diff.swap_ins += self._saver.restore(request)
        else:
            self.kv.attach(request, hit)
            self.kv.count_lookup(request, hit)
            self.waiting.preparations.transfers.start(request)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if self.kv.grow(request, request.num_computed_tokens + count) is None:
            raise EngineError(f"{request.request_id} was admitted without room for its pages")
        self.encoding.take(request, request.num_computed_tokens, count)
        self.waiting.start(request)
        self._batch.add(request)
        self._diff.new_requests.append(build_new_request(request))
        request.token_ids = request.token_ids[:]  # This one will grow.
        self._timelines.scheduled(request, hit.num_tokens, self.kv.pool.num_free)

    def _launch(self, rows: IntArray, counts: IntArray) -> SchedulerOutput:
        """Book a step as in flight, and pack it together with all output for the workers."""
        batch = self._batch
        ends = batch.computed[rows] + counts
        needs_sample = self.drafting.known_ends(rows, ends) == batch.length[rows]
        step = SchedulerOutput(
            step_id=self._next_step_id,
            rows=rows,
            num_scheduled_tokens=counts,
            needs_sample=needs_sample,
            total_num_tokens=int(counts.sum()),
        )
        if step.total_num_tokens == 0:
            return step
        self._diff = self._diff.move_to(step)
        prompts = batch.launch(rows, counts, needs_sample)
        self.drafting.launch(step)
        self.encoding.launch(step)
        self._next_step_id += 1
        self.flights.append(build_flight(step, *prompts, ends, self.cost_model, self._timelines.clock()))
        return step

    # Results.

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Take in the result of the oldest step in flight. Raises EngineError: it is not the oldest."""
        if not self.flights or self.flights[0].step is not step or output.step_id != step.step_id:
            raise EngineError(f"step {step.step_id} (result of {output.step_id}) is not the oldest one in flight")
        flight = self.flights.popleft()
        batch = self._batch
        batch.in_flight[step.rows] -= 1
        batch.collected[step.rows] += step.num_scheduled_tokens
        self._timelines.num_sampled += self.drafting.settle(flight, output)
        predicted = self.cost_model.observe(step.total_num_tokens, len(step.rows), flight.attended, output.step_ms)
        self._timelines.stepped(flight, output.step_ms, predicted)
        outputs = EngineCoreOutputs([], [], [])
        self._fail_rows(flight, output, outputs)
        for row in flight.prefill_rows:
            self._after_prefill(row, output, flight)
        for row, pooled in output.pooled.items():
            self._finish_pooled(row, pooled, outputs)
        rows, token_ids = batch.take_wanted(output.rows, output.token_ids)
        if len(rows):
            self._append_tokens(rows, token_ids, output, outputs)
        for request in list(self._leaving.values()):
            self._leave(request)
        outputs.stats = stats = self.stats(since_start=False)
        stats.num_batched_tokens, stats.step_ms = step.total_num_tokens, output.step_ms
        stats.num_iteration_tokens = flight.num_prompt_tokens + outputs.num_new_tokens
        return outputs

    def _fail_rows(self, flight: StepInFlight, output: ModelRunnerOutput, outputs: EngineCoreOutputs) -> None:
        """End the requests whose computation failed; what the step wrote for them is never published. Those of a step that
        found no memory are computed again, in smaller steps, unless it was as small as can be."""
        if not output.lost:
            self._budget.limit.passed()
        elif self._budget.limit.lost(flight.step.total_num_tokens, len(self.flights)):
            self._lose_rows(flight.step.rows)
            return
        for row, message in find_errors(flight, output).items():
            if self._batch.accepts[row]:
                request = self._batch.request(row)
                self._end(request, FinishReason.ERROR)
                outputs.outputs.append(build_error(request, message))

    def _lose_rows(self, rows: IntArray) -> None:
        """Have these computed again from what was known before; what later steps in flight say of them is not wanted."""
        for row in rows[self._batch.accepts[rows]].tolist():
            request = self._batch.request(row)
            request.was_lost, self._batch.accepts[row] = True, False
            if request.status is RequestStatus.RUNNING:
                self._preempt(request)

    def _after_prefill(self, row: int, output: ModelRunnerOutput, flight: StepInFlight) -> None:
        """A part of a prompt was computed: its pages may be found, and siblings may follow once it is complete."""
        if not self._batch.accepts[row]:
            return
        request = self._batch.request(row)
        before, collected = request.num_computed_tokens, int(self._batch.collected[row])
        request.num_computed_tokens = collected
        self._timelines.computed(request, before, collected, flight.began, flight.step.step_id)
        self._pages.add(row, min(collected, int(self._batch.known[row])))  # drafts behind it may be dropped
        self.encoding.computed(request, collected)
        if row in output.prompt_logprobs:
            keep_prompt_logprobs(request, output.prompt_logprobs[row])
        if request.status is RequestStatus.RUNNING:
            self.waiting.computed(request, collected)

    def _finish_pooled(self, row: int, pooled: Pooled, outputs: EngineCoreOutputs) -> None:
        if self._batch.accepts[row]:
            request = self._batch.request(row)
            result = build_output(request, [])
            result.finish_reason, result.pooled = FinishReason.STOP, pooled
            outputs.outputs.append(result)
            self._end(request, FinishReason.STOP)

    def _append_tokens(
        self, rows: IntArray, token_ids: IntArray, output: ModelRunnerOutput, outputs: EngineCoreOutputs
    ) -> None:
        """One sampled token for each row: append, publish completed pages, stop; report in columns where that is all."""
        batch = self._batch
        lengths, full_rows = batch.append(rows, token_ids)
        if self._config.num_stages > 1:
            self._diff.drawn += zip(rows.tolist(), (lengths - 1).tolist(), token_ids.tolist(), strict=True)
        if len(full_rows):
            self._pages.add_rows(full_rows, np.minimum(batch.collected[full_rows], batch.known[full_rows] - 1))
        ends = batch.stops.check(rows, token_ids, lengths)
        is_more = ends | batch.is_special[rows]
        if output.forced or output.accepted:
            is_more |= np.isin(rows, [*output.forced, *output.accepted])
        more = is_more.nonzero()[0]
        if not len(more):
            outputs.plain_ids = batch.request_ids[rows].tolist()
            outputs.plain_tokens = token_ids.tolist()
            return
        plain = ~is_more
        outputs.plain_ids = batch.request_ids[rows[plain]].tolist()
        outputs.plain_tokens = token_ids[plain].tolist()
        for index in more.tolist():
            row, token_id, is_end = int(rows[index]), int(token_ids[index]), bool(ends[index])
            request = batch.request(row)
            if not request.has_reported:
                self._timelines.sampled_first(request)
            result = build_output(request, [token_id], output.logprobs.get(row))
            batch.is_special[row] = request.tells_more
            if row in output.accepted:
                is_end = take_accepted(batch, self._pages, request, output.accepted[row], result, is_end)
            if row in output.forced and not is_end:
                is_end = jump(batch, self._pages, self._diff, self._stats, request, output.forced[row], result)
            length = int(batch.known[row])
            if is_end or request.repeats(result.new_token_ids, length):
                result.finish_reason, result.stop_reason = compute_finish(request, result.new_token_ids[-1], length)
                self.cost_model.observe_output_length(length - request.num_prompt_tokens)
                self._end(request, result.finish_reason)
            outputs.outputs.append(result)

    # Ends and releases.

    def _end(self, request: Request, reason: FinishReason) -> None:
        """The request has ended, wherever it is."""
        self._timelines.ended(request, str(reason), self._batch)
        del self._requests[request.request_id]
        self.waiting.end(request)
        if request.row < 0:
            self.kv.free(request)
            self.encoding.leave(request)
            request.status = RequestStatus.ENDED
            return
        self.drafting.ended(row := request.row)
        self._batch.accepts[row] = False
        self._batch.deactivate(request)
        self.waiting.left(request, int(self._batch.known[row]) - request.num_prompt_tokens)
        request.status = RequestStatus.ENDING
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """Release a row that is no longer scheduled, or wait until the last step in flight that names it is collected."""
        if self._batch.in_flight[request.row]:
            self._leaving[request.row] = request
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Take row and pages back. The one place that does, and only without a step in flight (`RunningBatch.remove`)."""
        row = request.row
        self._pages.publish_row(row)
        self._batch.flush(request)
        self._batch.remove(request)
        self._leaving.pop(row, None)
        self._diff.finished_rows.append(row)
        self._diff.forget(row)
        self.waiting.preparations.leave(request)
        self.drafting.forget(row)
        self.encoding.leave(request)
        if request.status is RequestStatus.ENDING:
            self.kv.free(request)
            request.status = RequestStatus.ENDED
        else:
            self._diff.swap_outs += self._saver.give_up(request)
            request.cost = 0
            self.waiting.come_back(request)
