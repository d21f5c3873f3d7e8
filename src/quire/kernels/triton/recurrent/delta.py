"""The gated delta rule over prompts, in chunks ("Gated Delta Networks", Yang, Kautz and Hatamizadeh, 2024).

What a token writes depends on what those before it in the chunk wrote: with k of unit length, decays d, strengths b and the
state h before the chunk, the writes w solve (1 + A) w = b (v - d k h), A[i, j] = b[i] d[i, j] k[i] . k[j] for i > j. No state
is in A, so one kernel inverts 1 + A for all chunks side by side, and another goes from chunk to chunk with the state in its
registers, as `recurrent_ssd.py` does.

The inverse of a lower triangular matrix [[P, 0], [R, Q]] is [[P', 0], [-Q' R P', Q']]: blocks of 1, 2, 4 … tokens are joined
in pairs. Sums of powers of A would be as short, but their terms are huge where keys are alike, and cancel each other.

What the tensor cores multiply is rounded as `recurrent_chunks.multiply` says. Against float64, as a part of the largest number
(heads of 128 by 128, 260 tokens, weak to strong decays, in the interpreter): 1e-5 of outputs and states, and where all keys are
nearly the same and little is forgotten 4e-5; token by token it is 1e-6, and rounding an output to bfloat16 makes 2e-3 of it.

Legend: L tokens of a chunk, S size of a key, H channels of a program.
"""

import torch
import triton

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.attention.prefill import find_request
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
from quire.kernels.triton.recurrent.scan import gated_delta_rule as scan_by_token
from quire.kernels.types import DeltaWeights

HOPPER, OTHERS = Tiles(64, 32, num_warps=4), Tiles(32, 32, num_warps=8)
"""What needs few more registers than there are, as compiled for compute capabilities 9.0 and 8.0."""
MAX_STATE = 128
SCRATCH = 64 << 20
"""Bytes of inverses there are at a time, one layer after another: those of 8,192 tokens and 32 heads. A step that needs more is
cut, each part going on from the states that the one before left. Of the worker's reserve for what only steps take, an eighth."""


