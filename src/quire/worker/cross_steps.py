"""What stands beside prompts, in a worker's steps: encoders read it before the step that needs it, and its keys and values stay
in pages of their own, which every step of the requests that see it reads.

Which items are kept and when they are dropped is the scheduler's decision, so there is always room. An item has its pages as long
as it is kept, however many requests see it. Knows rows, items and pages; knows no sound and no text.

Legend: R rows, P pages of an item, B requests of the step, E rows of an item.
"""

import numpy as np
import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheConfig, cross_pages
from quire.core.output import IntArray, SchedulerOutput
from quire.errors import EngineError
from quire.layers.encoder.cross_decoder import CrossDecoder
from quire.media import MediaItem, in_batches


class CrossSteps:
    """The items of running requests and their pages.

    Args:
        most_at_once: rows that the encoder computes together.
        slot_dtype: of slots in pages (`Capabilities.slot_dtype`).

    Attributes:
        lens_R: rows of each row's item. tables_RP: its pages.
        changed: rows whose items are others than when somebody last cleared this.
        longest: rows of the longest item.
    """

    def __init__(self, model: CrossDecoder, most_at_once: int, slot_dtype: torch.dtype) -> None:
        self._model, self._most, self._slot_dtype = model, most_at_once, slot_dtype
        self._rows: dict[int, str] = {}
        self._step_rows: IntArray = np.zeros(0, dtype=np.int32)
        self._waiting: dict[str, MediaItem] = {}
        self._pages: dict[str, tuple[IntArray, int]] = {}
        self._free: list[int] = []
        self.changed: set[int] = set()

    def allocate(self, kv_cache: KVCacheConfig, max_rows: int) -> None:
        """Begin with these pages, all of them free."""
        assert kv_cache.cross is not None
        self._block_size, self._num_pages = kv_cache.block_size, kv_cache.num_cross_blocks
        self.longest = kv_cache.cross.spec.window
        self.lens_R: IntArray = np.zeros(max_rows, dtype=np.int32)
        self.tables_RP: IntArray = np.zeros((max_rows, cross_pages(kv_cache.cross)), dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget everything: the scheduler has."""
        for kept in (self._rows, self._waiting, self._pages):
            kept.clear()
        self._free = list(range(self._num_pages - 1, 0, -1))

    def apply_diff(self, plan: SchedulerOutput) -> None:
        """Forget what is not needed any more, take in what is new."""
        self._step_rows = plan.rows
        for row in plan.finished_rows:
            self._rows.pop(row, None)
        for key in plan.dropped_media:
            self._waiting.pop(key, None)
            self._free += self._pages.pop(key)[0].tolist()
        for item in plan.encodes:
            self._waiting[item.key] = item
            count = -(-item.num_embeds // self._block_size)
            if count > len(self._free):
                raise EngineError(f"{item.key} needs {count} pages of cross attention, and {len(self._free)} are free")
            self._pages[item.key] = (np.array([self._free.pop() for _ in range(count)], np.int32), item.num_embeds)
        for request in plan.new_requests:
            if request.media:
                self._see(request.row, request.media[0].key)

    def _see(self, row: int, key: str) -> None:
        pages_P, length = self._pages[key]
        self._rows[row] = key
        self.lens_R[row] = length
        self.tables_RP[row, : len(pages_P)] = pages_P
        self.changed.add(row)

    def prepare(self) -> None:
        """Have the items of the step's requests read."""
        if self._waiting:
            keys = dict.fromkeys(self._rows[row] for row in self._step_rows.tolist() if row in self._rows)
            items = [self._waiting[key] for key in keys if key in self._waiting]
            for batch in in_batches(items, lambda item: item.num_embeds, self._most):
                self._compute(batch)

    def _compute(self, items: list[MediaItem]) -> None:
        arrays = [{name: tensor.to_array() for name, tensor in item.tensors.items()} for item in items]
        for item, rows_ED in zip(items, self._model.encoder.encode(arrays), strict=True):
            if len(rows_ED) != item.num_embeds:
                raise EngineError(f"an item of {item.num_embeds} rows became {len(rows_ED)} in the encoder")
            within_E = np.arange(len(rows_ED))
            slots_E = self._pages[item.key][0][within_E // self._block_size].astype(np.int64) * self._block_size
            slots = torch.from_numpy(slots_E + within_E % self._block_size)
            self._model.keep(rows_ED, slots.to(self._model.device, self._slot_dtype))
            del self._waiting[item.key]


class CrossBatch:
    """The description of a step for cross attention, on the host.

    Args:
        like: that of the requests' own pages, with which it shares all but lengths and pages.
    """

    def __init__(self, steps: CrossSteps, like: AttentionMetadata) -> None:
        self._steps = steps
        self._lens_B = np.zeros(len(like.rows), dtype=np.int32)
        self._shape = np.zeros(4, dtype=np.int64)
        self.metadata = AttentionMetadata(
            block_size=like.block_size,
            query_start=like.query_start,
            seq_lens=torch.from_numpy(self._lens_B),
            rows=like.rows,
            block_table=torch.from_numpy(steps.tables_RP),
            slot_mapping=like.slot_mapping,
            positions=like.positions,
            shape=torch.from_numpy(self._shape),
        )

    def fill(self, rows_B: IntArray, tokens: int, max_query_len: int) -> None:
        """A step of these rows."""
        requests, metadata = len(rows_B), self.metadata
        self._steps.lens_R.take(rows_B, out=self._lens_B[:requests], mode="clip")
        longest = int(self._lens_B[:requests].max(initial=0))
        self._shape[:] = (tokens, requests, max_query_len, longest)
        metadata.num_tokens, metadata.num_requests = tokens, requests
        metadata.max_query_len, metadata.max_seq_len = max_query_len, longest
