"""Recurrences whose channels keep one or three numbers each: Griffin's RG-LRU and RWKV-4's weighted mean. A program takes some
channels of one request over all of its tokens."""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, tl
from quire.kernels.triton.recurrent.conv import apply_gate
from quire.kernels.triton.recurrent.scan import find_tokens, load_state, store_state
from quire.kernels.types import LruWeights

CHANNELS = 128
"""Channels of a program; one for each thread."""


@triton.jit
def rg_lru_kernel(
    x_ptr,
    input_ptr,
    forget_ptr,
    a_ptr,
    input_bias_ptr,
    forget_bias_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    channels,
    x_stride,
    input_stride,
    forget_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    a = tl.load(a_ptr + channel, mask=inside, other=0.0)
    input_bias = tl.load(input_bias_ptr + channel, mask=inside, other=0.0)
    forget_bias = tl.load(forget_bias_ptr + channel, mask=inside, other=0.0)
    state = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, channel, inside)
    for t in range(start, end):
        x = tl.load(x_ptr + t * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(input_ptr + t * input_stride + channel, mask=inside, other=0.0).to(tl.float32) + input_bias
        forget = tl.load(forget_ptr + t * forget_stride + channel, mask=inside, other=0.0).to(tl.float32) + forget_bias
        decay = tl.exp(a * apply_gate(forget, 2))
        scale = tl.sqrt(tl.maximum(1.0 - decay * decay, 0.0))
        done = position + t - start + 1
        state = decay * state + x * apply_gate(given, 2) * tl.where(done == 1, 1.0, scale)
        tl.store(out_ptr + t * out_stride + channel, state.to(out_ptr.dtype.element_ty), mask=inside)
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, t + 1 == end, channel, inside, state)


@kernel("rg_lru", platform="cuda", priority=10)
def rg_lru(
    x_TC: torch.Tensor,
    input_TC: torch.Tensor,
    forget_TC: torch.Tensor,
    weights: LruWeights,
    states_P1C: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """As `recurrent.rg_lru`."""
    channels = x_TC.shape[1]
    if metadata.num_requests:
        rg_lru_kernel[(metadata.num_requests, cdiv(channels, CHANNELS))](
            x_TC,
            input_TC,
            forget_TC,
            weights.a_C,
            weights.input_bias_C,
            weights.forget_bias_C,
            states_P1C,
            out_TC,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            channels,
            x_TC.stride(0),
            input_TC.stride(0),
            forget_TC.stride(0),
            states_P1C.stride(0),
            out_TC.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            BLOCK=CHANNELS,
            num_warps=4,
            **launch_options(),
        )


@triton.jit
def wkv_kernel(
    k_ptr,
    v_ptr,
    decay_ptr,
    first_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    channels,
    k_stride,
    v_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    at_weight, at_scale = channels + channel, 2 * channels + channel
    decay = tl.load(decay_ptr + channel, mask=inside, other=0.0)
    first = tl.load(first_ptr + channel, mask=inside, other=0.0)
    total = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, channel, inside)
    weight = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at_weight, inside)
    scale = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at_scale, inside)
    scale = tl.where(position > 0, scale, -1e38)
    for t in range(start, end):
        k = tl.load(k_ptr + t * k_stride + channel, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + t * v_stride + channel, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(scale, k + first)
        old, own = tl.exp(scale - largest), tl.exp(k + first - largest)
        y = (old * total + own * v) / (old * weight + own)
        tl.store(out_ptr + t * out_stride + channel, y.to(out_ptr.dtype.element_ty), mask=inside)
        largest = tl.maximum(scale + decay, k)
        old, own = tl.exp(scale + decay - largest), tl.exp(k - largest)
        total, weight, scale = old * total + own * v, old * weight + own, largest
        done, is_last = position + t - start + 1, t + 1 == end
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, is_last, channel, inside, total)
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, is_last, at_weight, inside, weight)
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, is_last, at_scale, inside, scale)


@kernel("wkv", platform="cuda", priority=10)
def wkv(
    k_TC: torch.Tensor,
    v_TC: torch.Tensor,
    decay_C: torch.Tensor,
    first_C: torch.Tensor,
    states_P3C: torch.Tensor,
    metadata: AttentionMetadata,
    out_TC: torch.Tensor,
) -> None:
    """As `recurrent.wkv`."""
    channels = k_TC.shape[1]
    if metadata.num_requests:
        wkv_kernel[(metadata.num_requests, cdiv(channels, CHANNELS))](
            k_TC,
            v_TC,
            decay_C,
            first_C,
            states_P3C,
            out_TC,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            channels,
            k_TC.stride(0),
            v_TC.stride(0),
            states_P3C.stride(0),
            out_TC.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            BLOCK=CHANNELS,
            num_warps=4,
            **launch_options(),
        )
