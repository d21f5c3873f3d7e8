"""The inputs of a drafter's passes: some tokens of each row that drew, in buffers that never move.

Everything is computed where the drafter runs, from how many tokens each row has and what the last ones are: no pass waits for the
host. Entries behind the rows' own number, up to a graph's size, are made harmless. Knows nothing of models.

Legend: N rows, T tokens of a pass, W tokens of a row in a pass, F fields, K drafts.
"""

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.step import allocate_columns
from quire.layers.interface import StepInputs

CAPACITY, LENGTH, LAST, BEFORE = range(4)
"""Fields of a row: tokens that fit into its pages, how many it has, the last of them and the one before that."""


class DraftBatch:
    """The rows that a drafter guesses for.

    Args:
        tables: page tables [R, P] where the drafter reads them, one a KV group.
        groups: those that its layers use.
        max_positions: tokens that a row may have.
        most: drafts of a row at most.
        widest: tokens of a row in a pass, at most.

    Attributes:
        columns: the rows' numbers, and what they draw with.
        fields_FN: int32; what else there is to know of the rows, by field. live: int32 [1]; how many rows there are.
        drafts_KN: int32; the guesses.
    """

    def __init__(
        self,
        tables: list[torch.Tensor],
        groups: list[int],
        block_size: int,
        max_rows: int,
        max_positions: int,
        most: int,
        widest: int,
        device: torch.device,
        slot_dtype: torch.dtype,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tables, self._groups, self._block_size = tables, groups, block_size
        self._last_position = max_positions - 1
        self.columns, self.fields_FN = allocate_columns(max_rows, device), zeros(4, max_rows)
        self.live, self.drafts_KN = zeros(1), zeros(most, max_rows)
        most_tokens = widest * max_rows
        self._ids_T, self._positions_T = zeros(most_tokens), zeros(most_tokens)
        self._slots_GT = [zeros(most_tokens, dtype=slot_dtype) for _ in tables]
        self._query_start, self._seq_lens = zeros(max_rows + 1), zeros(max_rows)
        self._index_N, self._last_N = zeros(max_rows), zeros(max_rows)
        self._shape = zeros(4, dtype=torch.int64)
        self._count_up = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._back = {
            width: torch.arange(1 - width, 1, dtype=torch.int32, device=device) for width in range(1, widest + 1)
        }
        self._steps: dict[tuple[int, int], StepInputs] = {}

    def place(self, count: int, width: int, ahead: int) -> StepInputs:
        """The pass in which each row computes `width` tokens, the last of them so many behind its last known one."""
        fields, tokens, size, live = self.fields_FN[:, :count], count * width, self._block_size, self.live
        lengths_N, rows_N1 = fields[LENGTH], self.columns.rows_S[:count].long()[:, None]
        positions_NW = (lengths_N[:, None] + (ahead - 1) + self._back[width]).clamp_(0, self._last_position)
        pages_NW = torch.div(positions_NW, size, rounding_mode="floor")
        offsets_NW = positions_NW - pages_NW * size
        is_there_NW = positions_NW < fields[CAPACITY][:, None]
        for group in self._groups:
            found_NW = torch.where(is_there_NW, self._tables[group][rows_N1, pages_NW.long()], 0)
            self._slots_GT[group][:tokens] = (found_NW * size + offsets_NW).view(-1)
        self._positions_T[:tokens] = positions_NW.view(-1)
        queries = torch.minimum(self._count_up[: count + 1], live)
        self._query_start[: count + 1] = queries * width
        self._seq_lens[:count] = torch.where(self._count_up[:count] < live, positions_NW[:, -1] + 1, 0)
        self._last_N[:count] = self._count_up[:count] * width + (width - 1)
        self.look_at(count, 0)
        self._shape[0], self._shape[1] = live[0] * width, live[0]
        self._shape[2:3] = width  # of one element it would be a copy from the host, which no graph can capture
        self._shape[3] = self._seq_lens[:count].max()
        return self._step(count, width)

    def look_at(self, count: int, behind_last: int) -> None:
        """Logits are wanted of the token so many places behind the last one of each row's in the pass."""
        self._index_N[:count] = self._last_N[:count] + behind_last

    def aim(self, count: int, number: int) -> None:
        """The next draw is of each row's guess of this number: the noise is that of where it will stand."""
        self.columns.positions_S[:count] = self.fields_FN[LENGTH, :count] + number

    def put_ids(self, count: int, *columns: torch.Tensor, masks: int = 0, mask: int = 0) -> None:
        """The tokens of a pass: of each row one of each column, and behind them so many of this token."""
        width = len(columns) + masks
        ids_NW = self._ids_T[: count * width].view(count, width)
        ids_NW[:, len(columns) :] = mask
        for place, column in enumerate(columns):
            ids_NW[:, place] = column[:count]

    def _step(self, count: int, width: int) -> StepInputs:
        step = self._steps.get((count, width))
        if step is None:
            attention = [
                AttentionMetadata(
                    block_size=self._block_size,
                    query_start=self._query_start,
                    seq_lens=self._seq_lens,
                    rows=self.columns.rows_S,
                    block_table=table,
                    slot_mapping=slots,
                    positions=self._positions_T,
                    shape=self._shape,
                    num_tokens=count * width,
                    num_requests=count,
                    max_query_len=width,
                    max_seq_len=self._last_position + 1,
                )
                for table, slots in zip(self._tables, self._slots_GT, strict=True)
            ]
            step = StepInputs(self._ids_T, self._positions_T, self._index_N, attention, count * width, count)
            self._steps[count, width] = step
        return step
