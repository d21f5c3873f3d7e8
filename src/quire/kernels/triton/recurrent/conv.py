"""What stands around the scans of recurrent layers: short convolutions, gates, gated norms, scaled columns.

A convolution's program takes some channels of some of a request's tokens. The first program of a request also writes its
states, since it alone reads the state that they may replace; a thread keeps to its channels, so that it reads before it
writes.
"""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.recurrent import GATES
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl

CHANNELS = 256
"""Channels of a program; two for each thread."""
TOKENS = 32
"""Tokens of a program, about."""
MAX_SPLITS = 64


@triton.jit
def apply_gate(x, KIND: tl.constexpr):
    """f(x), by number in `GATES`."""
    if KIND == 0:
        return x
    elif KIND == 1:
        return x / (1.0 + tl.exp(-x))
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _input(x_ptr, state_ptr, start, back, x_stride, channels, channel, inside, has_state, KEPT: tl.constexpr):
    """The input `back` tokens after the request's first of this step; before it, from the state or zero."""
    new = tl.load(x_ptr + (start + back) * x_stride + channel, mask=inside & (back >= 0), other=0.0).to(tl.float32)
    is_old = inside & (back < 0) & has_state
    return new + tl.load(state_ptr + (KEPT + back) * channels + channel, mask=is_old, other=0.0)


@triton.jit
def causal_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    channels,
    x_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    splits,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    KEPT: tl.constexpr = WIDTH - 1
    await_previous(PDL)
    request, split = tl.program_id(0), tl.program_id(2)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    start = tl.load(query_start_ptr + request).to(tl.int64)
    count = tl.load(query_start_ptr + request + 1).to(tl.int64) - start
    last = tl.load(seq_lens_ptr + request).to(tl.int64)
    position = last - count
    pages_ptr = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride
    has_state = position > 0
    before = tl.load(pages_ptr + tl.maximum(position - 1, 0) // page_size, mask=has_state & (count > 0), other=0)
    state_ptr = states_ptr + before.to(tl.int64) * page_stride
    length = tl.maximum((count + splits - 1) // splits, KEPT)
    for t in range(tl.minimum(split * length, count), tl.minimum((split + 1) * length, count)):
        y = tl.zeros([BLOCK], dtype=tl.float32)
        if HAS_BIAS:
            y += tl.load(bias_ptr + channel, mask=inside, other=0.0)
        for w in tl.static_range(WIDTH):
            x = _input(x_ptr, state_ptr, start, t - KEPT + w, x_stride, channels, channel, inside, has_state, KEPT)
            y += x * tl.load(weight_ptr + w * channels + channel, mask=inside, other=0.0)
        y = apply_gate(y, KIND)
        tl.store(out_ptr + (start + t) * out_stride + channel, y.to(out_ptr.dtype.element_ty), mask=inside)
    if split == 0:
        done = last
        while done > position:  # the newest page first: only the oldest can be the one that was read
            page = tl.load(pages_ptr + (done - 1) // page_size).to(tl.int64)
            for w in tl.static_range(KEPT):
                back = done - position - KEPT + w
                x = _input(x_ptr, state_ptr, start, back, x_stride, channels, channel, inside, has_state, KEPT)
                tl.store(states_ptr + page * page_stride + w * channels + channel, x, mask=inside)
            done = (done - 1) // page_size * page_size


@kernel("causal_conv", platform="cuda", priority=10)
def causal_conv(
    x_TC: torch.Tensor,
    weight_WC: torch.Tensor,
    bias_C: torch.Tensor | None,
    gate: str,
    states_PVC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """As `recurrent.causal_conv`."""
    width, channels = weight_WC.shape
    splits = min(max(cdiv(metadata.max_query_len, TOKENS), 1), MAX_SPLITS)
    if metadata.num_requests:
        causal_conv_kernel[(metadata.num_requests, cdiv(channels, CHANNELS), splits)](
            x_TC,
            weight_WC,
            weight_WC if bias_C is None else bias_C,
            states_PVC,
            out_TC,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            channels,
            x_TC.stride(0),
            states_PVC.stride(0),
            out_TC.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            splits,
            WIDTH=width,
            KIND=GATES.index(gate),
            HAS_BIAS=bias_C is not None,
            BLOCK=CHANNELS,
            num_warps=4,
            **launch_options(),
        )


@triton.jit
def gate_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    width,
    each,
    x_stride,
    gate_stride,
    out_stride,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(gate_ptr + row * gate_stride + column // each, mask=inside, other=0.0).to(tl.float32)
    y = x * apply_gate(by, KIND)
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("gate", platform="cuda", priority=10)
def gate(x_TC: torch.Tensor, gate_TC: torch.Tensor, kind: str, out_TC: torch.Tensor) -> None:
    """As `recurrent.gate`."""
    rows, width = x_TC.shape
    if rows:
        gate_kernel[(rows, cdiv(width, 1024))](
            x_TC,
            gate_TC,
            out_TC,
            width,
            width // gate_TC.shape[1],
            x_TC.stride(0),
            gate_TC.stride(0),
            out_TC.stride(0),
            KIND=GATES.index(kind),
            BLOCK=1024,
            num_warps=4,
            **launch_options(),
        )


@triton.jit
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    group,
    x_stride,
    gate_stride,
    out_stride,
    eps,
    HAS_GATE: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group of one row a program."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    inside, column = offset < group, tl.program_id(1) * group + offset
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_GATE:
        by = apply_gate(tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32), KIND)
        if not NORM_FIRST:
            x *= by
    y = x * tl.rsqrt(tl.sum(x * x, 0) / group + eps) * tl.load(weight_ptr + column, mask=inside, other=0.0)
    if HAS_GATE and NORM_FIRST:
        y *= by
    tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("gated_norm", platform="cuda", priority=10)
def gated_norm(
    x_TC: torch.Tensor,
    gate_TC: torch.Tensor | None,
    weight_C: torch.Tensor,
    eps: float,
    group: int,
    norm_first: bool,
    out_TC: torch.Tensor,
    kind: str = "silu",
) -> None:
    """As `recurrent.gated_norm`."""
    (rows, width), block = x_TC.shape, next_power_of_2(group)
    by = x_TC if gate_TC is None else gate_TC
    if rows:
        gated_norm_kernel[(rows, width // group)](
            x_TC,
            by,
            weight_C,
            out_TC,
            group,
            x_TC.stride(0),
            by.stride(0),
            out_TC.stride(0),
            eps,
            HAS_GATE=gate_TC is not None,
            NORM_FIRST=norm_first,
            KIND=GATES.index(kind),
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(),
        )


@triton.jit
def scale_columns_kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    width,
    x_stride,
    out_stride,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        x *= tl.load(scale_ptr + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * out_stride + column, x.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("scale_columns", platform="cuda", priority=10)
def scale_columns(x_TC: torch.Tensor, scale_C: torch.Tensor | None, out_TC: torch.Tensor) -> None:
    """As `recurrent.scale_columns`."""
    rows, width = x_TC.shape
    if rows:
        scale_columns_kernel[(rows, cdiv(width, 1024))](
            x_TC,
            x_TC if scale_C is None else scale_C,
            out_TC,
            width,
            x_TC.stride(0),
            out_TC.stride(0),
            HAS_SCALE=scale_C is not None,
            BLOCK=1024,
            num_warps=4,
            **launch_options(),
        )
