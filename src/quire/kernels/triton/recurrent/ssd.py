"""Mamba-2's scan over prompts, in chunks ("Transformers are SSMs", Dao and Gu, 2024).

A program takes a block of one head's channels of one request from chunk to chunk; the state stays in its registers. Short
requests of a step, and all of steps that have only such, go token by token.

What the tensor cores multiply is rounded as `recurrent_chunks.multiply` says. Against float64, as a part of the largest number
(states of 128, 260 tokens, weak to strong decays, in the interpreter): 4e-6 of outputs and 5e-6 of states, 6e-6 and 1.2e-5 for
float16 models; token by token it is 1e-6, and rounding an output to bfloat16 makes 2e-3 of it.

Legend: L tokens of a chunk, S size of the state, H channels of a program.
"""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, tl
from quire.kernels.triton.recurrent.chunks import (
    FROM,
    Tiles,
    choose_tiles,
    chunk_at,
    chunks_of,
    decays,
    goes_by_chunks,
    multiply,
)
from quire.kernels.triton.recurrent.scan import find_tokens, load_state, softplus, store_state
from quire.kernels.triton.recurrent.scan import ssd_scan as scan_by_token
from quire.kernels.types import SsdWeights

HOPPER, OTHERS = Tiles(64, 64, num_warps=4), Tiles(32, 32, num_warps=8)
"""What needs few more registers than there are, as compiled for compute capabilities 9.0 and 8.0."""
MAX_STATE = 256


@triton.jit
def ssd_chunks_kernel(
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
    fewest,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_previous(PDL)
    start, end, position, pages_ptr = find_tokens(query_start_ptr, seq_lens_ptr, rows_ptr, table_ptr, table_stride)
    if end - start < fewest:
        return
    head, offset_H, number_S = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    is_value_H, is_number_S = offset_H < WIDTH, number_S < SIZE
    inside_SH = is_number_S[:, None] & is_value_H[None, :]
    at_SH = (head * SIZE + number_S[:, None]) * WIDTH + offset_H[None, :]
    column_H, shared_S = head * WIDTH + offset_H, head // heads_a_group * SIZE + number_S
    a, d, dt_bias = tl.load(a_ptr + head), tl.load(d_ptr + head), tl.load(dt_bias_ptr + head)
    state_SH = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at_SH, inside_SH)
    first, behind = chunks_of(start, end, position, page_size, CHUNK)
    for number in range(first, behind):
        begin, stop = chunk_at(number, start, end, position, page_size, CHUNK)
        t_L = begin + tl.arange(0, CHUNK)
        is_token_L = t_L < stop
        tokens_LS, tokens_LH = is_token_L[:, None] & is_number_S[None, :], is_token_L[:, None] & is_value_H[None, :]
        x_LH = tl.load(x_ptr + t_L[:, None] * x_stride + column_H[None, :], mask=tokens_LH, other=0.0)
        b_LS = tl.load(b_ptr + t_L[:, None] * b_stride + shared_S[None, :], mask=tokens_LS, other=0.0)
        c_LS = tl.load(c_ptr + t_L[:, None] * c_stride + shared_S[None, :], mask=tokens_LS, other=0.0)
        dt_L = softplus(tl.load(dt_ptr + t_L * dt_stride + head, mask=is_token_L, other=0.0).to(tl.float32) + dt_bias)
        dt_L = tl.where(is_token_L, tl.minimum(tl.maximum(dt_L, dt_min), dt_max), 0.0)
        between_LL, since_L, until_L, whole = decays(dt_L * a, CHUNK)
        y_LH = multiply(c_LS, state_SH, tl.zeros([CHUNK, BLOCK], tl.float32)) * since_L[:, None]
        weight_LL = between_LL * dt_L[None, :]  # first: it has few registers there
        weight_LL *= multiply(c_LS, tl.trans(b_LS), tl.zeros([CHUNK, CHUNK], tl.float32))
        y_LH = multiply(weight_LL, x_LH, y_LH) + d * x_LH.to(tl.float32)
        out_at_LH = t_L[:, None] * out_stride + column_H[None, :]
        tl.store(out_ptr + out_at_LH, y_LH.to(out_ptr.dtype.element_ty), mask=tokens_LH)
        kept_LH = x_LH.to(tl.float32) * (dt_L * until_L)[:, None]
        state_SH = multiply(tl.trans(b_LS), kept_LH, whole * state_SH)
        done = position + stop - start
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, stop == end, at_SH, inside_SH, state_SH)


@kernel("ssd_scan", platform="cuda", priority=10, invariant=False)
def ssd_scan(
    x_TNH: torch.Tensor,
    dt_TN: torch.Tensor,
    b_TGS: torch.Tensor,
    c_TGS: torch.Tensor,
    weights: SsdWeights,
    states_PNSH: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNH: torch.Tensor,
) -> None:
    """As `recurrent.ssd_scan`; a result's last bits depend on how its prompt is cut into steps."""
    arguments = (x_TNH, dt_TN, b_TGS, c_TGS, weights, states_PNSH, metadata, out_TNH)
    if goes_by_chunks(metadata, x_TNH.dtype, states_PNSH.shape[2], MAX_STATE):
        scan_by_token(*arguments, most=FROM - 1)
        launch_ssd_chunks(*arguments, fewest=FROM, tiles=choose_tiles(HOPPER, OTHERS))
    else:
        scan_by_token(*arguments)


def launch_ssd_chunks(
    x_TNH: torch.Tensor,
    dt_TN: torch.Tensor,
    b_TGS: torch.Tensor,
    c_TGS: torch.Tensor,
    weights: SsdWeights,
    states_PNSH: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNH: torch.Tensor,
    *,
    fewest: int,
    tiles: Tiles,
) -> None:
    """The scan of requests with at least `fewest` tokens in this step."""
    _, heads, size, width = states_PNSH.shape
    block = tiles.block(size, width)
    if metadata.num_requests:
        ssd_chunks_kernel[(metadata.num_requests, heads, cdiv(width, block))](
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
            fewest,
            WIDTH=width,
            SIZE=size,
            CHUNK=tiles.chunk,
            STATE=max(16, next_power_of_2(size)),
            BLOCK=block,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **launch_options(),
        )
