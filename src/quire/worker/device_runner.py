"""The model runner of a device that works beside the host: a step is submitted, and its tokens are fetched later.

What a step is, is the same as in `model_runner`; but nothing here waits for the device. A row's last token stays on the
device, where the next step reads it; results are copied to pinned memory behind the step. Knows no vendor.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections import deque
from typing import Any

import torch

from quire.attention.interface import LONG_CONTEXT, SHORT_TOKENS
from quire.config import EngineConfig
from quire.core.output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from quire.distributed.communicator import Communicator, SingleRank
from quire.errors import EngineError
from quire.kernels import ops
from quire.kernels.step import HEADER
from quire.layers.interface import StepInputs
from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime, Platform
from quire.sample.feature_batches import FeatureBatches
from quire.sample.grammar_masks import GrammarMasks
from quire.sample.sampler import Sampled, Sampler
from quire.sampling_params import SamplingParams
from quire.spec_decode.verification import Verified
from quire.worker.device_drafting import DeviceDrafting, DraftedStep
from quire.worker.feature_uses import FeatureUses
from quire.worker.input_prep import InputPreparation, PreparedBatch
from quire.worker.pooling import PooledRows, Pooler
from quire.worker.runner import Runner, lost_output
from quire.worker.step_graphs import MAX_GRAPH_TOKENS, StepGraphs, StepShape
from quire.worker.step_slots import StepSlot, StepSlots

logger = init_logger(__name__)

RESERVED_BYTES = 512 << 20
"""Device memory left to libraries' workspaces and to captured graphs."""


