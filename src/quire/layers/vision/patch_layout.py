"""How the patches of images stand in an encoder's step: their order, positions, neighbours, and which rows make an embedding.

All of it follows from each image's grid of patches. Knows no tensor of a device.
Legend: T rows of the step (patches and class tokens), E embeddings, G rows of an embedding.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quire.models.sight import Patches

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's patches."""
IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One step.

    Attributes:
        source_T: for each row the patch that stands there, counted over all images; -1 for a class token.
        positions_T: its place in its image, the class token's included.
        axes_T2: its row and column in its image.
        whole, windows: lengths of the runs of rows that see one another: of an image's frames, and of windows. `seen`: how
            many of an image's first rows are seen, where those behind them fill it.
        picked_E: the rows that make the embeddings, one after another, in the order in which these stand in the prompt.
        counts: embeddings of each image.
    """

    source_T: IntArray
    positions_T: IntArray
    axes_T2: IntArray
    whole: list[int]
    windows: list[int]
    picked_E: IntArray
    counts: list[int]
    seen: list[int]


def lay_out(patches: Patches, grids: Sequence[Grid]) -> Layout:
    """The rows of these images, one after another."""
    parts = [_one(patches, grid) for grid in grids]
    num_patches = np.cumsum([0, *(len(part.source_T) for part in parts)])
    num_sources = np.cumsum([0, *(math.prod(filled(patches, grid)) for grid in grids)])
    return Layout(
        np.concatenate(
            [np.where(p.source_T < 0, -1, p.source_T + at) for p, at in zip(parts, num_sources, strict=False)]
        ),
        np.concatenate([part.positions_T for part in parts]),
        np.concatenate([part.axes_T2 for part in parts]),
        [length for part in parts for length in part.whole],
        [length for part in parts for length in part.windows],
        np.concatenate([part.picked_E + at for part, at in zip(parts, num_patches, strict=False)]),
        [count for part in parts for count in part.counts],
        [length for part in parts for length in part.seen],
    )


def filled(patches: Patches, grid: Grid) -> Grid:
    """The grid with what fills its last blocks."""
    merge = patches.merge if patches.fills else 1
    return grid[0], -(-grid[1] // merge) * merge, -(-grid[2] // merge) * merge


def _is_seen(patches: Patches, grid: Grid) -> npt.NDArray[np.bool_]:
    """Which patches fill nothing, in the order in which the processor gives them."""
    h, w = coordinates(patches, filled(patches, grid))
    return (h < grid[1]) & (w < grid[2])


def _one(patches: Patches, grid: Grid) -> Layout:
    """One image."""
    seen = [math.prod(grid)] if patches.fills else []
    first = np.argsort(~_is_seen(patches, grid), kind="stable")  # those that are seen
    grid = filled(patches, grid)
    frames, rows, columns = grid
    order, windows = _in_windows(patches, grid) if patches.window else (first, [])
    h, w = (axis[order] for axis in coordinates(patches, grid))
    source, positions, picked = order, order % (rows * columns), np.empty(len(order), dtype=np.int64)
    picked[order] = np.arange(len(order))  # embeddings stand in the order of the processor's patches, in blocks
    if not patches.is_cut and patches.merge > 1:
        picked = picked[_blocks(grid, patches.merge)]
    whole = [rows * columns] * frames
    if patches.class_token:
        source, own = np.insert(source, 0, -1), len(positions) if patches.class_last else 0
        positions = np.insert(positions + (not patches.class_last), 0, own)
        h, w = np.insert(h + 1, 0, 0), np.insert(w + 1, 0, 0)  # it does not turn
        picked, whole = np.insert(picked + 1, 0, [0] * patches.keeps_class), [length + 1 for length in whole]
    picked = np.zeros(1, dtype=np.int64) if patches.embeds_class else picked
    count = 1 if patches.embeds_class or patches.embeds_all else len(picked) // patches.merge**2
    return Layout(source, positions, np.stack((h, w), axis=1), whole, windows, picked, [count], seen)


def coordinates(patches: Patches, grid: Grid) -> tuple[IntArray, IntArray]:
    """The row and the column of each patch, in the order in which the processor gives them."""
    frames, rows, columns = grid
    h, w = (axis.reshape(-1) for axis in np.indices((rows, columns)))
    if patches.is_cut and patches.merge > 1:
        order = _blocks((1, rows, columns), patches.merge)
        h, w = h[order], w[order]
    return np.tile(h, frames), np.tile(w, frames)


def _blocks(grid: Grid, merge: int) -> IntArray:
    """The places of an image's patches, row by row, in the order of blocks of merge x merge."""
    frames, rows, columns = grid
    places = np.arange(frames * rows * columns).reshape(frames, rows // merge, merge, columns // merge, merge)
    return places.transpose(0, 1, 3, 2, 4).reshape(-1)


def _in_windows(patches: Patches, grid: Grid) -> tuple[IntArray, list[int]]:
    """The processor's patches in the order of windows, and the windows' lengths."""
    unit, side = patches.merge**2, patches.window // patches.merge
    frames, rows, columns = grid[0], grid[1] // patches.merge, grid[2] // patches.merge
    cells = np.arange(frames * rows * columns).reshape(frames, rows, columns)
    found = list(_window_cells(cells, side))
    order = (np.concatenate(found)[:, None] * unit + np.arange(unit)).reshape(-1)
    return order, [len(window) * unit for window in found]


def _window_cells(cells: IntArray, side: int) -> Iterator[IntArray]:
    for frame in cells:
        for top in range(0, frame.shape[0], side):
            for left in range(0, frame.shape[1], side):
                yield frame[top : top + side, left : left + side].reshape(-1)


def blend(
    count: int, layout: Layout, patches: Patches, grids: Sequence[Grid]
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """For `count` learned positions that are a square grid stretched over each image, or two tables: some places for each row of
    the step, and their weights."""
    places: list[IntArray] = []
    weights: list[npt.NDArray[np.float32]] = []
    if patches.stretch in ("apart", "turns"):
        step, rows_at = (1, count // 2) if patches.stretch == "apart" else (2, 1)
        places_2T = step * layout.axes_T2.T[::-1] + np.array([[0], [rows_at]])
        return places_2T, np.ones(places_2T.shape, np.float32)
    grid_side = round(count**0.5)
    if patches.stretch == "cells":
        cells_T = np.concatenate([_cells(patches, grid, grid_side) for grid in grids])[None, layout.source_T]
        return cells_T, np.ones(cells_T.shape, np.float32)
    near = {"corners": _near_corners, "linear": _near_lines, "cubic": _near_cells}[patches.stretch]
    for frames, rows, columns in grids:
        at_h, at_w = coordinates(patches, (frames, rows, columns))
        (top, down), (left, across) = near(rows, grid_side), near(columns, grid_side)
        places.append((top[:, None, at_h] * grid_side + left[None, :, at_w]).reshape(-1, len(at_h)))
        weights.append((down[:, None, at_h] * across[None, :, at_w]).reshape(-1, len(at_h)))
    return np.concatenate(places, axis=1)[:, layout.source_T], np.concatenate(weights, axis=1)[:, layout.source_T]


def _cells(patches: Patches, grid: Grid, side: int) -> IntArray:
    """The cell of a square that is spread over a grid in which each of its patches begins; the first one of those that fill."""
    edges = np.arange(1, side, dtype=np.float32) / np.float32(side)
    axes = zip(coordinates(patches, filled(patches, grid)), grid[1:], strict=True)
    row, column = (np.searchsorted(edges, at * (np.float32(1) / np.float32(count)), "right") for at, count in axes)
    return np.where(_is_seen(patches, grid), row * side + column, 0)


def _near_corners(count: int, side: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """For each of `count` lines over a grid the two grid lines beside it, and their shares [2, count]."""
    axis = np.linspace(0, side - 1, count, dtype=np.float32)
    low = axis.astype(np.int64)
    return np.stack((low, np.minimum(low + 1, side - 1))), np.stack((1 - (axis - low), axis - low))


def _near_lines(count: int, side: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """As `_near_corners`, of two cells; beyond the edge the grid goes on as it ends."""
    axis = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * np.float32(side / count) - np.float32(0.5)
    low = np.floor(axis).astype(np.int64)
    return np.stack((low, low + 1)).clip(0, side - 1), np.stack((1 - (axis - low), axis - low))


_SHARPNESS = -0.75
"""Of cubic convolution, as image libraries have it."""


def _near_cells(count: int, side: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """As `_near_corners`, of four [4, count], by cubic convolution; beyond the edge the grid goes on as it ends."""
    axis = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * np.float32(side / count) - np.float32(0.5)
    low = np.floor(axis).astype(np.int64)
    near = low + np.arange(-1, 3)[:, None]
    x = np.abs(axis - near)
    inside = ((_SHARPNESS + 2) * x - (_SHARPNESS + 3)) * x * x + 1
    outside = _SHARPNESS * (((x - 5) * x + 8) * x - 4)
    return near.clip(0, side - 1), np.where(x <= 1, inside, outside).astype(np.float32)
