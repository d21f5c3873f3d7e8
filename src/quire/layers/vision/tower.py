"""An encoder of images that runs the layers of a decoder: patches in, embeddings for the language model out.

A frame or a window of an image is a run of rows (`layers/tower.py`). Knows nothing of requests, prompts or caches.
Legend: T rows of the step, P numbers of a patch, E embeddings, D columns of an embedding.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.layers.interface import ModelContext, PatchInputs, StepInputs
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.projector import Pooling, Projector
from quire.layers.tower import Arrays, LayeredTower, TowerPart
from quire.layers.vision.patch_layout import Grid, Layout, blend, filled, lay_out
from quire.media import in_batches
from quire.models.sight import Patches, Product
from quire.models.spec import VisionSpec

PREFIX = "vision."
"""Of its modules' names within the whole model."""
VALUES = "values"
"""What bytes stand for, channel by channel, where an item's pixels are bytes."""
PLACES = "places"
"""What an item has besides its pixels where its embeddings stand in another order in the prompt: for each place the embedding,
counted over the squares; below zero: a learned one. With `SHARES`, several embeddings for each place and their shares in it."""
SHARES = "shares"
GROUPS = "groups"
"""The rows that become an embedding [E, G], counted over the squares; -1: none, which are zeros."""
with warnings.catch_warnings(
    action="ignore"
):  # torch warns once of arrays that may not be written: here, as `_rows` writes none
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


