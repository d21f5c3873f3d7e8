"""The sampler: from a step's logits to one token a row, with logprobs for rows that want them.

It enqueues work on the device and never waits for it, so that it serves a GPU beside the host as well as a CPU, where work is
done when it is enqueued. The order of steps is vLLM's: raw logprobs; allowed ids, logit bias, bad words, min_tokens, the end of
reasoning; custom processors; penalties; temperature; min-p, top-k, top-p; Gumbel-max. What a row samples depends on its logits,
seed and position alone. Earlier tokens are counted on the device. Only these rows need their tokens on the host first: those
with a grammar, with code of the user's, with bad words of several tokens, and those whose reasoning may have to end.
Knows rows and logits. Knows nothing of requests, pages or steps.

Legend: S rows of the batch, N rows with some feature, V vocabulary, R rows in all, F figures a row.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels import ops
from quire.kernels.step import SampleColumns
from quire.platforms.interface import DeviceMemory
from quire.request import TokenLogprobs
from quire.sample import sampling_rows as features
from quire.sample.constraints import NOTHING_LEFT, RowConstraints, force_token
from quire.sample.custom_processors import run_engine_processors, run_row_processors
from quire.sample.grammar_masks import GrammarMasks, GrammarSource
from quire.sample.logits_processor import LogitsProcessor
from quire.sample.logprobs import LogprobGroup, compute_groups, compute_position_logprobs
from quire.sample.penalties import are_penalized, count_seen
from quire.sample.row_tables import AllowedTable, EditTable, MaskTable, SeenTable
from quire.sample.sampling_rows import SamplingRows
from quire.sampling_params import SamplingParams
from quire.spec_decode.rejection import Rejection

IntArray = npt.NDArray[np.int32]
NEEDS_TOKENS = 256
"""A feature bit beyond the table's: the row's earlier tokens have to be on the host."""
FOR_EVER = 2**31 - 1
_NO_ROWS = np.zeros(0, dtype=np.intp)
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclasses.dataclass
class Sampled:
    """What was enqueued for a step.

    Attributes:
        tensors: device tensors whose values `finish` needs on the host, by name.
    """

    groups: list[LogprobGroup]
    errors: dict[int, str]
    tensors: dict[str, torch.Tensor] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {
            f"{number}.{part}": tensor
            for number, group in enumerate(self.groups)
            for part, tensor in enumerate(group.tensors())
        }


class Sampler:
    """Samples tokens for rows. Kernels must have been selected (`ops.select`).

    Args:
        max_rows: number of rows.
        vocab_size: logits a row has.
        memory: of the device where logits are.
        logprobs_mode: logprobs are those of the model (`raw_`) or of what is sampled from (`processed_`); log probabilities or
            plain logits.
        logits_processors: the engine's own processors, already made.
        grammars: follows rows with `structured_outputs` through their grammars.

    Attributes:
        table: the rows' parameters, from which a step's columns are packed. masks: of rows with a grammar.
        redraw: puts other tokens in the place of what was drawn, before anything is told or counted of it, where there is one.

    Raises:
        ValueError: `logprobs_mode` is unknown.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        memory: DeviceMemory,
        logprobs_mode: str = "raw_logprobs",
        logits_processors: list[LogitsProcessor] | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise ValueError(f"logprobs_mode={logprobs_mode!r} must be one of {', '.join(LOGPROBS_MODES)}")
        self.table = SamplingRows(max_rows, vocab_size, logits_processors or [], grammars)
        self.put_tokens = self.table.put_tokens
        self.redraw: Rejection | None = None
        self._vocab_size = vocab_size
        self._memory, self._device = memory, memory.device()
        self._is_processed = logprobs_mode.startswith("processed")
        self._normalize = logprobs_mode.endswith("logprobs")
        self._seen = SeenTable(memory)
        self._edits = EditTable(memory)
        self._allowed = AllowedTable(vocab_size, memory)
        self.masks = MaskTable(max_rows, vocab_size, memory)
        # One line a figure: slots of the three tables (-1 for none), then the bits of three penalties.
        self._figures_FR = np.full((6, max_rows), -1, dtype=np.int32)
        self._seen_slot_R, self._edit_slot_R, self._allowed_slot_R = self._figures_FR[:3]
        self._penalties_3R = self._figures_FR[3:].view(np.float32)
        self._keeps_tokens_R = np.zeros(max_rows, dtype=np.bool_)
        self._needs_tokens_from_R = np.full(max_rows, FOR_EVER, dtype=np.int32)
        self._has_grammar_R = np.zeros(max_rows, dtype=np.bool_)

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """A request takes a row. `output_token_ids`: what it has emitted already (after a preemption or a restart)."""
        self.table.add(row, params, prompt_token_ids, output_token_ids, seed)
        objects = self.table.objects.get(row)
        if objects is None:
            return
        if are_penalized(params):
            penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            self._penalties_3R[:, row] = penalties
            self._seen_slot_R[row] = self._seen.put(*count_seen(params, prompt_token_ids, output_token_ids))
        constraints = objects.constraints
        if constraints is not None:
            self._add_constraints(row, constraints)
        needs = objects.processors or objects.engine_processors or (constraints and constraints.needs_output)
        limit = None if constraints is None else constraints.thinking
        self._keeps_tokens_R[row] = bool(needs) or limit is not None
        self._needs_tokens_from_R[row] = 0 if needs else FOR_EVER if limit is None else min(limit.deadline, FOR_EVER)
        self._has_grammar_R[row] = constraints is not None and constraints.grammar is not None

    def _add_constraints(self, row: int, constraints: RowConstraints) -> None:
        edits: dict[int, tuple[float, int]] = {
            token: (value, 0)
            for token, value in zip(constraints.bias_ids.tolist(), constraints.bias_values.tolist(), strict=True)
        }
        for ids, until in ((constraints.early, constraints.min_position), (constraints.single, FOR_EVER)):
            edits.update((token, (edits.get(token, (0.0, 0))[0], min(until, FOR_EVER))) for token in ids.tolist())
        if edits:
            values, until = zip(*edits.values(), strict=True)
            self._edit_slot_R[row] = self._edits.put(
                np.fromiter(edits, dtype=np.int32), np.array(values, np.float32), np.array(until, np.int32)
            )
        if len(constraints.allowed):
            self._allowed_slot_R[row] = self._allowed.put(constraints.allowed)

    def remove_row(self, row: int) -> None:
        """The row is free again; harmless if it has no sampling state."""
        self.table.remove(row)
        self._has_grammar_R[row] = False
        self._forget_tokens(row)
        self._free_constraints(row)
        if self._seen_slot_R[row] >= 0:
            self._seen.give(int(self._seen_slot_R[row]))
            self._seen_slot_R[row] = -1

    def _forget_tokens(self, row: int) -> None:
        self._keeps_tokens_R[row] = False
        self._needs_tokens_from_R[row] = FOR_EVER

    def _free_constraints(self, row: int) -> None:
        for slot_R, table in ((self._edit_slot_R, self._edits), (self._allowed_slot_R, self._allowed)):
            if slot_R[row] >= 0:
                table.give(int(slot_R[row]))
                slot_R[row] = -1

    def wanted(self, rows_S: IntArray, positions_S: IntArray | None = None) -> int:
        """The feature bits of a batch whose new tokens will stand there."""
        if not len(rows_S):
            return 0
        wanted = int(np.bitwise_or.reduce(self.table.features_R[rows_S]))
        if wanted <= features.RANDOM:
            return wanted
        needs = self._needs_tokens_from_R[rows_S] <= (0 if positions_S is None else positions_S)
        return wanted | NEEDS_TOKENS if needs.any() else wanted

    def is_plain(self, wanted: int) -> bool:
        """Whether `ops.gumbel_argmax` is all that a batch with these features needs."""
        return wanted <= features.RANDOM and not self._redraws

    @property
    def _redraws(self) -> bool:
        return self.redraw is not None and self.redraw.is_on

    def needs_rounds(self, rows_S: IntArray) -> bool:
        """Whether a row may draw only once its token before is known here, or with something to tell of each token: several
        draws of it cannot be made at once."""
        return bool((self.table.features_R[rows_S] & ~np.uint8(features.RANDOM | features.FILTER)).any())

    def room(self, row: int, token_ids: list[int]) -> int:
        """How many of these tokens a row's grammar allows one after the other, if it has one. All earlier tokens must have been
        given to `append_tokens`."""
        grammars, objects = self.table.grammars, self.table.objects.get(row)
        if not self._has_grammar_R[row] or grammars is None or objects is None or objects.constraints is None:
            return len(token_ids)
        return grammars.room(objects.constraints.grammar, objects.constraints.output, token_ids)

    def needs_tokens(self, wanted: int) -> bool:
        """Whether all earlier tokens must have been given to `append_tokens` before `sample`."""
        return bool(wanted & NEEDS_TOKENS)

    def begin_masks(self, rows_S: IntArray, positions_S: IntArray) -> GrammarMasks | None:
        """Have the masks of rows with a grammar made for `sample`, while the device computes their logits; None where there
        are none. All earlier tokens must have been given to `append_tokens`."""
        members = np.flatnonzero(self._has_grammar_R[rows_S])
        if not len(members) or self.table.grammars is None:
            return None
        masks_NW, numbers_S = self.masks.reserve(len(members), len(rows_S))
        followed: list[tuple[int, int, RowConstraints]] = []
        objects = self.table.objects
        for index, row, position in zip(
            members.tolist(), rows_S[members].tolist(), positions_S[members].tolist(), strict=True
        ):
            constraints = objects[row].constraints
            assert constraints is not None
            followed.append((index, position, constraints))
        masks = GrammarMasks(self.table.grammars, followed, masks_NW)
        numbers_S[members] = masks.line_N
        return masks

    def is_masked_alone(self, wanted: int, rows_S: IntArray) -> bool:
        """Whether the masks of `begin_masks`, and then `ops.gumbel_argmax`, are all that these rows need."""
        if (
            self._redraws
            or wanted & ~(features.RANDOM | features.CONSTRAINTS | NEEDS_TOKENS)
            or not wanted & features.CONSTRAINTS
        ):
            return False
        is_other_S = (self.table.features_R[rows_S] & features.CONSTRAINTS > 0) & ~self._has_grammar_R[rows_S]
        return not is_other_S.any() and bool((self._figures_FR[1:3, rows_S] < 0).all())

    def upload_masks(self, masks: GrammarMasks, rows_S: IntArray) -> Sampled:
        """The rows' masks go to the device, before a draw that reads them there; whose mask means nothing has an error."""
        wrong = masks.finish()
        self.masks.upload(masks.num_lines)
        return Sampled([], {int(rows_S[index]): message for index, message in wrong.items()})

    def compute_masked(self, logits_SV: torch.Tensor, columns: SampleColumns, out_S: torch.Tensor) -> None:
        """Sample rows that are masked alone, and rows without a mask; it may be captured."""
        count = len(logits_SV)
        numbers_S, masks_RW = self.masks.numbers_R[:count], self.masks.masks_RW
        if ops.is_native("allowed_gumbel_argmax"):
            inverse_S, seed_S = columns.inverse_temperature_S[:count], columns.seed_S[:count]
            ops.allowed_gumbel_argmax(
                logits_SV, numbers_S, masks_RW, inverse_S, seed_S, columns.positions_S[:count], out_S
            )
            return
        ops.keep_allowed(logits_SV, numbers_S, masks_RW)
        self._draw(logits_SV, columns, features.RANDOM, out_S)

    def sample(
        self,
        logits_SV: torch.Tensor,
        columns: SampleColumns,
        rows_S: IntArray,
        positions_S: IntArray,
        wanted: int,
        out_S: torch.Tensor,
        masks: GrammarMasks | None = None,
    ) -> Sampled:
        """Enqueue the draw of each row's next token.

        Args:
            logits_SV: float32, contiguous; used as scratch space.
            columns: parameters of these rows, on the device.
            positions_S: where the new tokens will stand, as the columns have them.
            wanted: what `wanted` said of these rows.
            out_S: int32; gets the tokens.
            masks: what `begin_masks` said of these rows.
        """
        if wanted <= features.RANDOM:
            self._draw_last(logits_SV, columns, rows_S, positions_S, wanted, out_S)
            return Sampled([], {})
        errors: dict[int, str] = {}
        members = self._members(rows_S, features.LOGPROBS) if wanted & features.LOGPROBS else _NO_ROWS
        where_N = self._memory.upload(members) if len(members) else None
        raw_NV = None
        if where_N is not None and not self._is_processed and wanted & features.EDITS:
            # Taken aside only where the logits are about to change.
            raw_NV = logits_SV.index_select(0, where_N)
        figures_FS = self._memory.upload(self._figures_FR[:, rows_S]) if wanted & features.EDITS else None
        if wanted & features.FAILED:
            for row in rows_S[self._members(rows_S, features.FAILED)].tolist():
                errors[row] = self.table.objects[row].failure
        longest = 0
        if figures_FS is not None:
            if wanted & features.PENALTIES:
                slots_S = self._seen_slot_R[rows_S]
                longest = self._seen.prepare_step(slots_S[slots_S >= 0])
            self._edit(logits_SV, columns, figures_FS, rows_S, positions_S, wanted, longest, errors, masks)
        threshold_S = self._draw_last(logits_SV, columns, rows_S, positions_S, wanted, out_S)
        groups: list[LogprobGroup] = []
        if where_N is not None:
            groups = self._compute_logprobs(raw_NV, logits_SV, columns, threshold_S, rows_S, members, where_N, out_S)
        if figures_FS is not None and wanted & features.PENALTIES:
            seen = self._seen
            ops.count_tokens(out_S, figures_FS[0], seen.ids_XC, seen.counts_XC, seen.sizes_X)
        return Sampled(groups, errors)

    def finish(self, sampled: Sampled, host_tensors: dict[str, torch.Tensor]) -> dict[int, TokenLogprobs]:
        """The step's logprobs by row, once `sampled.tensors` have arrived on the host under their names."""
        logprobs: dict[int, TokenLogprobs] = {}
        for number, group in enumerate(sampled.groups):
            logprobs.update(group.entries(*(host_tensors[f"{number}.{part}"] for part in range(3))))
        return logprobs

    def append_tokens(self, rows_S: IntArray, token_ids_S: IntArray, positions_S: IntArray) -> dict[int, list[int]]:
        """Tokens have arrived: rows that need them on the host take note. By row, the tokens that can only follow."""
        members = np.flatnonzero(self._keeps_tokens_R[rows_S])
        columns = (rows_S[members].tolist(), token_ids_S[members].tolist(), positions_S[members].tolist())
        for row, token_id, position in zip(*columns, strict=True):
            objects = self.table.objects[row]
            number = position - len(objects.prompt_token_ids)
            objects.output_token_ids[number : number + 1] = (token_id,)  # `put_tokens` may have been here
        return self.table.find_forced(rows_S, positions_S)

    def compute_prompt_logprobs(self, logits_NV: torch.Tensor, token_ids_N: IntArray, row: int) -> TokenLogprobs:
        """Logprobs of a row's own prompt tokens; the number of alternatives is the row's `prompt_logprobs`. Waits for the
        device."""
        count = int(self.table.num_prompt_logprobs_R[row])
        return compute_position_logprobs(logits_NV, token_ids_N.astype(np.int32), count, self._normalize, self._memory)

    def _members(self, rows_S: IntArray, feature: int) -> npt.NDArray[np.intp]:
        """Batch indices of the rows with a feature."""
        return np.flatnonzero(self.table.features_R[rows_S] & feature)

    def _edit(
        self,
        logits_SV: torch.Tensor,
        columns: SampleColumns,
        figures_FS: torch.Tensor,
        rows_S: IntArray,
        positions_S: IntArray,
        wanted: int,
        longest: int,
        errors: dict[int, str],
        masks: GrammarMasks | None,
    ) -> None:
        """Everything that changes logits before temperature."""
        if wanted & features.CONSTRAINTS:
            self._constrain(logits_SV, columns, figures_FS, rows_S, positions_S, errors, masks)
        if wanted & features.PROCESSORS:
            members = self._members(rows_S, features.PROCESSORS).tolist()
            run_row_processors(self.table, logits_SV, rows_S, members, errors)
        if wanted & features.ENGINE_PROCESSORS:
            members = self._members(rows_S, features.ENGINE_PROCESSORS).tolist()
            run_engine_processors(self.table, logits_SV, rows_S, members, errors)
        if wanted & features.PENALTIES:
            seen = self._seen
            repetition_S, frequency_S, presence_S = figures_FS[3:].view(torch.float32).unbind()
            table = (seen.ids_XC, seen.counts_XC, seen.sizes_X)
            ops.penalize(logits_SV, figures_FS[0], repetition_S, frequency_S, presence_S, *table, longest)

    def _constrain(
        self,
        logits_SV: torch.Tensor,
        columns: SampleColumns,
        figures_FS: torch.Tensor,
        rows_S: IntArray,
        positions_S: IntArray,
        errors: dict[int, str],
        masks: GrammarMasks | None,
    ) -> None:
        """A row with a grammar has in its mask whatever else is forbidden to it."""
        hidden: list[np.ndarray] = []
        forced: list[tuple[int, int]] = []
        if masks is not None:
            errors.update(self.upload_masks(masks, rows_S).errors)
            ops.keep_allowed(logits_SV, self.masks.numbers_R[: len(rows_S)], self.masks.masks_RW)
        is_constrained_S = (self.table.features_R[rows_S] & features.CONSTRAINTS) > 0
        for index in np.flatnonzero(is_constrained_S).tolist():
            row, position = int(rows_S[index]), int(positions_S[index])
            constraints = self.table.objects[row].constraints
            assert constraints is not None
            if (token_id := constraints.forced(position)) is not None:
                forced.append((index, token_id))
            if self._has_grammar_R[row]:
                continue
            if constraints.end_at(position):
                # Its edits in flight have nothing left to do either: every one of them ends at this position.
                self._end_constraints(row, constraints)
                continue
            if self._forbids_everything(constraints, position):
                errors[row] = NOTHING_LEFT
            if constraints.needs_output:
                hidden += [part + index * self._vocab_size for part in constraints.banned(position)]
        if (self._allowed_slot_R[rows_S] >= 0).any():
            ops.keep_allowed(logits_SV, figures_FS[2], self._allowed.bits_XW)
        if (self._edit_slot_R[rows_S] >= 0).any():
            edits, position_S = self._edits, columns.positions_S[: len(rows_S)]
            ops.edit_logits(logits_SV, figures_FS[1], position_S, edits.ids_XE, edits.values_XE, edits.until_XE)
        if hidden:
            logits_SV.view(-1).index_fill_(0, self._memory.upload(np.concatenate(hidden)), float("-inf"))
        for index, token_id in forced:
            force_token(logits_SV[index], token_id)

    def _end_constraints(self, row: int, constraints: RowConstraints) -> None:
        self.table.end_constraints(row)
        self._free_constraints(row)
        objects = self.table.objects.get(row)
        if constraints.thinking is not None and (
            objects is None or not (objects.processors or objects.engine_processors)
        ):
            self._forget_tokens(row)

    def _forbids_everything(self, constraints: RowConstraints, position: int) -> bool:
        allowed = constraints.allowed
        num_allowed = len(allowed) or self._vocab_size
        banned = constraints.banned(position)
        if sum(len(part) for part in banned) < num_allowed:
            return False
        ids = np.concatenate(banned)
        return len(np.intersect1d(ids, allowed) if len(allowed) else np.unique(ids)) >= num_allowed

    def _draw_last(
        self,
        logits_SV: torch.Tensor,
        columns: SampleColumns,
        rows_S: IntArray,
        positions_S: IntArray,
        wanted: int,
        out_S: torch.Tensor,
    ) -> torch.Tensor | None:
        """`_draw`, and what `redraw` makes of it."""
        threshold_S = self._draw(logits_SV, columns, wanted, out_S)
        if (
            self.redraw is not None and self.redraw.is_on and wanted & features.RANDOM
        ):  # greedy draws stay what they are
            self.redraw.replace(logits_SV, columns, threshold_S, rows_S, positions_S, out_S)
        return threshold_S

    def _draw(
        self, logits_SV: torch.Tensor, columns: SampleColumns, wanted: int, out_S: torch.Tensor
    ) -> torch.Tensor | None:
        """The rows' tokens; the thresholds under which nothing was drawn, if any row filters."""
        count = len(logits_SV)
        if not wanted & features.RANDOM:
            ops.argmax(logits_SV, out_S)
            return None
        inverse_S, seed_S = columns.inverse_temperature_S[:count], columns.seed_S[:count]
        position_S = columns.positions_S[:count]
        if not wanted & features.FILTER:
            ops.gumbel_argmax(logits_SV, inverse_S, seed_S, position_S, out_S)
            return None
        threshold_S = torch.empty(count, dtype=torch.float32, device=self._device)
        filters = (columns.top_k_S[:count], columns.top_p_S[:count], columns.min_p_S[:count])
        ops.filtered_gumbel_argmax(logits_SV, inverse_S, *filters, seed_S, position_S, threshold_S, out_S)
        return threshold_S

    def _compute_logprobs(
        self,
        raw_NV: torch.Tensor | None,
        logits_SV: torch.Tensor,
        columns: SampleColumns,
        threshold_S: torch.Tensor | None,
        rows_S: IntArray,
        members: npt.NDArray[np.intp],
        where_N: torch.Tensor,
        out_S: torch.Tensor,
    ) -> list[LogprobGroup]:
        rows_N = rows_S[members]
        token_ids_N = out_S.index_select(0, where_N)
        chosen, index_N = raw_NV, np.arange(len(members), dtype=np.int32)
        if self._is_processed:
            # What was drawn from: after temperature where there is one.
            chosen = logits_SV.index_select(0, where_N)
            if threshold_S is not None:
                ops.hide_below(chosen, threshold_S.index_select(0, where_N))
            inverse_N = columns.inverse_temperature_S[: len(rows_S)].index_select(0, where_N)
            chosen *= torch.where(torch.isinf(inverse_N), 1.0, inverse_N)[:, None]
        elif chosen is None:
            chosen, index_N = logits_SV, members.astype(np.int32)
        return compute_groups(chosen, index_N, rows_N, self.table, token_ids_N, self._memory, normalize=self._normalize)
