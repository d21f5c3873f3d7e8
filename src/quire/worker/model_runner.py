"""The model runner: one step from the scheduler's diff to sampled tokens.

A step is: apply the diff to the rows, prepare inputs, run the model (replayed where it could be recorded), sample, write
the tokens back to their rows. Knows nothing of why a step was planned so.
"""

import dataclasses
import time
from typing import Any

import numpy as np
import torch

from quire.attention.interface import AttentionBackend
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.distributed.communicator import Communicator
from quire.kernels.step import allocate_columns
from quire.layers.interface import CausalLM, StepInputs
from quire.logger import init_logger
from quire.model_loader import load_model
from quire.platforms.interface import DeviceRuntime, Platform, RecordedStep
from quire.sample.grammar_masks import GrammarMasks
from quire.sample.logits_processor import load_logits_processors
from quire.sample.sampler import Sampler
from quire.sample.sampling_rows import RANDOM
from quire.worker.batch_state import BatchState
from quire.worker.grammar_source import WorkerGrammars
from quire.worker.input_prep import InputPreparation, PreparedBatch
from quire.worker.page_store import PageStore
from quire.worker.pooling import Pooler, make_pooler
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.runner import Runner
from quire.worker.step_diff import apply_diff

logger = init_logger(__name__)


class ModelRunner(Runner):
    """Owns the model, the rows, the pages and the sampler of one device."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        runtime: DeviceRuntime,
        communicator: Communicator | None = None,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._device = runtime.device()
        self._max_rows = config.scheduler.max_num_seqs
        # Recording tells token rows from logits rows by their number, so the two must differ.
        self._max_tokens = max(config.scheduler.max_num_batched_tokens, self._max_rows + 1)
        free, _ = runtime.memory_info()
        max_logits = self._max_rows if config.model.pooling is None else 1
        self._loaded = load_model(config, platform, self._device, self._max_tokens, max_logits, free, communicator)
        self._model = self._loaded.model
        self._pooler = make_pooler(config, self._model, self._device, self._max_tokens)
        self._backend: AttentionBackend = self._loaded.backend
        processors = load_logits_processors(config.model.logits_processors, config, self._device)
        self._grammars = WorkerGrammars(config, jumps=True)
        self._sampler = Sampler(
            self._max_rows,
            config.model.vocab_size,
            self._device,
            config.model.logprobs_mode,
            processors,
            self._grammars,
        )
        self._columns = allocate_columns(self._max_rows, self._device)
        self._out_S = torch.zeros(self._max_rows, dtype=torch.int32, device=self._device)
        self._prompt_logprobs = PromptLogprobs(self._model, self._sampler, self._max_rows)
        self._pages: PageStore | None = None
        self._recorded: RecordedStep | None = None
        self._recorded_out: torch.Tensor | None = None

    @property
    def model(self) -> CausalLM:
        """The loaded model."""
        return self._model

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One a layer."""
        return self._model.kv_cache_specs()

    def untouched_bytes(self) -> int:
        """Buffers that get their memory only when they are used: the model's own, and logits once more for sampling."""
        logits = 0 if self._pooler is not None else self._max_rows * self._config.model.vocab_size * 4
        return self._model.buffer_bytes + logits

    @property
    def has_pages(self) -> bool:
        """Whether the cache is allocated."""
        return self._pages is not None

    def allocate(self, kv_cache: KVCacheConfig) -> None:
        """Allocate and bind the pages, run the step once and record it."""
        self._pages = PageStore(kv_cache, self._backend, self._device)
        self._model.bind_kv_cache(*self._pages.by_layer())
        max_len = self._config.model.max_model_len
        self._state = BatchState(self._max_rows, max_len, kv_cache.block_size, len(kv_cache.groups))
        self._inputs = InputPreparation(self._state, self._max_tokens, kv_cache.block_size)
        if self._pooler is not None:
            self._inputs.step.token_types = self._pooler.token_types
            self._inputs.step.sampled = None
        self._warm_up()
        if not self._config.model.enforce_eager and self._model.can_replay:
            self._record()

    def free_pages(self) -> None:
        """Give the cache back; rows are forgotten with it."""
        self._pages = None
        self._recorded = None
        self._recorded_out = None
        num_layers = len(self.kv_cache_specs())
        self._model.bind_kv_cache([torch.empty(0)] * num_layers, [0] * num_layers)

    def _warm_up(self) -> None:
        """One token through the model, into the null page: first-call costs are paid before the first request."""
        plan = SchedulerOutput(
            step_id=-1,
            rows=np.zeros(1, dtype=np.int32),
            num_scheduled_tokens=np.ones(1, dtype=np.int32),
            needs_sample=np.ones(1, dtype=np.bool_),
            total_num_tokens=1,
        )
        self._inputs.prepare(plan)
        self._compute()
        self._state.remove_row(0)

    def _compute(self) -> torch.Tensor:
        """The prepared step's logits [S, V]; of a pooling model its hidden states [T, D]."""
        step = self._inputs.step
        self._model.forward(step)
        return self._model.compute_hidden(step) if self._pooler is not None else self._model.compute_logits(step)

    def _record(self) -> None:
        """Record a step once, at the largest sizes."""
        self._inputs.set_largest(self._max_tokens, self._max_rows)

        def run() -> None:
            self._recorded_out = self._compute()

        self._recorded = self._runtime.record(run, self._max_tokens, self._max_rows)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        begin = time.perf_counter()
        apply_diff(plan, self._state, self._sampler, self._prompt_logprobs, self._pages)
        if self._pooler is not None:
            self._pooler.apply_diff(plan)
        if not plan.total_num_tokens:
            nothing = plan.rows[:0]
            return ModelRunnerOutput(step_id=plan.step_id, rows=nothing, token_ids=nothing)
        if self._pooler is not None:
            return self._pool(plan, self._pooler, begin)
        starts_B = self._state.num_computed_R[plan.rows] if self._prompt_logprobs.is_wanted else None
        batch = self._inputs.prepare(plan)
        masks = self._sampler.begin_masks(batch.rows_S, batch.positions_S)
        output = self._sample(plan.step_id, self._run_model(), batch, masks)
        if starts_B is not None:
            output.prompt_logprobs = self._prompt_logprobs.compute(
                plan, starts_B, self._inputs.arrays.query_start_B, self._state, self._whole_step()
            )
            self._inputs.forget_counts()
        output.step_ms = (time.perf_counter() - begin) * 1e3
        return output

    def _sample(
        self, step_id: int, logits_SV: torch.Tensor, batch: PreparedBatch, masks: GrammarMasks | None
    ) -> ModelRunnerOutput:
        """The step's next tokens, written to their rows."""
        rows_S, positions_S = batch.rows_S, batch.positions_S
        if not len(rows_S):
            return ModelRunnerOutput(step_id=step_id, rows=rows_S, token_ids=rows_S)
        sampler, out_S = self._sampler, self._out_S[: len(rows_S)]
        wanted = sampler.wanted(rows_S, positions_S)
        if wanted:
            sampler.table.pack(rows_S, positions_S, self._columns)
        if masks is not None and sampler.is_masked_alone(wanted, rows_S):
            sampled = sampler.upload_masks(masks, rows_S)
            sampler.compute_masked(logits_SV, self._columns, out_S)
        else:
            sampled = sampler.sample(logits_SV, self._columns, rows_S, positions_S, wanted, out_S, masks)
        token_ids_S = out_S.numpy().copy()
        self._state.append_tokens(rows_S, positions_S, token_ids_S)
        output = ModelRunnerOutput(step_id=step_id, rows=rows_S, token_ids=token_ids_S)
        if wanted > RANDOM:
            output.logprobs, output.row_errors = sampler.finish(sampled, sampled.tensors), sampled.errors
            output.forced = sampler.append_tokens(rows_S, token_ids_S, positions_S)
        return output

    def _pool(self, plan: SchedulerOutput, pooler: Pooler, begin: float) -> ModelRunnerOutput:
        """A step of pooling requests, which get no tokens."""
        starts_B = self._state.num_computed_R[plan.rows]
        pooler.set_token_types(plan, starts_B)
        self._inputs.prepare(plan)
        hidden_TD = self._run_model()
        nothing = plan.rows[:0]
        output = ModelRunnerOutput(step_id=plan.step_id, rows=nothing, token_ids=nothing, pooled={})
        for result in pooler.pool(plan, starts_B, self._inputs.arrays.query_start_B, hidden_TD, self._state):
            result.collect(result.values, output.pooled)
        output.step_ms = (time.perf_counter() - begin) * 1e3
        return output

    def _run_model(self) -> torch.Tensor:
        """What `_compute` gives for the prepared step, replayed where it was recorded."""
        if self._prompt_logprobs.is_wanted:
            step = self._whole_step()
            self._model.forward(step)
            return self._model.compute_logits(step)
        step = self._inputs.step
        if self._recorded is not None and self._recorded_out is not None:
            self._recorded.replay(step.num_tokens, step.num_logits)
            return self._recorded_out[: step.num_logits if self._pooler is None else step.num_tokens]
        if not step.num_logits and self._pooler is None:
            self._model.forward(step)
            return torch.empty(0, self._config.model.vocab_size)
        return self._compute()

    def _whole_step(self) -> StepInputs:
        """The prepared step, of which every token's hidden state is wanted."""
        return dataclasses.replace(self._inputs.step, sampled=None)

    def explain(self) -> dict[str, Any]:
        """What was chosen and why."""
        return {
            "attention_backend": {"chosen": self._backend.name, **self._loaded.explain()},
            "recorded_step": self._recorded is not None,
            "kv_cache_bytes": self._pages.num_bytes() if self._pages is not None else 0,
            "max_tokens": self._max_tokens,
            "max_rows": self._max_rows,
        }
