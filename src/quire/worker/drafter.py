"""A drafter: a small model in the worker that guesses how rows go on, beside the model that the engine serves.

1. Its layers are further layers of the pages' plan, with pages in the rows' own tables: prefix caching, preemption, forks and
   sleep hold for it without mechanisms of its own. `DraftRows` knows how far it has read.
2. Behind a step it reads what the step has computed, and the tokens that were drawn. A draft model reads the last two tokens of
   each row in its first pass: of the tokens that it guessed itself it has not read the last. Prompts it reads as the model does.
   A head (EAGLE, further tokens' layers) reads the step's own tokens in its first pass, beside what the model made of them.
3. It draws each guess with the row's temperature and filters (`draft_drawing.py` says with which noise).
4. Guesses come back with the step's result (`ModelRunnerOutput.proposals`); the scheduler decides which are verified, and how
   many are made next (`core/model_drafting.py`). Whatever is guessed, the tokens are those of an engine without guesses.
5. One that was trained for it makes all guesses at once (`parallel_drafting`; P-EAGLE, and PARD, https://arxiv.org/abs/2504.18583):
   it reads tokens that stand for those that are not known yet. What it keeps of these counts no more, so that it reads each of
   the model's steps whole.
6. A pass is computed from buffers on the device alone: passes are recorded once on a CPU, and captured together on a GPU.

Legend: N rows, V vocabulary, K drafts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from quire.config import EngineConfig, ModelConfig
from quire.config.drafter import differing_tokens
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.core.output import IntArray, SchedulerOutput
from quire.errors import ConfigError
from quire.layers.decoder import Decoder
from quire.layers.draft_head import PLAIN_HEADS, DraftHead, PlainHeads
from quire.layers.interface import CausalLM, StepInputs
from quire.logger import init_logger
from quire.model_loader import load_model
from quire.model_loader.draft_head import load_head, load_plain_heads
from quire.model_loader.loader import LoadedModel
from quire.platforms.interface import DeviceRuntime, Platform
from quire.worker.batch_state import BatchState
from quire.worker.draft_batch import BEFORE, LAST, DraftBatch
from quire.worker.draft_drawing import DraftDrawing
from quire.worker.draft_rows import DraftRows
from quire.worker.draft_vocabulary import OtherTokens

logger = init_logger(__name__)

Run = Callable[[StepInputs], torch.Tensor]


class Drafter:
    """A draft model, and what it needs to guess.

    Args:
        target: the model that is served.
        max_tokens: tokens that a step may have.

    Attributes:
        model: the loaded drafter. most: guesses that it makes for a row at most.
        drawing: draws its guesses.
        rows, batch: once pages are there: its rows, and the inputs of its passes.
        reads_steps: it reads the tokens of each step as the model does, before it guesses behind them.
        behind: how many tokens before a row's last one the last is that it reads in its first pass.
    """

    rows: DraftRows
    batch: DraftBatch
    behind = 0

    def __init__(
        self, config: EngineConfig, platform: Platform, runtime: DeviceRuntime, target: CausalLM, max_tokens: int
    ) -> None:
        assert config.drafter is not None and config.speculative is not None
        self.most, self.vocab = config.speculative.num_speculative_tokens, config.model.vocab_size
        self.max_rows, self._max_len = config.scheduler.max_num_seqs, config.model.max_model_len
        self.target, self._runtime, self._method = target, runtime, config.speculative.method
        self.is_parallel = config.speculative.parallel_drafting
        self.reads_steps = self.is_parallel and not self.behind
        self._widest = self.most + 1 if self.is_parallel else 2
        own = config.of_drafter(config.drafter, target.kv_cache_specs()[0].block_size)
        self._mask = _mask_of(config.drafter) if self.is_parallel else 0
        loaded = self._load(own, platform, max(max_tokens, self._widest * self.max_rows))
        if type(loaded.backend) is not type(target.attention_backend):
            backends = (loaded.backend.name, target.attention_backend.name)
            raise ConfigError(
                f"speculative_config.model={config.drafter.model!r} cannot be used: its attention runs on {backends[0]!r}, "
                f"and the model's on {backends[1]!r}, whose pages are laid out otherwise",
                setting="speculative_config",
            )
        if any(spec.kind is KVKind.RECURRENT for spec in loaded.model.kv_cache_specs()):
            raise ConfigError(
                f"speculative_config.model={config.drafter.model!r} cannot be used: its layers keep a state, which it cannot set "
                "back to before a wrong guess; choose a model whose layers have attention, or method suffix or ngram",
                setting="speculative_config",
            )
        self.model, self._explained = loaded.model, loaded.explain()
        self._other, self._known = self._compare_tokens(config.drafter, config.model), self.vocab
        if self._method == "draft_model" and self._other is None:
            # A family's models have more or fewer rows behind the last token in their embeddings.
            self._known = min(config.drafter.vocab_size, self.vocab)
        shape = (self.most, self.max_rows, self.vocab, self._known)
        self.drawing = DraftDrawing(config.speculative, *shape, runtime.device())
        size = max_tokens if self._known < self.vocab or self._other is not None else 0
        self._readable_T = torch.zeros(size, dtype=torch.int32, device=runtime.device())

    def _compare_tokens(self, drafter: ModelConfig, model: ModelConfig) -> OtherTokens | None:
        """The tokens of a draft model that has another tokenizer than the model; None: they are the model's."""
        difference = differing_tokens(drafter, model) if self._method == "draft_model" else ""
        if not difference:
            return None
        other = OtherTokens(drafter, model, self.max_rows, self._runtime.device())
        logger.info("The draft model guesses %d tokens that both models have: %s", other.num_shared, difference)
        return other

    def _own_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """What the drafter reads for tokens of the model."""
        if self._other is not None:
            return self._other.own(ids)
        return ids.clamp(max=self._known - 1) if self._known < self.vocab else ids

    def _load(self, config: EngineConfig, platform: Platform, max_tokens: int) -> LoadedModel:
        free, _ = self._runtime.memory_info()
        return load_model(config, platform, self._runtime.device(), max_tokens, self.max_rows, free)

    def weights_changed(self) -> None:
        """The model's weights are others."""

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One a layer."""
        return self.model.kv_cache_specs()

    def bind(
        self, pages: list[torch.Tensor], groups: list[int], state: BatchState, num_pages: int, block_size: int
    ) -> None:
        """Its layers' pages, and the group of each; the rows are new."""
        self.model.bind_kv_cache(pages, groups)
        self._groups, self._block_size = sorted(set(groups)), block_size
        self.rows = DraftRows(state, groups[0] if groups else 0, num_pages, block_size, reads_drawn=not self.behind)
        self._state = state

    def make_batch(self, tables: list[torch.Tensor], slot_dtype: torch.dtype) -> None:
        """The inputs of its passes, which read these page tables."""
        device, most = self._runtime.device(), self.most
        sizes = (self._block_size, self.max_rows, self._max_len, most)
        self.batch = DraftBatch(tables, self._groups, *sizes, self._widest, device, slot_dtype)

    # Passes.

    def begin(
        self, plan: SchedulerOutput, budget: int, read: Callable[[SchedulerOutput], None]
    ) -> npt.NDArray[np.bool_] | None:
        """Before a step of the model is prepared: catch up with its rows. Returns which of them can have guesses; None where
        there is nothing to do.

        Args:
            read: has the drafter read the tokens of a step, which is to be prepared for it; one of at most `budget` tokens.
        """
        if plan.num_drafts < 1:
            return None
        self.rows.catch_up(plan, budget, read)
        return self.rows.ready(plan)

    def reading(self, step: StepInputs, num_logits: int = 0) -> StepInputs:
        """A step of the model as the drafter reads it: with tokens that it has."""
        if not len(self._readable_T):
            return dataclasses.replace(step, num_logits=num_logits)
        self._readable_T[: step.num_tokens] = self._own_ids(step.input_ids[: step.num_tokens])
        return dataclasses.replace(step, input_ids=self._readable_T, num_logits=num_logits)

    def compute(self, step: StepInputs) -> torch.Tensor:
        """The logits of a pass [N, V]; without any, its tokens are read and nothing is guessed."""
        self._forward(step)
        return self.model.compute_logits(step) if step.num_logits else torch.empty(0)

    def _forward(self, step: StepInputs) -> None:
        for metadata in step.attention:
            self.model.attention_backend.begin_step(metadata)
        self.model.forward(step)

    def spread(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Logits of the model's tokens."""
        return logits_NV if self._other is None else self._other.spread(logits_NV)

    def first_pass(self, count: int, run: Run) -> torch.Tensor:
        """The logits of the first guesses of so many rows."""
        batch = self.batch
        step = batch.place(count, 2, 0)
        batch.put_ids(count, *(self._own_ids(batch.fields_FN[field]) for field in (BEFORE, LAST)))
        return run(step)

    def guess(
        self, count: int, num_drafts: int, first: Callable[[], torch.Tensor], run: Run, *, is_filtered: bool
    ) -> None:
        """Make guesses for so many rows (a graph's size), of which `batch` has all that there is to know.

        Args:
            first: the logits of the first pass.
            run: `compute`, or what was recorded of it.
            is_filtered: some row draws only from its likeliest tokens.
        """
        if self.is_parallel:
            self._guess_at_once(count, num_drafts, first, is_filtered=is_filtered)
            return
        batch, logits_NV = self.batch, first()
        for number in range(num_drafts):
            drafted_N = self._draw(count, number, logits_NV, is_filtered=is_filtered)
            if number + 1 < num_drafts:
                step = batch.place(count, 1, number + 1 - self.behind)
                batch.put_ids(count, self._own_ids(drafted_N))
                logits_NV = run(step)

    def _draw(self, count: int, number: int, logits_NV: torch.Tensor, *, is_filtered: bool) -> torch.Tensor:
        self.batch.aim(count, number)
        return self.drawing.draw(self.batch, self.spread(logits_NV), number, is_filtered=is_filtered)

    def _guess_at_once(
        self, count: int, num_drafts: int, first: Callable[[], torch.Tensor], *, is_filtered: bool
    ) -> None:
        """As `guess`: one pass over tokens that stand for the unknown ones; a head's first guess comes of the step itself."""
        batch, known, masks = self.batch, list[torch.Tensor](), num_drafts - 1
        if self.behind:
            self._draw(count, 0, first(), is_filtered=is_filtered)
        else:
            known = [self._own_ids(batch.fields_FN[field]) for field in (BEFORE, LAST)]
        numbers = range(self.behind, num_drafts)
        if not numbers:
            return
        step = self._masked(batch.place(count, len(known) + masks, len(numbers) - 1))
        batch.put_ids(count, *known, masks=masks, mask=self._mask)
        self._forward(dataclasses.replace(step, num_logits=0))
        for number in numbers:
            batch.look_at(count, number + 1 - num_drafts)
            self._draw(count, number, self.model.compute_logits(step), is_filtered=is_filtered)

    def _masked(self, step: StepInputs) -> StepInputs:
        """A pass over tokens that are not known yet."""
        return step

    def proposals(
        self, plan: SchedulerOutput, is_ready: npt.NDArray[np.bool_], drafts_KN: IntArray
    ) -> dict[int, list[int]]:
        """By row, the guesses behind a step; none for rows that it has not followed, and no more than it had pages for."""
        drawing = plan.needs_sample
        rows, ready = plan.rows[drawing], is_ready[drawing]
        self.drawing.told(rows)
        room = self.rows.capacity(rows) - self._state.num_tokens_R[rows] + 1 + self.behind
        columns = drafts_KN[: plan.num_drafts, : len(rows)].T.tolist()
        return {
            row: guess[:most]
            for row, guess, most, known in zip(rows.tolist(), columns, room.tolist(), ready.tolist(), strict=True)
            if known and most > 0
        }

    def explain(self) -> dict[str, Any]:
        """What it is, for `quire explain`."""
        shared = {} if self._other is None else {"shared_tokens": self._other.num_shared}
        return {"method": self._method, "kv_layers": len(self.kv_cache_specs()), **shared, **self._explained}


class HeadDrafter(Drafter):
    """A head over the model's features.

    Attributes:
        features: what the model leaves in each step.
        ids_T: the token behind each token of a step; to be filled before a first pass.
        index_N: which of the step's tokens is each row's last that the model has computed.
    """

    behind = 1

    def _load(self, config: EngineConfig, platform: Platform, max_tokens: int) -> LoadedModel:
        loaded = load_head(config, self._method, platform, self.target, max_tokens, self.max_rows)
        head = cast(DraftHead, loaded.model)
        self._read_features(head.features.layers, max_tokens)
        self._masks = head.masked(self._widest * self.max_rows) if self.is_parallel else ()
        return loaded

    def _masked(self, step: StepInputs) -> StepInputs:
        return dataclasses.replace(step, features=self._masks)

    def reading(self, step: StepInputs, num_logits: int = 0) -> StepInputs:
        own = {"input_ids": self.ids_T, "logits_index": self.index_N, "features": self.features}
        return dataclasses.replace(step, **own, sampled=None, num_logits=num_logits)

    def _read_features(self, layers: Sequence[int], max_tokens: int) -> None:
        """Have the model leave what the head reads."""
        self.features = cast(Decoder, self.target).hand_out(layers)
        device = self._runtime.device()
        self.ids_T = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self.index_N = torch.zeros(self.max_rows, dtype=torch.int32, device=device)

    def begin(
        self, plan: SchedulerOutput, budget: int, read: Callable[[SchedulerOutput], None]
    ) -> npt.NDArray[np.bool_] | None:
        # It cannot catch up: what the model made of earlier tokens is gone. It follows where no guesses are wanted, too.
        return self.rows.ready(plan) if plan.num_drafts >= 0 else None

    def weights_changed(self) -> None:
        cast(DraftHead, self.model).borrow(cast(Decoder, self.target))

    def spread(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return cast(DraftHead, self.model).spread(logits_NV)


class PlainHeadDrafter(HeadDrafter):
    """Heads that have no pages: they need nothing but a row's last hidden state, and have nothing to follow."""

    def _load(self, config: EngineConfig, platform: Platform, max_tokens: int) -> LoadedModel:
        loaded = load_plain_heads(config, self._method, self.target, self.max_rows)
        heads = cast(PlainHeads, loaded.model)
        if self.most > heads.num_heads:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens={self.most} cannot be used: {config.model.model!r} has "
                f"{heads.num_heads} heads, and each makes one guess; give at most {heads.num_heads}",
                setting="speculative_config",
            )
        self._read_features(heads.features.layers, max_tokens)
        return loaded

    def begin(
        self, plan: SchedulerOutput, budget: int, read: Callable[[SchedulerOutput], None]
    ) -> npt.NDArray[np.bool_] | None:
        return np.ones(len(plan.rows), dtype=np.bool_) if plan.num_drafts > 0 else None

    def weights_changed(self) -> None:
        pass

    def spread(self, logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV


def _mask_of(drafter: ModelConfig) -> int:
    """The token that stands for one that is not known yet. Raises ConfigError: the drafter has none."""
    for name in ("pard_token", "ptd_token_id", "mask_token_id"):
        token = drafter.hf_config.get(name)
        if token is not None and 0 <= int(token) < drafter.vocab_size:
            return int(token)
    raise ConfigError(
        f"speculative_config.parallel_drafting cannot be used: config.json of {drafter.model!r} names no pard_token, "
        "ptd_token_id or mask_token_id of its vocabulary, so it was not trained for it",
        setting="speculative_config",
    )


def make_drafter(
    config: EngineConfig, platform: Platform, runtime: DeviceRuntime, target: CausalLM, max_tokens: int
) -> Drafter | None:
    """The drafter that a configuration names, if it names one."""
    if config.drafter is None or config.speculative is None:
        return None
    method = config.speculative.method
    kind = Drafter if method == "draft_model" else PlainHeadDrafter if method in PLAIN_HEADS else HeadDrafter
    return kind(config, platform, runtime, target, max_tokens)
