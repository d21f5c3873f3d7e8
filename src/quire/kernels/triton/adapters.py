"""Low-rank updates of adapters: rows of one adapter are taken together, sixteen at most; where an adapter's numbers are is read
from a table of addresses, so that a captured step serves any adapters.

The inputs of the first product are shared out among programs; the last of them that is done adds up the parts of the sums, in
their order. Legend as in `kernels/adapters.py`; G groups of rows.
"""

import torch
import triton

from quire.kernels.adapters import GROUP, TILE, AdapterRows, AdapterTable
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import arrivals, await_previous, cdiv, launch_options, next_power_of_2, tl

RANK_BLOCK = 16
"""Ranks of a program."""
ROWS, RANKS, INPUTS, OUTPUTS = tl.constexpr(GROUP), tl.constexpr(RANK_BLOCK), tl.constexpr(128), tl.constexpr(TILE)
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _field(entries_ptr, field: tl.constexpr, slot, num_slots):
    return tl.load(entries_ptr + field * num_slots + slot)


@triton.jit
def _numbers(entries_ptr, field: tl.constexpr, slot, num_slots, DTYPE: tl.constexpr):
    """A pointer to an adapter's numbers, which begin at a multiple of 64 bytes (`lora/store.py`)."""
    return tl.multiple_of(_field(entries_ptr, field, slot, num_slots).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _triple(table_ptr, row):
    return tl.load(table_ptr + 3 * row), tl.load(table_ptr + 3 * row + 1), tl.load(table_ptr + 3 * row + 2)


@triton.jit
def _group_rows(order_ptr, groups_ptr, group):
    """A group's slot (0: there is no such group), its rows, and which of them there are."""
    slot, first, count = _triple(groups_ptr, group)
    inside = tl.arange(0, ROWS) < count
    row = tl.load(order_ptr + first + tl.arange(0, ROWS), mask=inside, other=0).to(tl.int64)
    return tl.where(count > 0, slot, 0), row, inside


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def shrink_kernel(
    x_ptr,
    order_ptr,
    groups_ptr,
    entries_ptr,
    out_ptr,
    arrivals_ptr,
    K,
    x_stride,
    out_width,
    num_slots,
    num_rows,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some ranks of one segment, for one group, over a part of the inputs. Grid: groups, segments and blocks of ranks, parts."""
    slot, row, inside = _group_rows(order_ptr, groups_ptr, tl.program_id(0))
    rank = _field(entries_ptr, 2, slot, num_slots).to(tl.int32)
    segments = _field(entries_ptr, 3, slot, num_slots).to(tl.int32)
    blocks = tl.maximum(tl.cdiv(rank, RANKS), 1)
    segment = tl.program_id(1) // blocks
    number = tl.program_id(1) % blocks * RANKS + tl.arange(0, RANKS)
    line = (segment * rank + number).to(tl.int64)
    down_R = _numbers(entries_ptr, 0, slot, num_slots, DTYPE) + line * K
    is_updated = (rank > 0) & (((segments >> tl.minimum(segment, 31)) & 1) == 1)
    each = tl.cdiv(tl.cdiv(K, tl.num_programs(2)), INPUTS) * INPUTS
    begin = tl.program_id(2) * each
    end = tl.minimum(begin + each, K)
    x_T1, inside_R = x_ptr + row[:, None] * x_stride, (number < rank) & is_updated
    first_KR = _down(down_R, begin, end, inside_R)
    await_previous(PDL)
    if is_updated:
        sums = _product(x_T1, down_R, first_KR, begin, end, inside, inside_R, DTYPE)
        out, mask = out_ptr + row[:, None] * out_width + line, inside[:, None] & (number < rank)
        _keep(out, sums, mask, tl.cast(num_rows, tl.int64) * out_width, arrivals_ptr, PARTS)


@triton.jit
def _down(down_R, start, end, inside_R):
    """Some inputs' weights of a program's ranks, [INPUTS, RANKS]."""
    k_K1 = start + tl.arange(0, INPUTS)[:, None]
    return tl.load(down_R + k_K1, mask=inside_R & (k_K1 < end), other=0.0)


@triton.jit
def _inputs(x_T1, start, end, inside):
    """Some inputs of a group's rows, [ROWS, INPUTS]."""
    k = start + tl.arange(0, INPUTS)
    return tl.load(x_T1 + k, mask=inside[:, None] & (k < end), other=0.0)


@triton.jit
def _product(x_T1, down_R, first_KR, begin, end, inside, inside_R, DTYPE: tl.constexpr):
    """A group's sums over some inputs, the first of whose weights are there."""
    sums = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    sums = tl.dot(_inputs(x_T1, begin, end, inside).to(DTYPE), first_KR, sums, input_precision="ieee")
    for start in range(begin + INPUTS, end, INPUTS):
        down_KR = _down(down_R, start, end, inside_R)
        sums = tl.dot(_inputs(x_T1, start, end, inside).to(DTYPE), down_KR, sums, input_precision="ieee")
    return sums


@triton.jit
def _keep(h_at, sums, mask, part_stride, arrivals_ptr, PARTS: tl.constexpr):
    """Keep sums. Where they are this program's part of some, the last program leaves the sum of all parts in the first one's
    place."""
    if PARTS == 1:
        tl.store(h_at, sums, mask=mask)
    else:
        tl.store(h_at + tl.program_id(2) * part_stride, sums, mask=mask)
        tl.debug_barrier()
        arrival, num_parts = arrivals_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.num_programs(2)
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(arrival, 0)
            part_P11 = tl.arange(0, PARTS)[:, None, None]
            is_part_PTR = mask[None] & (part_P11 < num_parts)
            each_PTR = tl.load(h_at[None] + part_P11 * part_stride, mask=is_part_PTR, other=0.0, cache_modifier=".cg")
            tl.store(h_at, tl.sum(each_PTR, 0), mask=mask)


@triton.jit
def _up(up_ptr, r, n, rank, inside_n, N):
    """Some ranks' weights of a tile's outputs, [RANKS, OUTPUTS]."""
    return tl.load(up_ptr + r.to(tl.int64)[:, None] * N + n, mask=(r < rank)[:, None] & inside_n, other=0.0)


@triton.jit
def _stretched(y, gain, shift, n, inside_n):
    """y * gain + shift, if there is a gain."""
    if gain != 0:
        y *= tl.load(gain.to(tl.pointer_type(tl.float32)) + n, mask=inside_n, other=1.0)
        y += tl.load(shift.to(tl.pointer_type(tl.float32)) + n, mask=inside_n, other=0.0)
    return y


@triton.jit(do_not_specialize=["num_slots"])
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
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of outputs of one group. Grid: groups, tiles."""
    slot, row, inside = _group_rows(order_ptr, groups_ptr, tl.program_id(0))
    segment, first, count = _triple(tiles_ptr, tl.program_id(1))
    n, inside_n = first + tl.arange(0, OUTPUTS), tl.arange(0, OUTPUTS) < count
    gain, shift = _field(entries_ptr, 4, slot, num_slots), _field(entries_ptr, 5, slot, num_slots)
    is_updated = ((_field(entries_ptr, 3, slot, num_slots).to(tl.int32) >> segment) & 1) == 1
    rank = tl.where(is_updated, _field(entries_ptr, 2, slot, num_slots).to(tl.int32), 0)
    up_ptr, r = _numbers(entries_ptr, 1, slot, num_slots, DTYPE), tl.arange(0, RANKS)
    first_RN = _up(up_ptr, r, n, rank, inside_n, N)
    h_T1 = h_ptr + row[:, None] * h_width + segment * rank
    await_previous(PDL)
    if (rank > 0) | (gain != 0):
        h = tl.load(h_T1 + r, mask=inside[:, None] & (r < rank), other=0.0)
        sums = tl.dot(h.to(DTYPE), first_RN, tl.zeros((ROWS, OUTPUTS), dtype=tl.float32), input_precision="ieee")
        for start in range(RANKS, rank, RANKS):
            h = tl.load(h_T1 + start + r, mask=inside[:, None] & (start + r < rank), other=0.0)
            up_RN = _up(up_ptr, start + r, n, rank, inside_n, N)
            sums = tl.dot(h.to(DTYPE), up_RN, sums, input_precision="ieee")
        out, mask = out_ptr + row[:, None] * out_stride + n, inside[:, None] & inside_n
        y = _stretched(tl.load(out, mask=mask, other=0.0).to(tl.float32), gain, shift, n, inside_n)
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
    await_previous(PDL)
    slot = tl.load(slots_ptr + t)
    rank = _field(entries_ptr, 2, slot, num_slots)
    down_ptr = _numbers(entries_ptr, 0, slot, num_slots, DTYPE)
    token = tl.load(ids_ptr + t).to(tl.int64)
    values = tl.load(down_ptr + token * rank + r, mask=r < rank, other=0.0)
    tl.store(out_ptr + t * out_width + r, values.to(tl.float32), mask=r < rank)


@kernel("adapter_shrink", platform="cuda", priority=10)
def adapter_shrink(x_TK: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_PTH: torch.Tensor) -> None:
    """As `ops.adapter_shrink`."""
    parts, count, width = out_PTH.shape
    if count:
        blocks = table.num_segments * cdiv(table.most_ranks, RANK_BLOCK)
        groups = rows.most_groups(table, count)
        shrink_kernel[(groups, blocks, parts)](
            x_TK,
            rows.order_T,
            rows.groups_G3,
            table.entries_FL,
            out_PTH,
            arrivals("adapters", x_TK.device, next_power_of_2(max(4096, groups * blocks))),
            x_TK.shape[1],
            x_TK.stride(0),
            width,
            table.entries_FL.shape[1],
            count,
            DTYPE=DTYPES[table.dtype],
            PARTS=next_power_of_2(parts),
            num_warps=4,
            num_stages=4,
            **launch_options(),
        )


@kernel("adapter_expand", platform="cuda", priority=10)
def adapter_expand(
    h_PTH: torch.Tensor, rows: AdapterRows, table: AdapterTable, out_TN: torch.Tensor, scale: float = 1.0
) -> None:
    """As `ops.adapter_expand`."""
    _, count, width = h_PTH.shape
    if count:
        expand_kernel[(rows.most_groups(table, count), len(table.tiles_X3))](
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
            DTYPE=DTYPES[table.dtype],
            num_warps=2,
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
