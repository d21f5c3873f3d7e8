"""Low-rank updates of adapters: rows of one adapter are taken together, sixteen at most; where an adapter's numbers are is read
from a table of addresses, so that a captured step serves any adapters.

The inputs of the first product are shared out among programs, whose parts of the sums the second product adds up: nothing is
added in an order that another batch would change. Legend as in `kernels/adapters.py`; G groups of rows.
"""

import torch
import triton

from quire.kernels.adapters import GROUP, TILE, AdapterRows, AdapterTable
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launch_options, next_power_of_2, tl

RANK_BLOCK = 16
"""Ranks of a program."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _field(entries_ptr, field: tl.constexpr, slot, num_slots):
    return tl.load(entries_ptr + field * num_slots + slot)


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def shrink_kernel(
    x_ptr,
    order_ptr,
    groups_ptr,
    entries_ptr,
    out_ptr,
    K,
    x_stride,
    out_width,
    num_slots,
    num_rows,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some ranks of one segment, for one group, over a part of the inputs. Grid: groups, segments and blocks of ranks, parts."""
    group, place = tl.program_id(0), tl.program_id(1)
    slot = tl.load(groups_ptr + 3 * group)
    first = tl.load(groups_ptr + 3 * group + 1)
    count = tl.load(groups_ptr + 3 * group + 2)
    slot = tl.where(count > 0, slot, 0)
    rank = _field(entries_ptr, 2, slot, num_slots).to(tl.int32)
    segments = _field(entries_ptr, 3, slot, num_slots).to(tl.int32)
    blocks = (rank + BLOCK_R - 1) // BLOCK_R
    segment = place // tl.maximum(blocks, 1)
    number = (place % tl.maximum(blocks, 1)) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_wanted = (count > 0) & (rank > 0) & (((segments >> tl.minimum(segment, 31)) & 1) == 1)
    inside_r = number < rank
    down_ptr = _field(entries_ptr, 0, slot, num_slots).to(tl.pointer_type(DTYPE))
    index = tl.arange(0, GROUP)
    row = tl.load(order_ptr + first + index, mask=is_wanted & (index < count), other=0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if is_wanted:
        inside = index < count
        each = tl.cdiv(tl.cdiv(K, tl.num_programs(2)), BLOCK_K) * BLOCK_K
        begin = tl.program_id(2) * each
        end = tl.minimum(begin + each, K)
        line = (segment * rank + number).to(tl.int64) * K
        sums = tl.zeros((GROUP, BLOCK_R), dtype=tl.float32)
        for start in range(begin, end, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_ptr + row[:, None] * x_stride + k[None, :], mask=inside[:, None] & (k < end)[None, :], other=0.0
            )
            down = tl.load(
                down_ptr + line[None, :] + k[:, None], mask=inside_r[None, :] & (k < end)[:, None], other=0.0
            )
            sums = tl.dot(x.to(DTYPE), down, sums, input_precision="ieee")
        out = out_ptr + (tl.program_id(2).to(tl.int64) * num_rows + row[:, None]) * out_width
        tl.store(out + (segment * rank + number)[None, :], sums, mask=inside[:, None] & inside_r[None, :])


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_parts"])
def expand_kernel(
    h_ptr,
    order_ptr,
    groups_ptr,
    entries_ptr,
    tiles_ptr,
    out_ptr,
    N,
    h_width,
    out_stride,
    scale,
    num_slots,
    num_rows,
    num_parts,
    DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of outputs of one group. Grid: groups, tiles."""
    group, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(groups_ptr + 3 * group)
    first = tl.load(groups_ptr + 3 * group + 1)
    count = tl.load(groups_ptr + 3 * group + 2)
    slot = tl.where(count > 0, slot, 0)
    segment = tl.load(tiles_ptr + 3 * tile)
    n = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, BLOCK_N)
    inside_n = tl.arange(0, BLOCK_N) < tl.load(tiles_ptr + 3 * tile + 2)
    rank = _field(entries_ptr, 2, slot, num_slots).to(tl.int32)
    segments = _field(entries_ptr, 3, slot, num_slots).to(tl.int32)
    gain = _field(entries_ptr, 4, slot, num_slots)
    rank = tl.where(((segments >> segment) & 1) == 1, rank, 0)
    is_wanted = (count > 0) & ((rank > 0) | (gain != 0))
    up_ptr = _field(entries_ptr, 1, slot, num_slots).to(tl.pointer_type(DTYPE))
    gain_ptr = gain.to(tl.pointer_type(tl.float32))
    shift_ptr = _field(entries_ptr, 5, slot, num_slots).to(tl.pointer_type(tl.float32))
    index = tl.arange(0, GROUP)
    row = tl.load(order_ptr + first + index, mask=is_wanted & (index < count), other=0).to(tl.int64)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if is_wanted:
        inside = index < count
        out = out_ptr + row[:, None] * out_stride + n[None, :]
        mask = inside[:, None] & inside_n[None, :]
        y = tl.load(out, mask=mask, other=0.0).to(tl.float32)
        if gain != 0:
            y = y * tl.load(gain_ptr + n, mask=inside_n, other=1.0)[None, :]
            y += tl.load(shift_ptr + n, mask=inside_n, other=0.0)[None, :]
        sums = tl.zeros((GROUP, BLOCK_N), dtype=tl.float32)
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            inside_h = inside[:, None] & (r < rank)[None, :]
            h_at = h_ptr + row[:, None] * h_width + (segment * rank + r)[None, :]
            h = tl.zeros((GROUP, BLOCK_R), dtype=tl.float32)
            for _ in range(num_parts):
                h += tl.load(h_at, mask=inside_h, other=0.0)
                h_at += tl.cast(num_rows, tl.int64) * h_width
            up_at = up_ptr + r.to(tl.int64)[:, None] * N + n[None, :]
            up = tl.load(up_at, mask=(r < rank)[:, None] & inside_n[None, :], other=0.0)
            sums = tl.dot(h.to(DTYPE), up, sums, input_precision="ieee")
        tl.store(out, (y + scale * sums).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def lookup_kernel(
    ids_ptr,
    slots_ptr,
    entries_ptr,
    out_ptr,
    out_width,
    num_slots,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token's row of its adapter's table."""
    t, r = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots_ptr + t)
    rank = _field(entries_ptr, 2, slot, num_slots)
    down_ptr = _field(entries_ptr, 0, slot, num_slots).to(tl.pointer_type(DTYPE))
    token = tl.load(ids_ptr + t).to(tl.int64)
    values = tl.load(down_ptr + token * rank + r, mask=r < rank, other=0.0)
    tl.store(out_ptr + t * out_width + r, values.to(tl.float32), mask=r < rank)


def _groups(rows: AdapterRows, table: AdapterTable, count: int) -> int:
    """Groups that so many rows may have: each adapter has one that is not full, at most."""
    assert rows.groups_G3 is not None
    return min(count, cdiv(count, GROUP) + table.most_adapters, len(rows.groups_G3))


@kernel("adapter_shrink", platform="cuda", priority=10)
def adapter_shrink(x_TK: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    """As `ops.adapter_shrink`."""
    parts, count, width = out_PTH.shape
    if count:
        blocks = table.num_segments * cdiv(table.most_ranks, RANK_BLOCK)
        shrink_kernel[(_groups(rows, table, count), blocks, parts)](
            x_TK,
            rows.order_T,
            rows.groups_G3,
            table.entries_FL,
            out_PTH,
            x_TK.shape[1],
            x_TK.stride(0),
            width,
            table.entries_FL.shape[1],
            count,
            DTYPE=DTYPES[table.dtype],
            GROUP=GROUP,
            BLOCK_R=RANK_BLOCK,
            BLOCK_K=128,
            num_warps=4,
            num_stages=4,
            **launch_options(),
        )


@kernel("adapter_expand", platform="cuda", priority=10)
def adapter_expand(
    h_PTH: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_TN: torch.Tensor, scale: float = 1.0
) -> None:
    """As `ops.adapter_expand`."""
    parts, count, width = h_PTH.shape
    if count:
        expand_kernel[(_groups(rows, table, count), len(table.tiles_X3))](
            h_PTH,
            rows.order_T,
            rows.groups_G3,
            table.entries_FL,
            table.tiles_X3,
            out_TN,
            out_TN.shape[1],
            width,
            out_TN.stride(0),
            float(scale),
            table.entries_FL.shape[1],
            count,
            parts,
            DTYPE=DTYPES[table.dtype],
            GROUP=GROUP,
            BLOCK_R=RANK_BLOCK,
            BLOCK_N=TILE,
            num_warps=4,
            num_stages=2,
            **launch_options(),
        )


@kernel("adapter_lookup", platform="cuda", priority=10)
def adapter_lookup(ids_T: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    """As `ops.adapter_lookup`."""
    if len(ids_T):
        lookup_kernel[(len(ids_T),)](
            ids_T,
            rows.slots_T,
            table.entries_FL,
            out_PTH,
            out_PTH.shape[2],
            table.entries_FL.shape[1],
            DTYPE=DTYPES[table.dtype],
            BLOCK=next_power_of_2(table.most_ranks),
            num_warps=1,
            **launch_options(),
        )