class PendingStep:
    """A step that was submitted."""

    def __init__(
        self, runner: "DeviceRunner", step_id: int, batch: PreparedBatch, slot: StepSlot, sampler: Sampler
    ) -> None:
        self._runner, self._step_id, self.batch, self.slot = runner, step_id, batch, slot
        self._sampler, self._memory = sampler, runner.memory
        self._sampled: Sampled | None = None
        self._host: dict[str, torch.Tensor] = {}
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._pooled: list[tuple[PooledRows, torch.Tensor]] = []
        self._output: ModelRunnerOutput | None = None
        self.drafted: SchedulerOutput | None = None
        """The plan, if it has drafts."""
        self.verified: Verified | None = None
        self.guessed: DraftedStep | None = None
        """If a drafter guesses behind it."""

    @property
    def is_taken_in(self) -> bool:
        """Whether its tokens are on the host."""
        return self._output is not None

    def set_sampled(self, sampled: Sampled) -> None:
        """Have what was enqueued for the step's rows copied to the host behind it."""
        self._sampled = sampled
        for name, tensor in sampled.tensors.items():
            self._host[name] = self._memory.host_empty(tensor.shape, tensor.dtype)
            self._host[name].copy_(tensor, non_blocking=True)

    def lose(self, error: torch.OutOfMemoryError) -> None:
        """There is no memory for its draw."""
        self._output = lost_output(self._step_id, error)

    def bring(self, pooled: list[PooledRows]) -> None:
        """Have results copied to the host behind the step."""
        for rows in pooled:
            host = self._memory.host_empty(rows.values.shape, torch.float32)
            self._pooled.append((rows, host.copy_(rows.values, non_blocking=True)))

    def result(self) -> ModelRunnerOutput:
        """Wait for the device; the same again when asked again."""
        if self._output is None:
            with self._runner.lock:
                self._runner.draw_late(self)
            began = time.perf_counter()
            self.slot.end.wait()
            self._runner.waited_seconds += time.perf_counter() - began
            with self._runner.lock:
                if self._output is None:
                    self._output = self._runner.with_news(self._fetch())
                    self._runner.take_guesses(self, self._output)
                    self._runner.begin_late_masks()
        return self._output

    def _fetch(self) -> ModelRunnerOutput:
        rows_S = self.batch.rows_S
        if self.drafted is not None:
            return self._fetch_verified(self.drafted)
        tokens_S = self.slot.tokens_array[: len(rows_S)].copy()
        self._runner.learn_tokens(rows_S, self.batch.positions_S, tokens_S)
        output = ModelRunnerOutput(step_id=self._step_id, rows=rows_S, token_ids=tokens_S, pooled={})
        for pooled, host in self._pooled:
            pooled.collect(host, output.pooled)
        if self._sampled is not None:
            output.logprobs, output.row_errors = self._sampler.finish(self._sampled, self._host), self._sampled.errors
            output.forced = self._sampler.append_tokens(rows_S, tokens_S, self.batch.positions_S)
        output.prompt_logprobs = self.prompt_logprobs
        return output

    def _fetch_verified(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Of a step with drafts."""
        verified = self.verified
        if verified is None:
            rows_S, first_B = self.batch.rows_S, self.batch.first_B
            assert first_B is not None
            tokens_S, acceptance = self.slot.tokens_array[: len(rows_S)], self._runner.acceptance
            verified = acceptance.count(rows_S, self.batch.positions_S, first_B, tokens_S, plan.drafts)
        output = self._runner.take_verified(plan, verified)
        output.prompt_logprobs = self.prompt_logprobs
        return output


@dataclasses.dataclass
class _LateDraw:
    """The newest step's draw, which waits for earlier tokens: it is submitted with the next step, or when the step's result is
    asked for, and the host is free meanwhile."""

    step: PendingStep
    shape: StepShape
    wanted: int
    masks: GrammarMasks | None = None
    has_begun: bool = False


class DeviceRunner(Runner):
    """Owns the model, the rows, the pages and the sampler of one device.

    Attributes:
        lock: held while a step is submitted and while a result is taken in, which another thread may do.
    """

    groups_adapters = True

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        communicator: Communicator | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._communicator = communicator or SingleRank()
        rows = config.scheduler.max_num_seqs
        super().__init__(
            config,
            platform,
            runtime,
            communicator,
            max_tokens=-(-max(config.scheduler.max_num_batched_tokens, rows) // 16) * 16,
            jumps=False,
            round_up=lambda count: self._graphs.num_logits(count),
        )
        self._drafting: DeviceDrafting | None = None
        self._features: FeatureUses | None = None
        if self._pooler is None:
            self._features = FeatureUses(runtime, self._make_feature_batches)
        self._depth = max(2, config.scheduler.depth)
        self._in_flight: deque[PendingStep] = deque(maxlen=self._depth)
        self._late: _LateDraw | None = None
        self._logits: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._adapters_version = 0
        self._slots = StepSlots(runtime, self._max_draws, self._depth)

    def _workspace_bytes(self) -> int:
        """Workspaces of libraries, and captured graphs."""
        return RESERVED_BYTES

    def _warm_up(self, inputs: InputPreparation, block_size: int) -> None:
        """Run an empty step, so that the kernels are ready."""
        self._inputs = self._parts.device_inputs(inputs, self._sampler.table, block_size, self._runtime)
        self._inputs.token_types = None if self._pooler is None else self._pooler.token_types
        self._inputs.see_beside(self._cross)
        self._graphs = self._make_graphs()
        if self._drafter is not None:
            parts = (self._runtime, self._inputs, self._state, self._sampler, self._graphs, self._out_S)
            is_captured = not self._config.model.enforce_eager
            self._drafting = DeviceDrafting(self._drafter, *parts, is_captured=is_captured)
        self._slots.allocate()
        self._prepare_empty()
        self._runtime.rehearse(self._compute_all)
        if self._features is not None:
            self._features.rehearse()
        self._run_first_steps()
        self._runtime.await_kernels()
        self._runtime.synchronize()
        if self._features is not None:
            self._features.begin()

    def _make_graphs(self) -> StepGraphs:
        return self._parts.step_graphs(
            self._runtime,
            self._max_rows,
            self._max_tokens,
            self._compute,
            self._prepare_empty,
            not self._config.model.enforce_eager and self._model.can_replay,
            has_logits=self._pooler is None and self.is_last_stage,
            max_draws=self._max_draws,
            graph_tokens=MAX_GRAPH_TOKENS if self._split is None else self._split.least - 1,
        )

    def _run_first_steps(self) -> None:
        """Those that a first request has."""
        self._graphs.run(self._graphs.decode_shape(1, True))
        self._graphs.run(self._graphs.mixed_shape(16, 1, 1, 16, True))

    def free_pages(self) -> None:
        """Give the cache back; rows are forgotten with it."""
        self._runtime.synchronize()
        self._graphs.clear()
        self._logits.clear()
        self._hidden.clear()
        self._drafting = None
        self._slots.clear()
        self._in_flight.clear()
        self._late = None
        super().free_pages()

    def forget_recorded(self) -> None:
        if self._media is not None:
            self._media.encoder.settle()
        if self.has_pages:
            self._runtime.synchronize()
            self._graphs.clear()
            if self._drafting is not None:
                self._drafting.forget_recorded()

    def record_again(self) -> None:
        """The commonest steps; graphs of others are captured when the device idles, or where they are wanted."""
        if self.has_pages:
            if self._drafter is not None:
                self._drafter.weights_changed()
            self._graphs = self._make_graphs()
            self._prepare_empty()
            self._run_first_steps()
            self._runtime.synchronize()

    def _prepare_empty(self) -> None:
        """A step without tokens on the device: whatever then runs does no harm."""
        self._inputs.buffers.packet[:HEADER].zero_()
        if self._adapters is not None:
            self._adapters.prepare_empty()

    def execute(self, plan: SchedulerOutput) -> "ModelRunnerOutput | PendingStep":
        """Submit one step.

        Raises:
            EngineError: the device failed; the message has the step's shape.
        """
        try:
            with self.lock:
                return self._execute(plan)
        except RuntimeError as error:
            raise EngineError(
                f"step {plan.step_id} failed on {self._device} ({plan.total_num_tokens} tokens of {len(plan.rows)} "
                f"requests, largest {int(plan.num_scheduled_tokens.max(initial=0))}): {error}"
            ) from error

    def _execute(self, plan: SchedulerOutput) -> "ModelRunnerOutput | PendingStep":
        self.draw_late()
        nothing = self._apply_diff(plan)
        if nothing is not None:
            return nothing
        try:
            if not self.is_last_stage:
                return self._compute_stage(plan)
            plan = self._without_forbidden(plan)
            return self._generate(plan) if self._pooler is None else self._pool(plan, self._pooler)
        except torch.OutOfMemoryError as error:
            if self._communicator.size > 1 or self._communicator.copies:  # which wait in the middle of the step
                raise
            self._late = None
            lost = lost_output(plan.step_id, error)
        self._runtime.release_unused()  # what the allocator keeps may be in pieces that fit nothing
        return lost

    def _generate(self, plan: SchedulerOutput) -> "PendingStep":
        """Submit a step of requests that get tokens."""
        is_ready = None if self._drafting is None else self._drafting.begin(plan, self._read_behind)
        starts_B = self._state.num_computed_R[plan.rows] if self._prompt_logprobs.is_wanted else None
        batch = self._inputs.host.prepare(plan)
        self._begin_verifying(plan, batch)
        wanted = self._sampler.wanted(batch.rows_S, batch.positions_S)
        slot = self._slots.begin()
        self._inputs.upload(batch)
        shape = self._with_adapters(plan, batch, self._shape_of(plan, batch, self._sampler.is_plain(wanted)))
        if self._see_media(plan, self._inputs.host.query_start_B) is not None:
            shape = dataclasses.replace(shape, has_media=True)
        slot.is_usual = self._run_layers(plan, shape)
        pending = PendingStep(self, plan.step_id, batch, slot, self._sampler)
        if batch.first_B is not None:
            pending.drafted = plan
        if is_ready is not None:
            pending.guessed = DraftedStep(plan, batch, shape, is_ready)
        self._late = _LateDraw(pending, shape, wanted)
        if self._sampler.needs_tokens(wanted) and starts_B is None:
            self.begin_late_masks()
        else:
            self.draw_late()
        if starts_B is not None:
            step = self._inputs.step(dataclasses.replace(shape, is_narrow=False, decodes=True, has_short=False))
            pending.prompt_logprobs = self._prompt_logprobs.compute(
                plan, starts_B, self._inputs.host.query_start_B, self._state, dataclasses.replace(step)
            )
            slot.drawn.record()
            slot.end.record()
        self._in_flight.append(pending)
        # The device alone knows the new tokens: the next step's packet names their rows in their place.
        rows, positions = batch.rows_S, batch.positions_S
        if batch.first_B is not None:
            rows, positions = rows[batch.first_B], positions[batch.first_B]
        self._state.append_tokens(rows, positions, -1 - rows)
        return pending

    def _compute_stage(self, plan: SchedulerOutput) -> PendingStep:
        """Submit a step whose tokens a later stage draws, or whose states it pools."""
        batch = self._inputs.host.prepare(plan)
        slot = self._slots.begin()
        self._inputs.upload(batch)
        self._run_layers(plan, self._with_adapters(plan, batch, self._shape_of(plan, batch, False)))
        nothing = PreparedBatch(batch.rows_S[:0], batch.positions_S[:0])
        slot.drawn.record()
        slot.end.record()
        self._in_flight.append(PendingStep(self, plan.step_id, nothing, slot, self._sampler))
        return self._in_flight[-1]

    def _run_layers(self, plan: SchedulerOutput, shape: StepShape) -> bool:
        """Submit this stage's layers, between what comes from the stage before and goes to the next one. As `StepGraphs.run`."""
        self._before_layers(plan.total_num_tokens)
        is_usual = self._graphs.run(shape)
        self._behind_layers(plan.total_num_tokens)
        return is_usual

    def begin_late_masks(self) -> None:
        """Have the masks of the late draw made, if there is one and all earlier tokens are on the host."""
        late = self._late
        if late is None or late.has_begun or not all(s.is_taken_in for s in self._in_flight if s is not late.step):
            return
        late.has_begun = True
        late.masks = self._sampler.begin_masks(late.step.batch.rows_S, late.step.batch.positions_S)

    def draw_late(self, only: PendingStep | None = None) -> None:
        """Submit the draw of the newest step's tokens, if that was not done yet (and if it is `only`)."""
        late = self._late
        if late is None or (only is not None and late.step is not only):
            return
        if self._sampler.needs_tokens(late.wanted):
            for step in self._in_flight:
                if step is not late.step:
                    step.result()
            self.begin_late_masks()
        self._late = None
        slot, count = late.step.slot, len(late.step.batch.rows_S)
        if late.step.drafted is not None and self._sampler.needs_rounds(late.step.batch.rows_S):
            logits_SV, drafts = self._logits[late.shape.num_logits], late.step.drafted.drafts
            late.step.verified = self._verify_in_rounds(logits_SV, late.step.batch, drafts)
            self._end_slot(late)
            return
        try:
            if count and not late.shape.samples:
                self._draw(late, count)
        except torch.OutOfMemoryError as error:
            if self._communicator.size > 1:
                raise
            late.step.lose(error)
        if late.step.is_taken_in:
            self._runtime.release_unused()
        if count:
            slot.tokens_S[:count].copy_(self._out_S[:count], non_blocking=True)
        self._end_slot(late)

    def _end_slot(self, late: _LateDraw) -> None:
        """All of a step is submitted, but for what a drafter guesses behind it."""
        late.step.slot.drawn.record()
        guessed = late.step.guessed
        if self._drafting is not None and guessed is not None and not late.step.is_taken_in:
            is_usual = self._drafting.submit(guessed, self._inputs.step(guessed.shape), late.step.verified)
            late.step.slot.is_usual &= is_usual
        late.step.slot.end.record()

    def _read_behind(self, plan: SchedulerOutput) -> None:
        """Have the drafter read tokens that it has passed over."""
        assert self._drafting is not None
        batch = self._inputs.host.prepare(plan)
        self._inputs.upload(batch)
        shape = self._shape_of(plan, batch, False)
        step = self._inputs.step(dataclasses.replace(shape, num_logits=0, is_narrow=True))
        self._unpack(step, shape)
        self._drafting.read(step)

    def take_guesses(self, step: "PendingStep", output: ModelRunnerOutput) -> None:
        """A step's result was fetched: add how long it took, and what a drafter has guessed behind it."""
        output.step_ms = step.slot.step_ms
        if self._drafting is not None and step.guessed is not None and not output.lost:
            output.draft_ms = step.slot.end.milliseconds_since(step.slot.drawn)
            self._drafting.take(step.guessed, output)

    def _unpack(self, step: StepInputs, shape: StepShape) -> None:
        """Expand the packet on the device."""
        self._inputs.unpack(shape.num_tokens, shape.num_requests)
        for described in (step, step.sampled):
            for metadata in described.attention if described is not None else ():
                self._backend.begin_step(metadata)

    def _draw(self, late: _LateDraw, count: int) -> None:
        """Submit the draw of `count` tokens that the step's graph leaves out."""
        batch, columns = late.step.batch, self._inputs.buffers.columns
        if late.masks is not None and self._sampler.is_masked_alone(late.wanted, batch.rows_S):
            sampled = self._sampler.upload_masks(late.masks, batch.rows_S)
            self._graphs.run(self._graphs.masked_draw(late.shape.num_logits))
            late.step.set_sampled(sampled)
            return
        logits_SV, out_S = self._logits[late.shape.num_logits][:count], self._out_S[:count]
        sampled = self._sampler.sample(
            logits_SV, columns, batch.rows_S, batch.positions_S, late.wanted, out_S, late.masks
        )
        ops.keep_tokens(out_S, columns.rows_S[:count], self._inputs.buffers.last_token_R)
        late.step.set_sampled(sampled)

    def _pool(self, plan: SchedulerOutput, pooler: Pooler) -> PendingStep:
        """Submit a step of pooling requests, which get no tokens."""
        starts_B = self._state.num_computed_R[plan.rows]
        batch = self._inputs.host.prepare(plan)
        slot = self._slots.begin()
        self._inputs.upload(batch)
        shape = self._with_adapters(plan, batch, self._shape_of(plan, batch, False))
        first_B = self._inputs.host.query_start_B
        if self._see_media(plan, first_B) is not None:
            shape = dataclasses.replace(shape, has_media=True)
        self._run_layers(plan, shape)
        hidden_TD, empty = self._hidden[shape.num_tokens][: plan.total_num_tokens], batch.rows_S[:0]
        pending = PendingStep(self, plan.step_id, PreparedBatch(empty, empty), slot, self._sampler)
        pending.bring(pooler.pool(plan, starts_B, first_B, hidden_TD, self._state, self._images(plan, first_B)))
        slot.drawn.record()
        slot.end.record()
        self._in_flight.append(pending)
        return pending

    def _shape_of(self, plan: SchedulerOutput, batch: PreparedBatch, is_plain: bool) -> StepShape:
        requests = max(len(plan.rows), len(batch.rows_S))
        if batch.is_decode:
            return self._graphs.decode_shape(requests, is_plain)
        max_query_len = int(self._inputs.host.shape[2])
        counts_B = plan.num_scheduled_tokens
        contexts_B = self._inputs.host.seq_lens_B[: len(counts_B)] - counts_B
        is_short_B = (counts_B > 1) & (counts_B <= SHORT_TOKENS) & (contexts_B >= LONG_CONTEXT)
        return self._graphs.mixed_shape(
            plan.total_num_tokens,
            requests,
            len(batch.rows_S),
            max_query_len,
            is_plain,
            is_narrow=not self._prompt_logprobs.is_wanted,
            decodes=bool((counts_B == 1).any()),
            has_short=bool(0 < counts_B[is_short_B].sum() <= SHORT_TOKENS),
        )

    def _with_adapters(self, plan: SchedulerOutput, batch: PreparedBatch, shape: StepShape) -> StepShape:
        """The shape of a step, whose adapters are told to its products."""
        adapters = self._adapters
        if adapters is None or not adapters.begin(plan, self._state.num_computed_R, is_prepared=True):
            return shape
        adapters.prepare(batch.rows_S)
        if adapters.store.version != self._adapters_version:
            self._adapters_version = adapters.store.version
            self._runtime.synchronize()
            self._graphs.renew_adapters(can_replay=adapters.can_replay)
        return dataclasses.replace(shape, has_adapters=True, is_graph=shape.is_graph and adapters.can_replay)

    def _compute(self, shape: StepShape) -> None:
        """Submit everything that a step of this shape consists of."""
        if self._adapters is not None:
            self._adapters.use(has_adapters=shape.has_adapters)
        buffers, columns = self._inputs.buffers, self._inputs.buffers.columns
        count, out_S = shape.num_logits, self._out_S[: shape.num_logits]
        if not shape.num_tokens:
            self._sampler.compute_masked(self._logits[count], columns, out_S)
            ops.keep_tokens(out_S, columns.rows_S[:count], buffers.last_token_R)
            return
        step = self._inputs.step(shape)
        step.take_media(self._media.inputs if self._media is not None and shape.has_media else None)
        self._unpack(step, shape)
        step = self._forward(step, is_split=shape.is_narrow and not (shape.is_graph or shape.has_media))
        if self._pooler is not None and self.is_last_stage:
            self._hidden[shape.num_tokens] = self._model.compute_hidden(step)
        if not shape.num_logits:
            return
        logits_SV = self._logits[shape.num_logits] = self._model.compute_logits(step)
        self._limit_tokens(logits_SV)
        if shape.samples:
            ops.gumbel_argmax(
                logits_SV,
                columns.inverse_temperature_S[:count],
                columns.seed_S[:count],
                columns.positions_S[:count],
                out_S,
            )
            ops.keep_tokens(out_S, columns.rows_S[:count], buffers.last_token_R)

    def _compute_all(self) -> None:
        """A step of every size: for a rehearsal, in which kernels are named and not launched."""
        with self._communicator.silent():
            for shape in self._graphs.shapes():
                self._compute(shape)
            if self._drafting is not None:
                sizes = [self._graphs.num_logits(min(size, self._max_rows)) for size in (1, 2, 16, self._max_rows)]
                self._drafting.rehearse(sizes, lambda size: self._inputs.step(self._graphs.decode_shape(size, True)))
            if self._adapters is not None:
                with self._adapters.store.rehearsed():
                    for shape in self._graphs.shapes():
                        self._compute(dataclasses.replace(shape, has_adapters=True))
        self._logits.clear()
        self._hidden.clear()

    def _make_feature_batches(self) -> FeatureBatches:
        model = self._config.model
        return FeatureBatches(self._sampler, model.vocab_size, self._runtime, model.logprobs_mode)

    def is_prepared(self, params: SamplingParams) -> bool:
        return super().is_prepared(params) and (self._features is None or self._features.is_ready(params))

    def prepare(self, params: SamplingParams) -> "list[concurrent.futures.Future[Any]]":
        futures = super().prepare(params)
        return futures if self._features is None else [*futures, self._features.when_ready(params)]

    def prepare_to_serve(self, wait: bool = False) -> None:
        if wait and self._runtime.loads_kernels_late:
            with self.lock:
                self._graphs.run_first()
                self._runtime.synchronize()
        super().prepare_to_serve(wait)

    def stop(self) -> None:
        super().stop()
        if self._features is not None:
            self._features.stop()

    def join(self) -> None:
        super().join()
        if self._features is not None:
            self._features.join()

    def idle(self) -> bool:
        """Nothing is running: capture a graph; whether there is more to do."""
        return self._pages is not None and self._graphs.capture_next()

    def _explain_steps(self) -> dict[str, Any]:
        captured = self._graphs.num_captured if self._pages is not None else 0
        return {"recorded_step": captured > 0, "graphs": captured}
