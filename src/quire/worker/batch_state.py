"""The rows of running requests, on the worker's side: their tokens, lengths and page tables.

A request owns a row from `NewRequestData` until the row is finished. The sampler's token is written to the row, and the
next step reads its input from there: planning never has to see it first. Knows nothing of models or of sampling.

Legend: R rows, L tokens a row may have, P pages a row may have.
"""

import numpy as np
import torch

from quire.core.output import IntArray, NewRequestData

SPARE_TOKENS = 2
"""Room behind the longest context: the last sampled token, and one that an asynchronous plan may overshoot."""


class BatchState:
    """State of all rows in flat arrays.

    Attributes:
        token_ids_RL: int32; `num_tokens` of each row are known. Memory is touched only where tokens are written.
        num_tokens_R, num_computed_R, num_prompt_R: int32.
        tables_GRP: int32, the page tables of each KV group; `tables_RP` are its parts.
        block_tables: the same memory as int32 [R, P] tensors, one a KV group, that attention reads.
    """

    def __init__(self, max_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.max_rows = max_rows
        self.row_length = max_model_len + SPARE_TOKENS
        self.row_pages = -(-self.row_length // block_size)
        self.token_ids_RL: IntArray = np.zeros((max_rows, self.row_length), dtype=np.int32)
        self.num_tokens_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.num_computed_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.tables_GRP: IntArray = np.zeros((num_groups, max_rows, self.row_pages), dtype=np.int32)
        self.tables_RP: list[IntArray] = list(self.tables_GRP)
        self.block_tables = [torch.from_numpy(table) for table in self.tables_RP]
        self._num_pages = [[0] * max_rows for _ in range(num_groups)]
        self.table_updates: list[tuple[int, int]] | None = None
        """(first place in `tables_GRP`, pages) that were added since the last upload, where a device keeps a copy of the tables;
        else None."""

    def add_row(self, request: NewRequestData) -> None:
        """Take in a request with all its known tokens and pages."""
        row, count = request.row, len(request.token_ids)
        self.token_ids_RL[row, :count] = request.token_ids
        self.num_tokens_R[row] = count
        self.num_computed_R[row] = request.num_computed_tokens
        self.num_prompt_R[row] = request.num_prompt_tokens
        for group, pages in enumerate(request.block_ids):
            self._num_pages[group][row] = 0
            self.append_pages(row, group, pages)

    def remove_row(self, row: int) -> None:
        """Forget a row; its arrays are overwritten by the next owner."""
        self.num_tokens_R[row] = 0
        self.num_computed_R[row] = 0
        self.num_prompt_R[row] = 0

    def append_pages(self, row: int, group: int, pages: list[int]) -> None:
        """Add pages to the end of a row's table."""
        start = self._num_pages[group][row]
        end = start + len(pages)
        self.tables_RP[group][row, start:end] = pages
        self._num_pages[group][row] = end
        if self.table_updates is not None:
            self.table_updates.append(((group * self.max_rows + row) * self.row_pages + start, len(pages)))

    def num_pages(self, group: int, rows: IntArray) -> IntArray:
        """Pages of rows."""
        counts = self._num_pages[group]
        return np.array([counts[row] for row in rows.tolist()], dtype=np.int32)

    def put_tokens(self, row: int, position: int, token_ids: list[int]) -> None:
        """Tokens that nobody has to draw stand from this position on."""
        end = position + len(token_ids)
        self.token_ids_RL[row, position:end] = token_ids
        self.num_tokens_R[row] = end

    def put_drafts(self, row: int, token_ids: list[int]) -> None:
        """These are computed behind the row's last token, though nobody knows yet whether they stand there."""
        start = int(self.num_tokens_R[row])
        self.token_ids_RL[row, start : start + len(token_ids)] = token_ids

    def settle_drafts(self, row: int, position: int, token_ids: list[int]) -> None:
        """What was drawn instead of the drafts from this position on; all of it but the last token is computed."""
        self.put_tokens(row, position, token_ids)
        self.num_computed_R[row] = position + len(token_ids) - 1

    def append_tokens(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Write the sampled tokens behind each row's last one; `positions` is where they stand."""
        self.token_ids_RL[rows, positions] = token_ids
        self.num_tokens_R[rows] = positions + 1
