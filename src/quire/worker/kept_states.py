"""States of recurrent layers as they were before a step with drafts: where a draft was wrong, the row goes on from there.

A state cannot be set back token by token. So the pages that a row's states are read from are copied before the step; a row
with a wrong draft gets them again, and computes the tokens that were right once more with its next step.
Knows rows and pages. Knows nothing of what a state is.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from quire.config.kv_spec import KVCacheConfig, KVKind
from quire.platforms.interface import DeviceMemory
from quire.worker.batch_state import BatchState
from quire.worker.page_store import PageStore


class KeptStates:
    """Of one step at a time.

    Args:
        kv_cache: which groups have states; without any nothing is kept.
        memory: of the device where pages are.

    Attributes:
        has_groups: whether there are states.
    """

    def __init__(self, kv_cache: KVCacheConfig, memory: DeviceMemory) -> None:
        groups = [number for number, group in enumerate(kv_cache.groups) if group.spec.kind is KVKind.RECURRENT]
        self._groups, self._block_size, self._memory = groups, kv_cache.block_size, memory
        self.has_groups = bool(groups)
        self._starts: dict[int, int] = {}
        self._pages_NG: npt.NDArray[np.int64] = np.zeros((0, len(groups)), dtype=np.int64)
        self._copies: list[torch.Tensor] = []

    def keep(self, rows: Collection[int], state: BatchState, pages: PageStore) -> None:
        """These rows are going to compute drafts."""
        self._starts, self._copies = {}, []
        if not self._groups or not rows:
            return
        rows_N = np.fromiter(rows, dtype=np.int32, count=len(rows))
        starts_N = state.num_computed_R[rows_N]
        self._starts = dict(zip(rows_N.tolist(), starts_N.tolist(), strict=True))
        before_N = np.maximum(starts_N - 1, 0) // self._block_size  # before the first token no state is read
        tables = [state.tables_RP[group][rows_N, before_N] for group in self._groups]
        self._pages_NG = np.stack(tables, axis=1).astype(np.int64)
        where = self._memory.upload(self._pages_NG.reshape(-1))
        self._copies = [tensor.index_select(0, where) for tensor in pages.tensors]

    def put_back(self, rows: Collection[int], state: BatchState, pages: PageStore) -> None:
        """These rows had a wrong draft. Of others, nothing was kept."""
        places = [place for place, row in enumerate(self._starts) if row in rows]
        if places:
            each = len(self._groups)
            index_M = np.concatenate([np.arange(each * place, each * (place + 1)) for place in places])
            from_M = self._memory.upload(index_M)
            to_M = self._memory.upload(self._pages_NG.reshape(-1)[index_M])
            for tensor, copy in zip(pages.tensors, self._copies, strict=True):
                tensor.index_copy_(0, to_M, copy.index_select(0, from_M))
            for row, start in self._starts.items():
                if row in rows:
                    state.num_computed_R[row] = start
        self._starts, self._copies = {}, []