class _Between(TowerPart):
    """The learned rows that stand between those of an image."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self._spec = spec

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        outputs = [stage.outputs for stage in self._spec.projector if isinstance(stage, Product)]
        columns = self._spec.trunk.hidden if self._spec.projects_between else (outputs or [0])[-1]
        block = RowBlock(self._spec.between_rows, 1)
        for name in self._spec.between:
            is_one = block.rows == 1
            yield builder.vector(name, RowBlock(columns, 1)) if is_one else builder.table(name, (block,), columns)

    def rows(self) -> torch.Tensor:
        """All of them, the last one first."""
        return torch.cat([torch.atleast_2d(self.tensors[name]) for name in self._spec.between]).flip(0)


class VisionTower(LayeredTower):
    """A vision encoder with its projectors."""

    def __init__(self, spec: VisionSpec, context: ModelContext, slot_dtype: torch.dtype = torch.int64) -> None:
        assert spec.trunk.patches is not None
        self.spec = spec
        self.patches: Patches = spec.trunk.patches
        width = spec.trunk.hidden * (1 if spec.taps else max(len(spec.trunk.taps), 1))
        self._projector = Projector(spec.projector, width if spec.pooled is None else spec.pooled.outputs)
        self._taps = [Projector(stages, spec.trunk.hidden) for stages in spec.taps]
        self._between = _Between(spec)
        groups = [int(layer in self.patches.windowed) for layer in range(spec.trunk.layers)]
        self._pooling = None if spec.pooled is None else Pooling(spec.pooled, width)
        parts = (self._projector, *self._taps, self._between, *([] if self._pooling is None else [self._pooling]))
        super().__init__(PREFIX, spec.trunk, parts, context, slot_dtype, groups)

    def encode(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """The embeddings [E, D] of images; what joins behind the decoder's first layers stands behind their columns.

        Args:
            items: what the frontend's processor gave: `pixels`, `grid` (frames, rows, columns) of patches that it cut, and
                `places`.
        """
        pieces = [self._pieces(item) for item in items]
        batches = in_batches((piece for each in pieces for piece in each), self._num_rows, self._context.max_tokens)
        left = (one for batch in batches for one in self._run(batch))
        return [self._arrange(item, [next(left) for _ in each]) for item, each in zip(items, pieces, strict=True)]

    def _pieces(self, item: Arrays) -> list[Arrays]:
        """An item's squares, which can be computed apart."""
        pixels = item["pixels"]
        return [item] if self.patches.is_cut or pixels.ndim < 4 else [{"pixels": square} for square in pixels]

    def _num_rows(self, piece: Arrays) -> int:
        return sum(math.prod(filled(self.patches, grid)) + self.patches.class_token for grid in self._grids(piece))

    def _arrange(self, item: Arrays, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """An item's embeddings as they stand in the prompt."""
        rows_ED = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if self.spec.grouped:
            rows_ED = self._projector(self._grouped(rows_ED, torch.from_numpy(item[GROUPS].copy()).to(rows_ED.device)))
        if PLACES not in item:
            return rows_ED
        between = self._between.rows().to(rows_ED.dtype)
        if self.spec.projects_between:
            between = self._projector(between.repeat_interleave(self.patches.merge**2, 0))
        if self.spec.added is not None:
            rows_ED = rows_ED + between[-1 - self.spec.added]
        found = torch.cat((rows_ED, between))[torch.from_numpy(item[PLACES].copy()).to(rows_ED.device)]
        if SHARES not in item:
            return found
        shares = torch.from_numpy(item[SHARES].copy()).to(rows_ED.device)
        return (found.float() * shares[..., None]).sum(1).to(rows_ED.dtype)

    def _grouped(self, rows_XC: torch.Tensor, groups_EG: torch.Tensor) -> torch.Tensor:
        """What the projector reads: the rows of groups, one after another, or one for each group."""
        is_there_EG = groups_EG >= 0
        given_EGC = rows_XC[groups_EG.clamp(min=0)] * is_there_EG[..., None].to(rows_XC.dtype)
        return given_EGC.flatten(0, 1) if self._pooling is None else self._pooling(given_EGC, is_there_EG)

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
        dtype = self._context.activation_dtype
        rows = torch.cat([self._cut(self._pixels(item)).to(dtype) for item in items])
        source_T = torch.from_numpy(layout.source_T).to(rows.device)
        rows_TP = rows.index_select(0, source_T.clamp(min=0))
        return rows_TP.masked_fill_((source_T < 0)[:, None], 0.0) if self.patches.class_token else rows_TP

    def _pixels(self, item: Arrays) -> torch.Tensor:
        """On the device: numbers, or bytes [T, P] of patches of one frame, of which a table says what they stand for."""
        pixels = torch.from_numpy(item["pixels"]).to(self._context.device)
        if VALUES not in item:
            return pixels
        values_CB = torch.from_numpy(item[VALUES]).to(pixels.device)
        places = pixels.view(len(pixels), len(values_CB), -1).long()
        numbers = values_CB.expand(len(pixels), -1, -1).gather(2, places)
        return numbers[:, :, None].expand(-1, -1, self.patches.frames, -1)

    def _cut(self, pixels: torch.Tensor) -> torch.Tensor:
        """An item's patches, one a row: red first, then its rows of pixels; or pixel by pixel."""
        if self.patches.is_cut:
            return pixels.reshape(-1, self.patches.values)
        size, (channels, height, width) = self.patches.size, pixels.shape[-3:]
        cut = pixels.reshape(-1, channels, height // size, size, width // size, size)
        order = (0, 2, 4, 3, 5, 1) if self.patches.channels_last else (0, 2, 4, 1, 3, 5)
        return cut.permute(order).reshape(-1, self.patches.values)

    def _step(self, layout: Layout, rows_TP: torch.Tensor, grids: Sequence[Grid]) -> StepInputs:
        count, device = len(layout.source_T), self._context.device

        def on_device(values: npt.NDArray[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        class_rows = None
        if self.patches.class_token:
            class_rows = on_device(np.flatnonzero(layout.source_T < 0), torch.int64)
        patches = PatchInputs(rows_TP, class_rows)
        learned = self.spec.trunk.learned_positions
        if learned is not None and self.patches.stretch:
            places, weights = blend(learned.count, layout, self.patches, grids)
            patches.blend_KT = on_device(places)
            patches.weights_KT = on_device(weights, rows_TP.dtype)
        positions = on_device(layout.positions_T)
        runs = [layout.whole, layout.windows] if self.patches.window else [layout.whole]
        seen = layout.seen or None
        rotation = torch.arange(count, dtype=torch.int32, device=device)
        return StepInputs(
            input_ids=positions,
            positions=positions,
            logits_index=positions[:0],
            attention=[self._pages.describe(lengths, rotation, seen) for lengths in runs],
            num_tokens=count,
            axes=on_device(layout.axes_T2),
            patches=patches,
        )

    def _project(self, layout: Layout, step: StepInputs) -> torch.Tensor:
        """Embeddings [E, D] of the rows that the trunk left, with those of its taps behind them."""
        picked = torch.from_numpy(layout.picked_E).to(self._context.device)
        tapped = self.decoder.tapped
        is_tapped = tapped and not self._taps
        rows = torch.cat(tapped, dim=1) if is_tapped else self.decoder.compute_hidden(step)
        if self.spec.grouped:
            return rows.index_select(0, picked)
        parts = [self._projector(rows.index_select(0, picked))]
        parts += [tap(rows.index_select(0, picked)) for tap, rows in zip(self._taps, tapped, strict=bool(self._taps))]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
