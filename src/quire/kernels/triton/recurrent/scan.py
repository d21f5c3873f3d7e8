"""The scans of recurrent layers: a program takes a block of one head's (or some) channels of one request, over all of its tokens.

The block's state stays in registers from token to token, and is written where a page ends. Decode steps are one token a
request. Prompts go token by token too where they are short, and where their bits must not depend on the batch; others go by
chunks (`recurrent_selective.py`, `recurrent_ssd.py`, `recurrent_delta.py`).
"""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.types import DeltaWeights, SsdWeights

TILE = 4096
"""Numbers of a program's state: 32 a thread."""
ANY_NUMBER = 2**31 - 1


@triton.jit
def softplus(x):
    """log(1 + e^x), exact where it is small."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + small


@triton.jit
def find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride):
    """A program's request: its tokens of the step, the position of the first, and its pages."""
    request = tl.program_id(0)
    start = tl.load(query_start_ptr + request).to(tl.int64)
    end = tl.load(query_start_ptr + request + 1).to(tl.int64)
    position = tl.load(seq_lens_ptr + request).to(tl.int64) - (end - start)
    return start, end, position, table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_stride


@triton.jit
def load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at, inside):
    """The state before a request's first token of the step; `at` is where a page has this block of it."""
    has_state = (position > 0) & (start < end)
    page = tl.load(pages_ptr + tl.maximum(position - 1, 0) // page_size, mask=has_state, other=0).to(tl.int64)
    return tl.load(states_ptr + page * page_stride + at, mask=inside & has_state, other=0.0)


@triton.jit
def store_state(states_ptr, pages_ptr, page_stride, page_size, done, is_last, at, inside, state):
    """Keep the state after `done` tokens of the request, if a page or the step's tokens end there."""
    if (done % page_size == 0) | is_last:
        page = tl.load(pages_ptr + (done - 1) // page_size).to(tl.int64)
        tl.store(states_ptr + page * page_stride + at, state, mask=inside)


@triton.jit
def selective_scan_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    d_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    channels,
    size,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    most,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    end = tl.where(end - start > most, start, end)
    channel, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    is_channel, is_number = channel < channels, number < size
    inside, at = is_number[:, None] & is_channel[None, :], number[:, None] * channels + channel[None, :]
    a = tl.load(a_ptr + at, mask=inside, other=0.0)
    d = tl.load(d_ptr + channel, mask=is_channel, other=0.0)
    state = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at, inside)
    for t in range(start, end):
        x = tl.load(x_ptr + t * x_stride + channel, mask=is_channel, other=0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + t * dt_stride + channel, mask=is_channel, other=0.0).to(tl.float32))
        b = tl.load(b_ptr + t * b_stride + number, mask=is_number, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_stride + number, mask=is_number, other=0.0).to(tl.float32)
        state = tl.exp(dt[None, :] * a) * state + b[:, None] * (dt * x)[None, :]
        y = tl.sum(c[:, None] * state, 0) + d * x
        tl.store(out_ptr + t * out_stride + channel, y.to(out_ptr.dtype.element_ty), mask=is_channel)
        done = position + t - start + 1
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, t + 1 == end, at, inside, state)


