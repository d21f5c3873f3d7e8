"""The model runner: one step from the scheduler's diff to sampled tokens.

A step is: apply the diff to the rows, prepare inputs, run the model (replayed where it could be recorded), sample, write
the tokens back to their rows. Knows nothing of why a step was planned so.
"""

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.core.output import IntArray, ModelRunnerOutput, SchedulerOutput
from quire.distributed.communicator import Communicator
from quire.layers.interface import StepInputs
from quire.logger import init_logger
from quire.platforms.interface import DeviceRuntime, Platform, RecordedStep
from quire.sample.grammar_masks import GrammarMasks
from quire.worker.host_drafting import HostDrafting
from quire.worker.input_prep import InputPreparation, PreparedBatch
from quire.worker.pooling import Pooler
from quire.worker.runner import Runner

logger = init_logger(__name__)


@dataclasses.dataclass
class _Recorded:
    """A step that can be replayed, and where it leaves its result; nothing, where none could be recorded.

    Attributes:
        version: of the adapters that it has room for.
    """

    version: int = 0
    step: RecordedStep | None = None
    out: torch.Tensor | None = None


class ModelRunner(Runner):
    """Owns the model, the rows, the pages and the sampler of one device."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        communicator: Communicator | None = None,
    ) -> None:
        # Recording tells token rows from logits rows by their number, so the two must differ.
        max_tokens = max(config.scheduler.max_num_batched_tokens, config.max_logits + 1)
        super().__init__(config, platform, runtime, communicator, max_tokens=max_tokens, jumps=True)
        self._recorded, self._with_adapters = _Recorded(), _Recorded()
        self._drafting: HostDrafting | None = None

    def _workspace_bytes(self) -> int:
        """The model's own buffers get their memory when they are used."""
        kept = 0 if self._drafter is None else self._drafter.drawing.buffer_bytes
        return sum(model.buffer_bytes for model in self.weights) + kept

    def _warm_up(self, inputs: InputPreparation, block_size: int) -> None:
        """Run the step once, one token into the null page, and record it."""
        self._inputs = inputs
        if self._axes is not None:
            self._inputs.step.axes = torch.from_numpy(self._axes.axes_TA)
        if self._pooler is not None:
            self._inputs.step.token_types = self._pooler.token_types
            self._inputs.step.sampled = None
        self._inputs.see_beside(self._cross)
        if self._drafter is not None:
            sizes = (self._max_tokens, self._max_draws)
            self._drafting = HostDrafting(self._drafter, self._inputs, self._state, self._sampler, *sizes)
        one = np.ones(1, dtype=np.int32)
        self._inputs.prepare(SchedulerOutput(-1, one - 1, one, one.astype(np.bool_), total_num_tokens=1))
        self._compute()
        self._state.remove_row(0)
        self.record_again()

    def free_pages(self) -> None:
        super().free_pages()
        self.forget_recorded()

    def forget_recorded(self) -> None:
        self._recorded, self._with_adapters = _Recorded(), _Recorded()
        if self._drafting is not None:
            self._drafting.forget_recorded()

    def record_again(self) -> None:
        if self.has_pages:
            self._recorded = self._record()
            if self._drafting is not None and self._drafter is not None:
                self._drafter.weights_changed()
                if not self._config.model.enforce_eager:
                    self._drafting.record(self._runtime)

    def _compute(self) -> torch.Tensor:
        """The prepared step's logits [S, V]; of a pooling model its hidden states [T, D], of a stage before the last one what
        it hands on."""
        step = self._inputs.step
        hidden_TD = self._model.forward(step)
        if not self.is_last_stage:
            return hidden_TD
        return self._model.compute_hidden(step) if self._pooler is not None else self._model.compute_logits(step)

    def _record(self, version: int = 0) -> "_Recorded":
        """Record a step once, at the largest sizes; the inputs of the next one are to be prepared after that."""
        recorded = _Recorded(version)
        if self._config.model.enforce_eager or not self._model.can_replay:
            return recorded
        self._inputs.set_largest(self._max_tokens, self._max_draws)

        def run() -> None:
            recorded.out = self._compute()

        recorded.step = self._runtime.record(run, self._max_tokens, self._max_draws)
        return recorded

    def _prepare(self, plan: SchedulerOutput) -> PreparedBatch:
        """The inputs of a step."""
        adapters = self._adapters
        if adapters is None:
            return self._inputs.prepare(plan)
        if (
            adapters.begin(plan, self._state.num_computed_R, is_prepared=False)
            and self._with_adapters.version != adapters.store.version
        ):
            self._with_adapters = self._record(adapters.store.version)
        batch = self._inputs.prepare(plan)
        adapters.prepare(batch.rows_S)
        return batch

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self.with_news(self._execute(plan))

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        begin = time.perf_counter()
        nothing = self._apply_diff(plan)
        if nothing is not None:
            return nothing
        if self._pooler is not None:
            return self._pool(plan, self._pooler, begin)
        plan = self._without_forbidden(plan)
        drafting = self._drafting
        is_ready = None if drafting is None else drafting.begin(plan)
        starts_B = self._state.num_computed_R[plan.rows] if self._prompt_logprobs.is_wanted else None
        batch = self._prepare(plan)
        self._inputs.step.take_media(self._see_media(plan, self._inputs.query_start_B))
        if not self.is_last_stage:
            self._run_model()
            return ModelRunnerOutput(plan.step_id, rows=plan.rows[:0], token_ids=plan.rows[:0])
        self._begin_verifying(plan, batch)
        if batch.first_B is not None:
            output = self._verify(plan, self._run_model(), batch, batch.first_B)
        else:
            masks = self._sampler.begin_masks(batch.rows_S, batch.positions_S)
            output = self._sample(plan.step_id, self._run_model(), batch, masks)
        if starts_B is not None:
            output.prompt_logprobs = self._prompt_logprobs.compute(
                plan, starts_B, self._inputs.query_start_B, self._state, self._whole_step()
            )
            self._inputs.forget_counts()
        output.step_ms = (time.perf_counter() - begin) * 1e3 - (drafting.begin_ms if drafting is not None else 0.0)
        if drafting is not None and is_ready is not None:
            drafting.propose(plan, is_ready, output)
        return output

    def _sample(
        self, step_id: int, logits_SV: torch.Tensor, batch: PreparedBatch, masks: GrammarMasks | None
    ) -> ModelRunnerOutput:
        """The step's next tokens, written to their rows."""
        rows_S, positions_S = batch.rows_S, batch.positions_S
        if not len(rows_S):
            return ModelRunnerOutput(step_id=step_id, rows=rows_S, token_ids=rows_S)
        draws = self._draw_now(logits_SV, rows_S, positions_S, masks)
        self._state.append_tokens(rows_S, positions_S, draws.token_ids)
        return ModelRunnerOutput(
            step_id,
            rows_S,
            draws.token_ids,
            logprobs=draws.logprobs,
            forced=draws.forced,
            row_errors=draws.errors,
        )

    def _verify(
        self, plan: SchedulerOutput, logits_SV: torch.Tensor, batch: PreparedBatch, first_B: IntArray
    ) -> ModelRunnerOutput:
        """The next tokens of a step in which rows have drafts."""
        rows_S, positions_S = batch.rows_S, batch.positions_S
        if self._sampler.needs_rounds(rows_S):
            verified = self._verify_in_rounds(logits_SV, batch, plan.drafts)
        else:
            tokens_S = self._draw_now(logits_SV, rows_S, positions_S, None).token_ids
            verified = self.acceptance.count(rows_S, positions_S, first_B, tokens_S, plan.drafts)
        return self.take_verified(plan, verified)

    def _pool(self, plan: SchedulerOutput, pooler: Pooler, begin: float) -> ModelRunnerOutput:
        """A step of pooling requests, which get no tokens."""
        starts_B = self._state.num_computed_R[plan.rows]
        self._prepare(plan)
        self._inputs.step.take_media(self._see_media(plan, self._inputs.query_start_B))
        hidden_TD = self._run_model()
        nothing = plan.rows[:0]
        output = ModelRunnerOutput(step_id=plan.step_id, rows=nothing, token_ids=nothing, pooled={})
        first_B = self._inputs.query_start_B
        if self.is_last_stage:
            for result in pooler.pool(plan, starts_B, first_B, hidden_TD, self._state, self._images(plan, first_B)):
                result.collect(result.values, output.pooled)
        output.step_ms = (time.perf_counter() - begin) * 1e3
        return output

    def _run_model(self) -> torch.Tensor:
        """What `_compute` gives for the prepared step, of which other stages compute the layers before and behind."""
        self._before_layers(self._inputs.step.num_tokens)
        result = self._run_layers()
        if self._pooler is None and self.is_last_stage:
            self._limit_tokens(result)
        self._behind_layers(self._inputs.step.num_tokens)
        return result

    def _run_layers(self) -> torch.Tensor:
        """The same of this stage, replayed where it was recorded."""
        self._model.begin_step(self._inputs.step)
        for metadata in self._inputs.step.attention:
            self._model.attention_backend.begin_step(metadata)
        if self._prompt_logprobs.is_wanted and self.is_last_stage:
            step = self._whole_step()
            self._model.forward(step)
            return self._model.compute_logits(step)
        step = self._inputs.step
        if self._split is not None and step.media is None and self._split.takes(step):
            step = self._split.forward(step)
            return (
                self._model.compute_logits(step) if step.num_logits else torch.empty(0, self._config.model.vocab_size)
            )
        has_adapters = self._adapters is not None and self._adapters.is_wanted
        recorded = self._with_adapters if has_adapters else self._recorded
        if recorded.step is not None and recorded.out is not None and step.media is None:
            recorded.step.replay(step.num_tokens, step.num_logits)
            return recorded.out[: step.num_logits if self._pooler is None else step.num_tokens]
        if not step.num_logits and self._pooler is None:
            self._model.forward(step)
            return torch.empty(0, self._config.model.vocab_size)
        return self._compute()

    def _whole_step(self) -> StepInputs:
        """The prepared step, of which every token's hidden state is wanted."""
        return dataclasses.replace(self._inputs.step, sampled=None)

    def _explain_steps(self) -> dict[str, Any]:
        return {"recorded_step": self._recorded.step is not None}
