"""The sampler: from a step's logits to one token a row, with logprobs for those who asked.

Order, as users of vLLM know it: raw logprobs; allowed ids, bad words, min_tokens, logit bias, the end of reasoning; custom
processors; penalties; temperature; min-p, top-k, top-p; Gumbel-max. What a row draws depends on its logits, seed and position
alone.
Knows rows and logits. Knows nothing of requests, pages or steps.

Legend: S rows of the batch, N rows with some feature, V vocabulary, R rows in all.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels import ops
from quire.sample import sampling_rows as features
from quire.sample.constraints import NOTHING_LEFT, RowConstraints, apply_constraints, force_token
from quire.sample.custom_processors import run_engine_processors, run_row_processors
from quire.sample.filters import FilterRows, compute_thresholds, hide_below
from quire.sample.grammar_masks import GrammarMasks, GrammarSource
from quire.sample.logits_processor import LogitsProcessor
from quire.sample.logprobs import PositionLogprobs, compute_logprobs, gather_named, pick_rows
from quire.sample.penalties import apply_penalties
from quire.sample.sampling_rows import SamplingRows
from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
_NOBODY = np.zeros(0, dtype=np.intp)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclasses.dataclass(slots=True)
class SamplerOutput:
    """`token_ids` is aligned with the rows that were given; logprobs, errors, and the tokens that can only follow are by row.
    A row with an error has a token all the same, which means nothing."""

    token_ids: IntArray
    logprobs: dict[int, PositionLogprobs] = dataclasses.field(default_factory=dict)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)
    forced: dict[int, list[int]] = dataclasses.field(default_factory=dict)


class Sampler:
    """Draws tokens for rows. Kernels must have been selected (`ops.select`).

    Args:
        max_rows: rows there are.
        vocab_size: logits a row has.
        device: where logits live.
        logprobs_mode: whether logprobs are those of the model (`raw_`) or of what is drawn from (`processed_`), and
            whether they are log probabilities or plain logits.
        logits_processors: the engine's own processors, already made.
        grammars: follows rows with `structured_outputs` through their grammars.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        logits_processors: list[LogitsProcessor] | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode={logprobs_mode!r} must be one of {', '.join(LOGPROBS_MODES)}")
        self._rows = SamplingRows(max_rows, vocab_size, logits_processors or [], grammars)
        self._device = device
        self._is_processed = logprobs_mode.startswith("processed")
        self._normalize = logprobs_mode.endswith("logprobs")
        self._scratch_FV = torch.empty(0, vocab_size, dtype=torch.float32, device=device)
        # One buffer a column; the tensors share the arrays' memory on a CPU.
        self._inverse_temperature_S = torch.zeros(max_rows, dtype=torch.float32)
        self._seed_S = torch.zeros(max_rows, dtype=torch.int64)
        self._position_S = torch.zeros(max_rows, dtype=torch.int64)
        self._token_ids_S = torch.zeros(max_rows, dtype=torch.int32)
        self._token_ids_array = self._token_ids_S.numpy()
        self._slots_S = torch.zeros(max_rows, dtype=torch.int32)
        self._slots_array = self._slots_S.numpy()
        self._begun: GrammarMasks | None = None
        self._is_form_alone = False

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """A request takes a row. `output_token_ids`: what it has emitted already (after a preemption or a restart)."""
        self._rows.add(row, params, prompt_token_ids, output_token_ids, seed)

    def remove_row(self, row: int) -> None:
        """The row is free again; harmless if it has no sampling state."""
        self._rows.remove(row)

    def put_tokens(self, row: int, position: int, token_ids: list[int]) -> None:
        """Tokens that nobody has to draw stand from this position on."""
        self._rows.put_tokens(row, position, token_ids)

    def begin(self, rows_S: IntArray, positions_S: IntArray) -> None:
        """Before these rows' logits are computed, for `sample` of the same rows: what their grammars leave is looked up, and made
        in other threads where nobody knows it yet. Without it `sample` does so itself."""
        self._begun, self._is_form_alone = None, True
        if self._rows.grammars is None or not self._rows.objects:
            return
        followed: list[tuple[int, int, RowConstraints]] = []
        for index in self._members(rows_S, features.CONSTRAINTS).tolist():
            constraints = self._rows.objects[int(rows_S[index])].constraints
            assert constraints is not None
            self._is_form_alone &= constraints.is_grammar_alone
            if constraints.grammar is not None:
                followed.append((index, int(positions_S[index]), constraints))
        if followed:
            masks_NW = np.empty((len(followed), -(-self._rows.vocab_size // 32)), dtype=np.int32)
            self._begun = GrammarMasks(self._rows.grammars, followed, masks_NW)

    def sample(self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray) -> SamplerOutput:
        """Draw the next token of each row.

        Args:
            logits_SV: float32, contiguous; used as scratch space.
            positions_S: where the new tokens will stand (0 is the first prompt token): the generator's counter.
        """
        if not len(rows_S):
            return SamplerOutput(np.zeros(0, dtype=np.int32))
        wanted = int(np.bitwise_or.reduce(self._rows.features_R[rows_S]))
        if wanted <= features.RANDOM:
            return SamplerOutput(self._draw(logits_SV, rows_S, positions_S, bool(wanted)))
        if wanted & features.CONSTRAINTS and self._begun is None:
            self.begin(rows_S, positions_S)
        if self._begun is not None and self._is_form_alone and not wanted & ~(features.RANDOM | features.CONSTRAINTS):
            return self._sample_by_forms(logits_SV, rows_S, positions_S, self._begun)
        return self._sample_with_features(logits_SV, rows_S, positions_S, wanted)

    def compute_prompt_logprobs(self, logits_NV: torch.Tensor, token_ids_N: IntArray, row: int) -> PositionLogprobs:
        """Logprobs of a row's own prompt tokens; the number of alternatives is the row's `prompt_logprobs`."""
        count = int(self._rows.num_prompt_logprobs_R[row])
        return compute_logprobs(logits_NV, token_ids_N, count, normalize=self._normalize)

    def _draw(
        self,
        logits_SV: torch.Tensor,
        rows_S: IntArray,
        positions_S: IntArray,
        is_random: bool,
        allowed_XW: torch.Tensor | None = None,
    ) -> IntArray:
        """Gumbel-max where a row is random, the largest logit where it is greedy; of what the masks in `_slots_S` allow."""
        count = len(rows_S)
        if not is_random:
            ops.argmax(logits_SV, self._token_ids_S[:count])
            return self._token_ids_array[:count].copy()
        inverse, seed, position, out = (
            buffer[:count]
            for buffer in (self._inverse_temperature_S, self._seed_S, self._position_S, self._token_ids_S)
        )
        self._rows.inverse_temperature_R.take(rows_S, out=inverse.numpy(), mode="clip")
        self._rows.seed_R.take(rows_S, out=seed.numpy(), mode="clip")
        position.numpy()[:] = positions_S
        if allowed_XW is None:
            ops.gumbel_argmax(logits_SV, inverse, seed, position, out)
        else:
            ops.allowed_gumbel_argmax(logits_SV, self._slots_S[:count], allowed_XW, inverse, seed, position, out)
        return self._token_ids_array[:count].copy()

    def _sample_by_forms(
        self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, masks: GrammarMasks
    ) -> SamplerOutput:
        """Some rows have a grammar, and nothing else beside temperatures: the usual case, in one operation."""
        self._begun = None
        self._slots_array[: len(rows_S)] = -1
        self._slots_array[masks.index_N] = masks.line_N
        wrong = masks.finish()
        allowed_XW = torch.from_numpy(masks.masks_NW)
        output = SamplerOutput(self._draw(logits_SV, rows_S, positions_S, True, allowed_XW))
        output.errors = {int(rows_S[index]): message for index, message in wrong.items()}
        drawn = [(int(rows_S[index]), position) for index, position, _ in masks.rows]
        for (row, _), token_id in zip(drawn, output.token_ids[masks.index_N].tolist(), strict=True):
            self._rows.objects[row].append(token_id)
        output.forced = self._rows.forced_after([at for at in drawn if self._rows.may_jump_R[at[0]]])
        return output

    def _sample_with_features(
        self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, wanted: int
    ) -> SamplerOutput:
        output = SamplerOutput(np.zeros(0, dtype=np.int32))
        logprob_index = self._members(rows_S, features.LOGPROBS) if wanted & features.LOGPROBS else _NOBODY
        raw_NV = None
        if len(logprob_index) and not self._is_processed:
            # Taken aside only where the logits are about to change.
            changes = wanted & (features.EDITS | features.FILTER)
            raw_NV = _pick_rows(logits_SV, logprob_index, copy=bool(changes))
        if wanted & features.EDITS or wanted & features.FAILED:
            self._edit(logits_SV, rows_S, positions_S, wanted, output.errors)
        if wanted & features.FILTER:
            self._filter(logits_SV, rows_S)
        output.token_ids = self._draw(logits_SV, rows_S, positions_S, bool(wanted & features.RANDOM))
        if len(logprob_index):
            if raw_NV is None:
                raw_NV = self._processed_logits(logits_SV, rows_S, logprob_index)
            self._report_logprobs(raw_NV, rows_S[logprob_index], output.token_ids[logprob_index], output)
        if self._rows.objects:
            self._append_tokens(rows_S, output.token_ids)
            output.forced = self._rows.find_forced(rows_S, positions_S)
        return output

    def _members(self, rows_S: IntArray, feature: int) -> npt.NDArray[np.intp]:
        """Batch indices of the rows with a feature."""
        return np.flatnonzero(self._rows.features_R[rows_S] & feature)

    def _edit(
        self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, wanted: int, errors: dict[int, str]
    ) -> None:
        """Everything that changes logits before temperature."""
        objects = self._rows.objects
        if wanted & features.FAILED:
            for index in self._members(rows_S, features.FAILED):
                errors[int(rows_S[index])] = objects[int(rows_S[index])].failure
        if wanted & features.CONSTRAINTS:
            self._constrain(logits_SV, rows_S, positions_S, errors)
        if wanted & features.PROCESSORS:
            members = self._members(rows_S, features.PROCESSORS).tolist()
            run_row_processors(self._rows, logits_SV, rows_S, members, errors)
        if wanted & features.ENGINE_PROCESSORS:
            members = self._members(rows_S, features.ENGINE_PROCESSORS).tolist()
            run_engine_processors(self._rows, logits_SV, rows_S, members, errors)
        if wanted & features.PENALTIES:
            penalised = []
            for index in self._members(rows_S, features.PENALTIES):
                seen = objects[int(rows_S[index])].seen
                assert seen is not None
                penalised.append((int(index), seen))
            apply_penalties(logits_SV, penalised)

    def _constrain(
        self, logits_SV: torch.Tensor, rows_S: IntArray, positions_S: IntArray, errors: dict[int, str]
    ) -> None:
        constrained: list[tuple[int, int, RowConstraints]] = []
        for index in self._members(rows_S, features.CONSTRAINTS).tolist():
            row, position = int(rows_S[index]), int(positions_S[index])
            constraints = self._rows.objects[row].constraints
            assert constraints is not None
            if constraints.is_grammar_alone:
                continue
            if constraints.end_at(position):
                self._rows.end_constraints(row)
            else:
                constrained.append((index, position, constraints))
        if constrained:
            for index in apply_constraints(logits_SV, constrained):
                errors[int(rows_S[index])] = NOTHING_LEFT
        if self._begun is not None:
            wrong = self._apply_masks(logits_SV, self._begun)
            errors.update((int(rows_S[index]), message) for index, message in wrong.items())
            self._begun = None
        for index, position, constraints in constrained:
            if (token_id := constraints.forced(position)) is not None:
                force_token(logits_SV[index], token_id)

    def _apply_masks(self, logits_SV: torch.Tensor, masks: GrammarMasks) -> dict[int, str]:
        """Forbid what the rows' grammars do not leave; errors by index in the batch."""
        numbers_S = np.full(len(logits_SV), -1, dtype=np.int32)
        numbers_S[masks.index_N] = masks.line_N
        wrong = masks.finish()
        device = logits_SV.device
        ops.keep_allowed(logits_SV, torch.from_numpy(numbers_S).to(device), torch.from_numpy(masks.masks_NW).to(device))
        return wrong

    def _filter(self, logits_SV: torch.Tensor, rows_S: IntArray) -> None:
        """Hide what min-p, top-k and top-p drop."""
        index = self._members(rows_S, features.FILTER)
        rows_F = rows_S[index]
        table = self._rows
        filters = FilterRows(
            table.inverse_temperature_R[rows_F], table.top_k_R[rows_F], table.top_p_R[rows_F], table.min_p_R[rows_F]
        )
        logits_FV = _pick_rows(logits_SV, index, copy=False)
        hide_below(logits_FV, compute_thresholds(logits_FV, filters, self._scratch(len(index))))
        if len(index) < len(rows_S):
            logits_SV.index_copy_(0, torch.from_numpy(index).to(logits_SV.device), logits_FV)

    def _scratch(self, rows: int) -> torch.Tensor:
        """Room for that many rows of logits; kept, because the first touch of fresh memory costs more than its use."""
        if len(self._scratch_FV) < rows:
            self._scratch_FV = torch.empty(rows, self._rows.vocab_size, dtype=torch.float32, device=self._device)
        return self._scratch_FV[:rows]

    def _processed_logits(self, logits_SV: torch.Tensor, rows_S: IntArray, index: npt.NDArray[np.intp]) -> torch.Tensor:
        """What was drawn from: after temperature where there is one."""
        inverse = self._rows.inverse_temperature_R[rows_S[index]]
        inverse = torch.from_numpy(np.where(np.isinf(inverse), np.float32(1), inverse)).to(logits_SV.device)
        return _pick_rows(logits_SV, index, copy=True).mul_(inverse[:, None])

    def _report_logprobs(
        self, logits_NV: torch.Tensor, rows_N: IntArray, token_ids_N: IntArray, output: SamplerOutput
    ) -> None:
        """Rows that want equally many alternatives are computed together; so are those that name them."""
        counts_N = self._rows.num_logprobs_R[rows_N]
        is_named_N = self._rows.is_named(rows_N)
        if is_named_N.any():
            members = np.flatnonzero(is_named_N)
            tokens_N, named_NK = torch.from_numpy(token_ids_N[members]), self._rows.named_table(rows_N[members])
            found = gather_named(logits_NV[members], tokens_N, torch.from_numpy(named_NK), normalize=self._normalize)
            output.logprobs.update(pick_rows(rows_N[members], counts_N[members], *found))
            rest = np.flatnonzero(~is_named_N)
            logits_NV, rows_N, token_ids_N, counts_N = logits_NV[rest], rows_N[rest], token_ids_N[rest], counts_N[rest]
        for count, members in _groups(counts_N):
            chosen_NV = logits_NV if len(members) == len(rows_N) else logits_NV[torch.from_numpy(members)]
            result = compute_logprobs(chosen_NV, token_ids_N[members], count, normalize=self._normalize)
            for number, index in enumerate(members.tolist()):
                output.logprobs[int(rows_N[index])] = result.pick(number)

    def _append_tokens(self, rows_S: IntArray, token_ids_S: IntArray) -> None:
        objects = self._rows.objects
        for index in self._members(rows_S, features.EDITS).tolist():
            objects[int(rows_S[index])].append(int(token_ids_S[index]))


def _groups(values_N: IntArray) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    for value in np.unique(values_N):
        yield int(value), np.flatnonzero(values_N == value)


def _pick_rows(logits_SV: torch.Tensor, index: npt.NDArray[np.intp], *, copy: bool) -> torch.Tensor:
    """Some rows; all of them without a copy unless one is asked for."""
    if len(index) == len(logits_SV):
        return logits_SV.clone() if copy else logits_SV
    return logits_SV[torch.from_numpy(index).to(logits_SV.device)]
