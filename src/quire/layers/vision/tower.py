"""An encoder of images that runs the layers of a decoder: patches in, embeddings for the language model out.

Its attention goes through the pages of the usual backends: a frame or a window of an image is a request whose tokens are all
new. Pages are of use within one layer only, so all layers share them. Knows nothing of requests, prompts or caches.
Legend: T rows of the step, P numbers of a patch, E embeddings, D columns of an embedding.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.types import LinearWeight
from quire.layers import weights as weight_table
from quire.layers.assembly import Weight
from quire.layers.decoder import Decoder
from quire.layers.interface import ModelContext, PatchInputs, StepInputs
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.parallel import ParallelPlan
from quire.layers.vision.patch_layout import Grid, Layout, blend, lay_out
from quire.layers.vision.projector import Projector
from quire.layers.weights import CheckpointTensor
from quire.models.sight import Patches
from quire.models.spec import VisionSpec

PREFIX = "vision."
"""Of its modules' names within the whole model."""
ROW_END = "row_end"
PLACES = "places"
"""What an item has besides its pixels where its embeddings stand in another order in the prompt: for each place the embedding,
counted over the item's squares; -1: a row's end. With `SHARES`, several embeddings for each place and their shares in it."""
SHARES = "shares"
Arrays = Mapping[str, npt.NDArray[Any]]