@kernel("selective_scan", platform="cuda", priority=5)
def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    b_TS: torch.Tensor,
    c_TS: torch.Tensor,
    a_SC: torch.Tensor,
    d_C: torch.Tensor,
    states_PSC: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
    *,
    most: int = ANY_NUMBER,
) -> None:
    """As `recurrent.selective_scan`; requests with more than `most` tokens in the step are left as they are."""
    size, channels = a_SC.shape
    state = next_power_of_2(size)
    block = max(16, min(64, TILE // state))
    if metadata.num_requests:
        selective_scan_kernel[(metadata.num_requests, cdiv(channels, block))](
            x_TC,
            dt_TC,
            b_TS,
            c_TS,
            a_SC,
            d_C,
            states_PSC,
            out_TC,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            channels,
            size,
            x_TC.stride(0),
            dt_TC.stride(0),
            b_TS.stride(0),
            c_TS.stride(0),
            states_PSC.stride(0),
            out_TC.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            most,
            STATE=state,
            BLOCK=block,
            num_warps=4,
            **launch_options(),
        )


@triton.jit
def ssd_scan_kernel(
    x_ptr,
    dt_ptr,
    b_ptr,
    c_ptr,
    a_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    width,
    size,
    heads_a_group,
    dt_min,
    dt_max,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    most,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    end = tl.where(end - start > most, start, end)
    head, offset, number = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    is_value, is_number = offset < width, number < size
    inside = is_number[:, None] & is_value[None, :]
    at = (head * size + number[:, None]) * width + offset[None, :]
    column, shared = head * width + offset, head // heads_a_group * size + number
    a, d, dt_bias = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(dt_bias_ptr + head)
    state = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at, inside)
    for t in range(start, end):
        x = tl.load(x_ptr + t * x_stride + column, mask=is_value, other=0.0).to(tl.float32)
        dt = softplus(tl.load(dt_ptr + t * dt_stride + head).to(tl.float32) + dt_bias)
        dt = tl.minimum(tl.maximum(dt, dt_min), dt_max)
        b = tl.load(b_ptr + t * b_stride + shared, mask=is_number, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + t * c_stride + shared, mask=is_number, other=0.0).to(tl.float32)
        state = tl.exp(dt * a) * state + b[:, None] * (dt * x)[None, :]
        y = tl.sum(c[:, None] * state, 0) + d * x
        tl.store(out_ptr + t * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=is_value)
        done = position + t - start + 1
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, t + 1 == end, at, inside, state)


@kernel("ssd_scan", platform="cuda", priority=5)
def ssd_scan(
    x_TNH: torch.Tensor,
    dt_TN: torch.Tensor,
    b_TGS: torch.Tensor,
    c_TGS: torch.Tensor,
    weights: SsdWeights,
    states_PNSH: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNH: torch.Tensor,
    *,
    most: int = ANY_NUMBER,
) -> None:
    """As `recurrent.ssd_scan`; requests with more than `most` tokens in the step are left as they are."""
    _, heads, size, width = states_PNSH.shape
    state = next_power_of_2(size)
    block = _block(state, width)
    if metadata.num_requests:
        ssd_scan_kernel[(metadata.num_requests, heads, cdiv(width, block))](
            x_TNH,
            dt_TN,
            b_TGS,
            c_TGS,
            weights.a_N,
            weights.d_N,
            weights.dt_bias_N,
            states_PNSH,
            out_TNH,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            width,
            size,
            heads // b_TGS.shape[1],
            float(weights.dt_min),
            float(weights.dt_max),
            x_TNH.stride(0),
            dt_TN.stride(0),
            b_TGS.stride(0),
            c_TGS.stride(0),
            states_PNSH.stride(0),
            out_TNH.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            most,
            STATE=state,
            BLOCK=block,
            num_warps=4,
            **launch_options(),
        )


@triton.jit
def delta_decay(given, a_weight, floor, BOUNDED: tl.constexpr):
    """What is left of a state after a token (see `recurrent.DeltaWeights`)."""
    if BOUNDED:
        return tl.exp(floor / (1.0 + tl.exp(a_weight * given)))
    else:
        return tl.exp(softplus(given) * a_weight)


@triton.jit
def gated_delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    a_weight_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    width,
    size,
    heads_a_key,
    query_scale,
    beta_scale,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    most,
    floor,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_NUMBER: tl.constexpr,
    BOUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    end = tl.where(end - start > most, start, end)
    head, offset, number = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    is_value, is_number = offset < width, number < size
    inside = is_number[:, None] & is_value[None, :]
    at = (head * size + number[:, None]) * width + offset[None, :]
    column, shared = head * width + offset, head // heads_a_key * size + number
    a_weight, own = tl.load(a_weight_ptr + head), head * size + number
    if BY_NUMBER:
        dt_bias = tl.load(dt_bias_ptr + own, mask=is_number, other=0.0)
    else:
        dt_bias = tl.load(dt_bias_ptr + head)
    state = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at, inside)
    for t in range(start, end):
        q = tl.load(q_ptr + t * q_stride + shared, mask=is_number, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + t * k_stride + shared, mask=is_number, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * v_stride + column, mask=is_value, other=0.0).to(tl.float32)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * query_scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        beta = beta_scale / (1.0 + tl.exp(-tl.load(b_ptr + t * b_stride + head).to(tl.float32)))
        if BY_NUMBER:
            given = tl.load(a_ptr + t * a_stride + own, mask=is_number, other=0.0).to(tl.float32)
            state *= delta_decay(given + dt_bias, a_weight, floor, BOUNDED)[:, None]
        else:
            given = tl.load(a_ptr + t * a_stride + head).to(tl.float32)
            state *= delta_decay(given + dt_bias, a_weight, floor, BOUNDED)
        error = (v - tl.sum(k[:, None] * state, 0)) * beta
        state += k[:, None] * error[None, :]
        y = tl.sum(q[:, None] * state, 0)
        tl.store(out_ptr + t * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=is_value)
        done = position + t - start + 1
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, t + 1 == end, at, inside, state)


@kernel("gated_delta_rule", platform="cuda", priority=5)
def gated_delta_rule(
    q_TKS: torch.Tensor,
    k_TKS: torch.Tensor,
    v_TNH: torch.Tensor,
    a_TN: torch.Tensor,
    b_TN: torch.Tensor,
    weights: DeltaWeights,
    states_PNSH: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNH: torch.Tensor,
    *,
    most: int = ANY_NUMBER,
) -> None:
    """As `recurrent.gated_delta_rule`; requests with more than `most` tokens in the step are left as they are."""
    _, heads, size, width = states_PNSH.shape
    state = next_power_of_2(size)
    block = _block(state, width)
    if metadata.num_requests:
        gated_delta_rule_kernel[(metadata.num_requests, heads, cdiv(width, block))](
            q_TKS,
            k_TKS,
            v_TNH,
            a_TN,
            b_TN,
            weights.a_N,
            weights.dt_bias_N,
            states_PNSH,
            out_TNH,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            width,
            size,
            heads // k_TKS.shape[1],
            size**-0.5,
            float(weights.beta_scale),
            q_TKS.stride(0),
            k_TKS.stride(0),
            v_TNH.stride(0),
            a_TN.stride(0),
            b_TN.stride(0),
            states_PNSH.stride(0),
            out_TNH.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            most,
            float(weights.floor),
            STATE=state,
            BLOCK=block,
            BY_NUMBER=a_TN.dim() == 3,
            BOUNDED=weights.floor < 0,
            num_warps=4,
            **launch_options(),
        )


def _block(state: int, width: int) -> int:
    """Channels of a head that a program takes, with `state` numbers each."""
    return max(16, min(next_power_of_2(width), TILE // state))
