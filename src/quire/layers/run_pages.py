"""Pages for an encoder's attention: runs of rows that see one another, each as a request whose tokens are all new.

What a layer keeps is of use within it alone, so all layers share the pages.
Legend: T rows of the step, B runs, P pages of a run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quire.attention.interface import AttentionMetadata
from quire.layers.decoder import Decoder
from quire.layers.interface import ModelContext


class RunPages:
    """The pages of one encoder.

    Args:
        decoder: its layers.
        slot_dtype: of slots in pages (`Capabilities.slot_dtype`).
        groups: which of a step's descriptions each layer reads; None: all the only one.
    """

    def __init__(
        self, decoder: Decoder, context: ModelContext, slot_dtype: torch.dtype, groups: Sequence[int] | None = None
    ) -> None:
        self._decoder, self._context, self._slot_dtype = decoder, context, slot_dtype
        self._groups = groups
        self._num_pages = 0

    def num_bytes(self, length: int) -> int:
        """Memory of the pages of a run of so many rows."""
        return self._pages_of([length]) * max((spec.page_bytes for spec in self._decoder.kv_cache_specs()), default=0)

    def describe(
        self, lengths: Sequence[int], positions_T: torch.Tensor, seen: Sequence[int] | None = None
    ) -> AttentionMetadata:
        """A step of runs of these lengths, one after another; there are pages for it from now on. `seen`: the rows of each that
        are seen, the first ones; None: all are."""
        self._reserve(self._pages_of(lengths))
        size, device = self._context.block_size, self._context.device
        lengths_B = np.array(lengths, dtype=np.int32)
        pages_B = -(-lengths_B // size)
        first_B = 1 + np.cumsum(pages_B) - pages_B
        within_T = np.arange(lengths_B.sum()) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
        table_BP = first_B[:, None] + np.arange(pages_B.max())
        shape = (len(within_T), len(lengths), int(lengths_B.max()), int(lengths_B.max()))

        def on_device(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        return AttentionMetadata(
            block_size=size,
            query_start=on_device(np.concatenate(([0], np.cumsum(lengths_B)))),
            seq_lens=on_device(lengths_B if seen is None else np.array(seen)),
            rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
            block_table=on_device(np.where(np.arange(pages_B.max()) < pages_B[:, None], table_BP, 0)),
            slot_mapping=on_device(np.repeat(first_B * size, lengths_B) + within_T, self._slot_dtype),
            positions=positions_T,
            shape=on_device(np.array(shape), torch.int64),
            num_tokens=shape[0],
            num_requests=shape[1],
            max_query_len=shape[2],
            max_seq_len=shape[3],
            decodes=bool((lengths_B == 1).any()),
        )

    def _pages_of(self, lengths: Sequence[int]) -> int:
        return 1 + sum(-(-length // self._context.block_size) for length in lengths)

    def _reserve(self, num_pages: int) -> None:
        """Have at least so many pages."""
        specs = self._decoder.kv_cache_specs()
        if num_pages <= self._num_pages or not specs:
            return
        self._num_pages = num_pages
        groups = [0] * len(specs) if self._groups is None else list(self._groups)
        self._decoder.bind_kv_cache([torch.empty(0)] * len(specs), groups)  # the old ones go first
        pages = self._context.backend.allocate(specs[0], num_pages, self._context.device)
        self._decoder.bind_kv_cache([pages] * len(specs), groups)
