"""Low-rank updates of adapters on the native library: tensors become pointers, and that is all."""

import torch

from quire.kernels.adapters import AdapterRows, AdapterTable
from quire.kernels.cpu.binding import Operation, cpu_kernel, dtype_number

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