@triton.jit
def invert(a_LL, CHUNK: tl.constexpr):
    """The inverse of 1 + a, for strictly lower triangular a."""
    row_L1, column_1L = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse_LL = tl.where(row_L1 == column_1L, 1.0, 0.0) - tl.where(row_L1 // 2 == column_1L // 2, a_LL, 0.0)
    LEVELS: tl.constexpr = 5 if CHUNK == 64 else 4 if CHUNK == 32 else 3
    for level in tl.static_range(LEVELS):
        size = 2 << level
        joins_LL = (row_L1 // size != column_1L // size) & (row_L1 // (2 * size) == column_1L // (2 * size))
        zeros_LL = tl.zeros([CHUNK, CHUNK], tl.float32)
        product_LL = multiply(tl.where(joins_LL, a_LL, 0.0), inverse_LL, zeros_LL)
        inverse_LL = multiply(-inverse_LL, product_LL, inverse_LL)
    return inverse_LL


@triton.jit(do_not_specialize=["num_requests"])
def delta_inverses_kernel(
    k_ptr,
    a_ptr,
    b_ptr,
    a_weight_ptr,
    dt_bias_ptr,
    inverses_ptr,
    query_start_ptr,
    seq_lens_ptr,
    size,
    heads,
    heads_a_key,
    beta_scale,
    k_stride,
    a_stride,
    b_stride,
    page_size,
    num_requests,
    fewest,
    low,
    high,
    CHUNK: tl.constexpr,
    STATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Inverses of 1 + A, their columns times the strengths of the writes: a row of CHUNK numbers each token and head, for the
    step's tokens from `low` on, up to `high`."""
    await_previous(PDL)
    request = find_request(query_start_ptr, num_requests, tl.program_id(0), CHUNK)
    start = tl.load(query_start_ptr + request).to(tl.int64)
    end = tl.load(query_start_ptr + request + 1).to(tl.int64)
    if end - start < fewest:
        return
    position = tl.load(seq_lens_ptr + request).to(tl.int64) - (end - start)
    head, number_S = tl.program_id(1), tl.arange(0, STATE)
    is_number_S, shared_S = number_S < size, head // heads_a_key * size + number_S
    a_weight, dt_bias = tl.load(a_weight_ptr + head), tl.load(dt_bias_ptr + head)
    i_L = tl.arange(0, CHUNK)
    # The request's programs of this grid share its chunks, of which short pages may make more.
    programs = (end // CHUNK - start // CHUNK + 1).to(tl.int32)
    own = tl.program_id(0) - (start // CHUNK).to(tl.int32) - request
    start, end, position = part_of(start, end, position, low, high)
    first, behind = chunks_of(start, end, position, page_size, CHUNK)
    first += own
    for number in range(first, behind, programs):
        begin, stop = chunk_at(number, start, end, position, page_size, CHUNK)
        t_L = begin + i_L
        is_token_L = t_L < stop
        tokens_LS = is_token_L[:, None] & is_number_S[None, :]
        k_LS = tl.load(k_ptr + t_L[:, None] * k_stride + shared_S[None, :], mask=tokens_LS, other=0.0)
        dt_L = softplus(tl.load(a_ptr + t_L * a_stride + head, mask=is_token_L, other=0.0).to(tl.float32) + dt_bias)
        beta_L = tl.load(b_ptr + t_L * b_stride + head, mask=is_token_L, other=0.0).to(tl.float32)
        beta_L = beta_scale / (1.0 + tl.exp(-beta_L))
        unit_L = unit(k_LS)
        between_LL, _, _, _ = decays(tl.where(is_token_L, dt_L * a_weight, 0.0), CHUNK)
        a_LL = tl.where(i_L[:, None] > i_L[None, :], between_LL, 0.0) * (beta_L * unit_L)[:, None] * unit_L[None, :]
        a_LL *= multiply(k_LS, tl.trans(k_LS), tl.zeros([CHUNK, CHUNK], tl.float32))
        inverse_LL = invert(a_LL, CHUNK) * beta_L[None, :]
        at_LL = (((t_L - low) * heads + head) * CHUNK)[:, None] + i_L[None, :]
        tl.store(inverses_ptr + at_LL, inverse_LL, mask=is_token_L[:, None])


@triton.jit
def part_of(start, end, position, low, high):
    """What of a request's tokens is from `low` on, up to `high`, and the position where that begins."""
    position += tl.maximum(low - start, 0)
    return tl.maximum(start, low), tl.minimum(end, high), position


@triton.jit
def unit(x_LS):
    """What makes each row's length 1."""
    x_LS = x_LS.to(tl.float32)
    return tl.rsqrt(tl.sum(x_LS * x_LS, 1) + 1e-6)


@triton.jit
def delta_chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    a_weight_ptr,
    dt_bias_ptr,
    inverses_ptr,
    states_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    table_ptr,
    heads,
    heads_a_key,
    query_scale,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    page_stride,
    out_stride,
    table_stride,
    page_size,
    fewest,
    low,
    high,
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
    start, end, position = part_of(start, end, position, low, high)
    head, offset_H, number_S = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, STATE)
    is_value_H, is_number_S = offset_H < WIDTH, number_S < SIZE
    inside_SH = is_number_S[:, None] & is_value_H[None, :]
    at_SH = (head * SIZE + number_S[:, None]) * WIDTH + offset_H[None, :]
    column_H, shared_S = head * WIDTH + offset_H, head // heads_a_key * SIZE + number_S
    a_weight, dt_bias = tl.load(a_weight_ptr + head), tl.load(dt_bias_ptr + head)
    i_L = tl.arange(0, CHUNK)
    state_SH = load_state(states_ptr, pages_ptr, page_stride, page_size, start, end, position, at_SH, inside_SH)
    first, behind = chunks_of(start, end, position, page_size, CHUNK)
    for number in range(first, behind):
        begin, stop = chunk_at(number, start, end, position, page_size, CHUNK)
        t_L = begin + i_L
        is_token_L = t_L < stop
        tokens_LS, tokens_LH = is_token_L[:, None] & is_number_S[None, :], is_token_L[:, None] & is_value_H[None, :]
        q_LS = tl.load(q_ptr + t_L[:, None] * q_stride + shared_S[None, :], mask=tokens_LS, other=0.0)
        k_LS = tl.load(k_ptr + t_L[:, None] * k_stride + shared_S[None, :], mask=tokens_LS, other=0.0)
        v_LH = tl.load(v_ptr + t_L[:, None] * v_stride + column_H[None, :], mask=tokens_LH, other=0.0).to(tl.float32)
        at_LL = (((t_L - low) * heads + head) * CHUNK)[:, None] + i_L[None, :]
        inverse_LL = tl.load(inverses_ptr + at_LL, mask=is_token_L[:, None], other=0.0)
        dt_L = softplus(tl.load(a_ptr + t_L * a_stride + head, mask=is_token_L, other=0.0).to(tl.float32) + dt_bias)
        between_LL, since_L, until_L, whole = decays(tl.where(is_token_L, dt_L * a_weight, 0.0), CHUNK)
        k_unit_L, q_unit_L = unit(k_LS), unit(q_LS) * query_scale
        zeros_LH = tl.zeros([CHUNK, BLOCK], tl.float32)
        error_LH = v_LH - multiply(k_LS, state_SH, zeros_LH) * (k_unit_L * since_L)[:, None]
        y_LH = multiply(q_LS, state_SH, zeros_LH) * (q_unit_L * since_L)[:, None]
        write_LH = multiply(inverse_LL, error_LH, zeros_LH)
        weight_LL = between_LL * q_unit_L[:, None] * k_unit_L[None, :]
        weight_LL *= multiply(q_LS, tl.trans(k_LS), tl.zeros([CHUNK, CHUNK], tl.float32))
        y_LH = multiply(weight_LL, write_LH, y_LH)
        out_at_LH = t_L[:, None] * out_stride + column_H[None, :]
        tl.store(out_ptr + out_at_LH, y_LH.to(out_ptr.dtype.element_ty), mask=tokens_LH)
        state_SH = multiply(tl.trans(k_LS), write_LH * (k_unit_L * until_L)[:, None], whole * state_SH)
        done = position + stop - start
        store_state(states_ptr, pages_ptr, page_stride, page_size, done, stop == end, at_SH, inside_SH, state_SH)


@kernel("gated_delta_rule", platform="cuda", priority=10, invariant=False)
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
) -> None:
    """As `recurrent.gated_delta_rule`; a result's last bits depend on how its prompt is cut into steps."""
    arguments = (q_TKS, k_TKS, v_TNH, a_TN, b_TN, weights, states_PNSH, metadata, out_TNH)
    # Chunks know one decay a head: with one for each number of a state (Kimi) a product of keys has no common factor.
    is_plain = a_TN.dim() == 2 and not weights.floor
    if is_plain and goes_by_chunks(metadata, v_TNH.dtype, states_PNSH.shape[2], MAX_STATE):
        scan_by_token(*arguments, most=FROM - 1)
        launch_delta_chunks(*arguments, fewest=FROM, tiles=choose_tiles(HOPPER, OTHERS))
    else:
        scan_by_token(*arguments)


def launch_delta_chunks(
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
    fewest: int,
    tiles: Tiles,
) -> None:
    """The rule for requests with at least `fewest` tokens in this step."""
    _, heads, size, width = states_PNSH.shape
    requests, tokens, a_key = metadata.num_requests, v_TNH.shape[0], heads // k_TKS.shape[1]
    chunk, block, state = tiles.chunk, tiles.block(size, width), max(16, next_power_of_2(size))
    if not requests:
        return
    part = max(SCRATCH // (4 * heads * chunk) // chunk * chunk, chunk)
    inverses_TNL = torch.empty(min(tokens, part), heads, chunk, device=v_TNH.device)
    for low in range(0, tokens, part):
        delta_inverses_kernel[(cdiv(tokens, chunk) + requests, heads)](
            k_TKS,
            a_TN,
            b_TN,
            weights.a_N,
            weights.dt_bias_N,
            inverses_TNL,
            metadata.query_start,
            metadata.seq_lens,
            size,
            heads,
            a_key,
            float(weights.beta_scale),
            k_TKS.stride(0),
            a_TN.stride(0),
            b_TN.stride(0),
            metadata.block_size,
            requests,
            fewest,
            low,
            low + part,
            CHUNK=chunk,
            STATE=state,
            num_warps=4,
            num_stages=1,
            **launch_options(),
        )
        delta_chunks_kernel[(requests, heads, cdiv(width, block))](
            q_TKS,
            k_TKS,
            v_TNH,
            a_TN,
            weights.a_N,
            weights.dt_bias_N,
            inverses_TNL,
            states_PNSH,
            out_TNH,
            metadata.query_start,
            metadata.seq_lens,
            metadata.rows,
            metadata.block_table,
            heads,
            a_key,
            size**-0.5,
            q_TKS.stride(0),
            k_TKS.stride(0),
            v_TNH.stride(0),
            a_TN.stride(0),
            states_PNSH.stride(0),
            out_TNH.stride(0),
            metadata.block_table.stride(0),
            metadata.block_size,
            fewest,
            low,
            low + part,
            WIDTH=width,
            SIZE=size,
            CHUNK=chunk,
            STATE=state,
            BLOCK=block,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **launch_options(),
        )
