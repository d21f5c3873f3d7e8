"""Products, embeddings and low-rank updates of adapters on the native library: tensors become pointers, and that is all.

Activations are float32 and contiguous; weights bfloat16, float16 or float32. Weights are repacked at load into the one layout
that every batch size reads (`csrc/micro.h`), and the original is dropped.
"""

import torch

from quire.kernels.adapters import AdapterRows, AdapterTable
from quire.kernels.cpu.binding import Operation, cpu_kernel, dtype_number, pack_panels
from quire.kernels.cpu.library import DTYPES
from quire.kernels.types import LinearWeight

_LINEAR = Operation("linear", "x packed:any bias out", longs="n k", ints="dtype")
_EMBEDDING = Operation("embedding", "ids:int packed:any out", longs="n k", floats="scale", ints="accumulate dtype")


def _packed(weight: LinearWeight) -> torch.Tensor:
    if weight.packed is None:
        raise ValueError(f"this weight [{weight.out_features}, {weight.in_features}] was not packed by the CPU kernels")
    return weight.packed


@cpu_kernel("pack_linear")
def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearWeight:
    dtype_number(weight_NK.dtype, "a weight")
    bias = None if bias_N is None else bias_N.float().contiguous()
    n, k = weight_NK.shape
    return LinearWeight(n, k, weight_NK.dtype, None, pack_panels(weight_NK[None]), bias)


@cpu_kernel("linear")
def linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
    packed = _packed(weight)
    rows, width = x_TK.shape
    if width != weight.in_features or out_TN.shape[1] != weight.out_features or out_TN.shape[0] < rows:
        wanted = f"[{rows}, {weight.in_features}] and [{rows}, {weight.out_features}]"
        raise ValueError(f"x and out must be {wanted}; they are {list(x_TK.shape)} and {list(out_TN.shape)}")
    _LINEAR(rows, x=x_TK, packed=packed, bias=weight.bias, out=out_TN, **_sizes(weight))


def _sizes(weight: LinearWeight) -> dict[str, int]:
    return {"n": weight.out_features, "k": weight.in_features, "dtype": DTYPES[weight.dtype]}


@cpu_kernel("embedding")
def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    _EMBEDDING(len(ids_T), ids=ids_T, packed=_packed(weight), out=out_TD, scale=scale, **_sizes(weight))


@cpu_kernel("add_embedding")
def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    tensors = {"ids": ids_T, "packed": _packed(weight), "out": out_TD}
    _EMBEDDING(len(ids_T), **tensors, scale=1.0, accumulate=1, **_sizes(weight))


_SHRINK, _LOOKUP, _EXPAND = (
    Operation(
        name,
        "x ids:int h out slots:int entries:long tiles:int",
        longs="k n h_width num_slots num_segments num_tiles",
        floats="scale",
        ints="dtype",
    )
    for name in ("adapter_shrink", "adapter_lookup", "adapter_expand")
)


def _run(
    operation: Operation,
    rows: AdapterRows,
    table: AdapterTable,
    h_PTH: torch.Tensor,
    scale: float = 1.0,
    **given: torch.Tensor,
) -> None:
    tensors = {**given, "h": h_PTH[0], "slots": rows.slots_T, "entries": table.entries_FL, "tiles": table.tiles_X3}
    operation(
        h_PTH.shape[1],
        **tensors,
        k=given["x"].shape[1] if "x" in given else 0,
        n=given["out"].shape[1] if "out" in given else 0,
        h_width=h_PTH.shape[2],
        num_slots=table.entries_FL.shape[1],
        num_segments=table.num_segments,
        num_tiles=len(table.tiles_X3),
        scale=scale,
        dtype=dtype_number(table.dtype, "an adapter"),
    )


@cpu_kernel("adapter_shrink")
def adapter_shrink(x_TK: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    _run(_SHRINK, rows, table, out_PTH, x=x_TK)


@cpu_kernel("adapter_lookup")
def adapter_lookup(ids_T: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    _run(_LOOKUP, rows, table, out_PTH, ids=ids_T)


@cpu_kernel("adapter_expand")
def adapter_expand(
    h_PTH: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_TN: torch.Tensor, scale: float = 1.0
) -> None:
    _run(_EXPAND, rows, table, h_PTH, scale, out=out_TN)
