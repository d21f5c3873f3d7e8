"""A drafter: a small model in the worker that guesses how rows go on, beside the model that the engine serves.

1. Its layers are further layers of the pages' plan, with pages in the rows' own tables: prefix caching, preemption, forks and
   sleep hold for it without mechanisms of its own. `DraftRows` knows how far it has read.
2. Behind a step it reads what the step has computed, and the tokens that were drawn. A draft model reads the last two tokens of
   each row in its first pass: of the tokens that it guessed itself it has not read the last. Prompts it reads as the model does.
3. It draws each guess with the row's temperature and filters and the noise of (seed, position), as the model will at that
   position: where both agree in their probabilities they agree in their draws, and sampled requests accept as greedy ones do.
4. Guesses come back with the step's result (`ModelRunnerOutput.proposals`); the scheduler decides which are verified, and how
   many are made next (`core/model_drafting.py`). Whatever is guessed, the tokens are those of an engine without guesses.
5. A pass is computed from buffers on the device alone: passes are recorded once on a CPU, and captured together on a GPU.

Legend: N rows, V vocabulary, K drafts.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheSpec
from quire.core.output import IntArray, SchedulerOutput
from quire.errors import ConfigError
from quire.layers.interface import CausalLM, StepInputs
from quire.model_loader import load_model
from quire.platforms.interface import DeviceRuntime, Platform
from quire.sample.sampling_rows import SamplingRows
from quire.worker.batch_state import BatchState
from quire.worker.draft_batch import BEFORE, CAPACITY, LAST, LENGTH, DraftBatch
from quire.worker.draft_rows import DraftRows

Run = Callable[[StepInputs], torch.Tensor]


class Drafter:
    """The model that guesses, and what it needs for that.

    Args:
        target: the model that is served.
        max_tokens: tokens that a step may have.

    Attributes:
        model: the loaded drafter. most: guesses that it makes for a row at most.
        rows, batch: once pages are there: its rows, and the inputs of its passes.
    """

    rows: DraftRows
    batch: DraftBatch

    def __init__(
        self, config: EngineConfig, platform: Platform, runtime: DeviceRuntime, target: CausalLM, max_tokens: int
    ) -> None:
        assert config.drafter is not None and config.speculative is not None
        self.most, self._vocab = config.speculative.num_speculative_tokens, config.model.vocab_size
        self._max_rows, self._max_len = config.scheduler.max_num_seqs, config.model.max_model_len
        own = config.of_drafter(config.drafter, target.kv_cache_specs()[0].block_size)
        max_tokens = max(max_tokens, 2 * self._max_rows)
        free, _ = runtime.memory_info()
        loaded = load_model(own, platform, runtime.device(), max_tokens, self._max_rows, free)
        if type(loaded.backend) is not type(target.attention_backend):
            backends = (loaded.backend.name, target.attention_backend.name)
            raise ConfigError(
                f"speculative_config.model={config.drafter.model!r} cannot be used: its attention runs on {backends[0]!r}, "
                f"and the model's on {backends[1]!r}, whose pages are laid out otherwise",
                setting="speculative_config",
            )
        self.model = loaded.model
        self._runtime, self._explained = runtime, loaded.explain()

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One a layer."""
        return self.model.kv_cache_specs()

    def bind(
        self,
        pages: list[torch.Tensor],
        groups: list[int],
        state: BatchState,
        num_pages: int,
        block_size: int,
    ) -> None:
        """Its layers' pages, and the group of each; the rows are new."""
        self.model.bind_kv_cache(pages, groups)
        self._groups, self._block_size = sorted(set(groups)), block_size
        self.rows = DraftRows(state, groups[0], num_pages, block_size, reads_drawn=True)
        self._state = state

    def make_batch(self, tables: list[torch.Tensor], slot_dtype: torch.dtype) -> None:
        """The inputs of its passes, which read these page tables."""
        device, most = self._runtime.device(), self.most
        self.batch = DraftBatch(
            tables, self._groups, self._block_size, self._max_rows, self._max_len, most, device, slot_dtype
        )

    def tell(self, rows: IntArray, table: SamplingRows) -> None:
        """Rows that drew, whose tokens are known, are those that `guess` guesses for, where the host writes to its memory."""
        count, batch, lengths = len(rows), self.batch, self._state.num_tokens_R[rows]
        table.pack(rows, lengths, batch.columns)
        fields, ids = batch.fields_FN.numpy()[:, :count], self._state.token_ids_RL
        fields[CAPACITY], fields[LENGTH] = self.rows.capacity(rows), lengths
        fields[LAST], fields[BEFORE] = ids[rows, lengths - 1], ids[rows, lengths - 2]
        batch.live[0] = count

    # Passes.

    def read(self, step: StepInputs) -> None:
        """Read the tokens of a step of the model, and guess nothing."""
        self._begin(step)
        self.model.forward(step)

    def compute(self, step: StepInputs) -> torch.Tensor:
        """The logits of a pass [N, V]."""
        self._begin(step)
        self.model.forward(step)
        return self.model.compute_logits(step)

    def _begin(self, step: StepInputs) -> None:
        for metadata in step.attention:
            self.model.attention_backend.begin_step(metadata)

    def guess(self, count: int, num_drafts: int, run: Run, *, is_filtered: bool) -> None:
        """Make guesses for so many rows (a graph's size), of which `batch` has the host's words and the last tokens.

        Args:
            run: `compute`, or what was recorded of it.
            is_filtered: some row draws only from its likeliest tokens.
        """
        batch = self.batch
        ids = [batch.fields_FN[BEFORE], batch.fields_FN[LAST]]
        for number in range(num_drafts):
            step = batch.place(count, len(ids), number)
            batch.put_ids(count, *ids)
            ids = [batch.draw(run(step), number, is_filtered=is_filtered).clamp_(0, self._vocab - 1)]

    def proposals(
        self, plan: SchedulerOutput, is_ready: npt.NDArray[np.bool_], drafts_KN: IntArray
    ) -> dict[int, list[int]]:
        """By row, the guesses behind a step; none for rows that it has not followed, and no more than it had pages for."""
        drawing = plan.needs_sample
        rows, ready = plan.rows[drawing], is_ready[drawing]
        room = self.rows.capacity(rows) - self._state.num_tokens_R[rows] + 1
        columns = drafts_KN[: plan.num_drafts, : len(rows)].T.tolist()
        return {
            row: guess[:most]
            for row, guess, most, known in zip(rows.tolist(), columns, room.tolist(), ready.tolist(), strict=True)
            if known and most > 0
        }

    def tensors(self) -> Iterator[Any]:
        """What holds its weights."""
        yield self.model

    def explain(self) -> dict[str, Any]:
        """What it is, for `quire explain`."""
        return self._explained
