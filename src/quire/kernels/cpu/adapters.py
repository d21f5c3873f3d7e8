"""Low-rank updates of adapters on the native library: tensors become pointers, and that is all."""

import torch

from quire.kernels.adapters import AdapterRows, AdapterTable
from quire.kernels.cpu.arguments import structure
from quire.kernels.cpu.binding import address, cpu_kernel, dtype_number, float_address, run

_Adapter = structure(
    "_Adapter",
    pointers="x ids h out slots entries tiles",
    longs="k n h_stride num_slots num_segments num_tiles",
    floats="scale",
    ints="dtype",
)


def _run(
    operation: str,
    rows: AdapterRows,
    table: AdapterTable,
    h_PTH: torch.Tensor,
    *,
    x_TK: torch.Tensor | None = None,
    ids_T: torch.Tensor | None = None,
    out_TN: torch.Tensor | None = None,
    scale: float = 1.0,
) -> None:
    call = _Adapter(
        float_address(x_TK, "x"),
        address(ids_T, torch.int32, "ids"),
        float_address(h_PTH[0], "h"),
        float_address(out_TN, "out"),
        address(rows.slots_T, torch.int32, "slots"),
        address(table.entries_FL, torch.int64, "entries"),
        address(table.tiles_X3, torch.int32, "tiles"),
        0 if x_TK is None else x_TK.shape[1],
        0 if out_TN is None else out_TN.shape[1],
        h_PTH.shape[2],
        table.entries_FL.shape[1],
        table.num_segments,
        len(table.tiles_X3),
        scale,
        dtype_number(table.dtype, "an adapter"),
    )
    tensors = (x_TK, ids_T, out_TN, h_PTH, rows.slots_T, table.entries_FL, table.tiles_X3)
    run(operation, call, h_PTH.shape[1], *tensors)


@cpu_kernel("adapter_shrink")
def adapter_shrink(x_TK: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    _run("adapter_shrink", rows, table, out_PTH, x_TK=x_TK)


@cpu_kernel("adapter_lookup")
def adapter_lookup(ids_T: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    _run("adapter_lookup", rows, table, out_PTH, ids_T=ids_T)


@cpu_kernel("adapter_expand")
def adapter_expand(
    h_PTH: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_TN: torch.Tensor, scale: float = 1.0
) -> None:
    _run("adapter_expand", rows, table, h_PTH, out_TN=out_TN, scale=scale)