class VisionTower:
    """A vision encoder with its projectors, whole on every rank.

    Args:
        context: with a backend for the trunk's layers, and `max_tokens` as the rows of one step.
        slot_dtype: of slots in pages (`Capabilities.slot_dtype`).
    """

    def __init__(self, spec: VisionSpec, context: ModelContext, slot_dtype: torch.dtype = torch.int64) -> None:
        assert spec.trunk.patches is not None
        self.spec, self._context, self._slot_dtype = spec, context, slot_dtype
        self.patches: Patches = spec.trunk.patches
        self.decoder = Decoder(spec.trunk, context)
        width = spec.trunk.hidden * (1 if spec.taps else max(len(spec.trunk.taps), 1))
        self._projector = Projector(spec.projector, width)
        self._taps = [Projector(stages, spec.trunk.hidden) for stages in spec.taps]
        self._owners: dict[str, Projector] = {}
        self._row_end: torch.Tensor | None = None
        self.modules = self._list_modules()
        self._num_pages = 0

    def _list_modules(self) -> list[Module]:
        builder = ModuleBuilder(self.spec.trunk)
        modules = list(self.decoder.modules)
        for projector in (self._projector, *self._taps):
            for module in projector.modules(builder):
                self._owners[module.name] = projector
                modules.append(module)
        if self.spec.row_end:
            modules.append(builder.vector(ROW_END, RowBlock(self.spec.row_end, 1)))
        return [dataclasses.replace(module, name=PREFIX + module.name, shard="none", plain=True) for module in modules]

    def sources(self) -> dict[str, CheckpointTensor]:
        """The checkpoint's tensors that fill its modules."""
        return weight_table.sources_of(self.modules, self.spec.trunk, ParallelPlan())

    def set_weight(self, module: str, weight: Weight) -> None:
        """Take a module's weight; `module` is its name here."""
        if module in self._owners:
            if isinstance(weight, LinearWeight):
                weight.name = PREFIX + module
            self._owners[module].set_weight(module, weight)
        elif module == ROW_END:
            assert isinstance(weight, torch.Tensor)
            self._row_end = weight
        else:
            self.decoder.take_weights([(module, weight)])

    @property
    def buffer_bytes(self) -> int:
        """Memory of its own buffers, and of its pages when they are as many as one step needs."""
        return self.decoder.buffer_bytes + self._page_bytes(self._pages_of([self._context.max_tokens]))

    def encode(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """The embeddings [E, D] of images, each in a tensor of its own; what joins behind the decoder's first layers stands
        behind their columns. No gradient is kept.

        Args:
            items: what the frontend's processor gave: `pixels`, `grid` (frames, rows, columns) of patches that it cut, and
                `places`.
        """
        pieces = [self._pieces(item) for item in items]
        found = [
            one for batch in self._batches([piece for each in pieces for piece in each]) for one in self._run(batch)
        ]
        left = iter(found)
        return [self._arrange(item, [next(left) for _ in each]) for item, each in zip(items, pieces, strict=True)]

    def _pieces(self, item: Arrays) -> list[Arrays]:
        """An item's squares, which can be computed apart."""
        pixels = item["pixels"]
        return [item] if self.patches.is_cut or pixels.ndim < 4 else [{"pixels": square} for square in pixels]

    def _batches(self, pieces: Sequence[Arrays]) -> Iterator[list[Arrays]]:
        """As many at once as there is room for."""
        batch, num_rows = list[Arrays](), 0
        for piece in pieces:
            own = sum(math.prod(grid) + self.patches.class_token for grid in self._grids(piece))
            if batch and num_rows + own > self._context.max_tokens:
                yield batch
                batch, num_rows = [], 0
            batch.append(piece)
            num_rows += own
        yield batch

    def _arrange(self, item: Arrays, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """An item's embeddings as they stand in the prompt."""
        if PLACES not in item:
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        assert self._row_end is not None
        rows_ED = torch.cat([*parts, self._row_end[None].to(parts[0].dtype)])
        places = torch.from_numpy(item[PLACES].copy()).to(rows_ED.device)
        found = rows_ED[torch.where(places < 0, len(rows_ED) - 1, places)]
        if SHARES not in item:
            return found
        shares = torch.from_numpy(item[SHARES].copy()).to(rows_ED.device)
        return (found.float() * shares[..., None]).sum(1).to(rows_ED.dtype)

    def _run(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """The embeddings of items that are computed together."""
        with torch.no_grad():
            grids = [self._grids(item) for item in items]
            flat = [grid for each in grids for grid in each]
            layout = lay_out(self.patches, flat)
            step = self._step(layout, self._rows(items, layout), flat)
            self.decoder.begin_step(step)
            self.decoder.forward(step)
            embeddings_ED = self._project(layout, step)
        counts = iter(layout.counts)
        return [part.clone() for part in embeddings_ED.split([sum(next(counts) for _ in each) for each in grids])]

    def _grids(self, item: Arrays) -> list[Grid]:
        if self.patches.is_cut:
            return [(int(t), int(h), int(w)) for t, h, w in item["grid"].reshape(-1, 3)]
        height, width = item["pixels"].shape[-2:]
        size = self.patches.size
        return [(1, height // size, width // size)] * (item["pixels"].shape[0] if item["pixels"].ndim == 4 else 1)

    def _rows(self, items: Sequence[Arrays], layout: Layout) -> torch.Tensor:
        """The patches' numbers [T, P], in the step's order."""
        parts = [self._cut(torch.from_numpy(np.asarray(item["pixels"]).copy())) for item in items]
        rows = torch.cat(parts).to(self._context.device, self._context.activation_dtype)
        source_T = torch.from_numpy(layout.source_T).to(rows.device)
        rows_TP = rows.index_select(0, source_T.clamp(min=0))
        return rows_TP.masked_fill_((source_T < 0)[:, None], 0.0) if self.patches.class_token else rows_TP

    def _cut(self, pixels: torch.Tensor) -> torch.Tensor:
        """An item's patches, one a row: red first, then its rows of pixels."""
        if self.patches.is_cut:
            return pixels.reshape(-1, self.patches.values)
        size, (channels, height, width) = self.patches.size, pixels.shape[-3:]
        cut = pixels.reshape(-1, channels, height // size, size, width // size, size)
        return cut.permute(0, 2, 4, 1, 3, 5).reshape(-1, self.patches.values)

    def _step(self, layout: Layout, rows_TP: torch.Tensor, grids: Sequence[Grid]) -> StepInputs:
        count, device = len(layout.source_T), self._context.device

        def on_device(values: npt.NDArray[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        class_rows = None
        if self.patches.class_token:
            class_rows = on_device(np.flatnonzero(layout.source_T < 0), torch.int64)
        patches = PatchInputs(rows_TP, class_rows)
        learned = self.spec.trunk.learned_positions
        if learned is not None and self.patches.blended_positions:
            places, weights = blend(round(learned.count**0.5), layout, self.patches, grids)
            patches.blend_KT = on_device(places)
            patches.weights_KT = on_device(weights, rows_TP.dtype)
        positions = on_device(layout.positions_T)
        runs = [layout.whole, layout.windows] if self.patches.window else [layout.whole]
        self._reserve(max(map(self._pages_of, runs)))
        rotation = torch.arange(count, dtype=torch.int32, device=device)
        return StepInputs(
            input_ids=positions,
            positions=positions,
            logits_index=positions[:0],
            attention=[self._describe(lengths, rotation) for lengths in runs],
            num_tokens=count,
            axes=on_device(layout.axes_T2),
            patches=patches,
        )

    def _describe(self, lengths: Sequence[int], positions: torch.Tensor) -> AttentionMetadata:
        """Runs of rows that see one another: a request each, on pages of its own."""
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
            seq_lens=on_device(lengths_B),
            rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
            block_table=on_device(np.where(np.arange(pages_B.max()) < pages_B[:, None], table_BP, 0)),
            slot_mapping=on_device(np.repeat(first_B * size, lengths_B) + within_T, self._slot_dtype),
            positions=positions,
            shape=on_device(np.array(shape), torch.int64),
            num_tokens=shape[0],
            num_requests=shape[1],
            max_query_len=shape[2],
            max_seq_len=shape[3],
            decodes=bool((lengths_B == 1).any()),
        )

    def _pages_of(self, lengths: Sequence[int]) -> int:
        return 1 + sum(-(-length // self._context.block_size) for length in lengths)

    def _page_bytes(self, num_pages: int) -> int:
        return num_pages * max(spec.page_bytes for spec in self.decoder.kv_cache_specs())

    def _reserve(self, num_pages: int) -> None:
        """Have at least so many pages."""
        if num_pages <= self._num_pages:
            return
        self._num_pages, specs = num_pages, self.decoder.kv_cache_specs()
        self.decoder.bind_kv_cache([torch.empty(0)] * len(specs), [0] * len(specs))  # the old ones go first
        pages = self._context.backend.allocate(specs[0], num_pages, self._context.device)
        windowed = self.patches.windowed
        self.decoder.bind_kv_cache([pages] * len(specs), [int(layer in windowed) for layer in range(len(specs))])

    def _project(self, layout: Layout, step: StepInputs) -> torch.Tensor:
        """Embeddings [E, D] of the rows that the trunk left, with those of its taps behind them."""
        picked = torch.from_numpy(layout.picked_E).to(self._context.device)
        tapped = self.decoder.tapped
        if tapped and not self._taps:
            rows = torch.cat(tapped, dim=1)
        else:
            rows = self.decoder.compute_hidden(step)
        parts = [self._projector(rows.index_select(0, picked))]
        parts += [tap(rows.index_select(0, picked)) for tap, rows in zip(self._taps, tapped, strict=bool(self._taps))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
