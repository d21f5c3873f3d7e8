"""What stands around latent attention on a GPU: a matrix a head, and what becomes of rotated parts and latents.

Knows the layout of pages [2, P, 1, S, R + E]. Knows nothing of attention.
Legend: T tokens, N heads, K inputs and M outputs of a head's matrix, R of the latent, E rotated values, B heads of one program.
"""

import torch
import triton
import triton.language as tl

from quire.attention.interface import AttentionMetadata
from quire.kernels.registry import kernel
from quire.kernels.triton.attention.rope import load_cos_sin, rotary_partner, to_cache_type
from quire.kernels.triton.launch import await_previous, cdiv, launch_options, next_power_of_2, two_ways
from quire.kernels.types import HeadWeight, Rope

HEADS_PER_PROGRAM = 16


@triton.jit(do_not_specialize=["num_rows"])
def _head_linear(
    x,
    weight,
    out,
    num_rows,
    x_row,
    x_head,
    out_row,
    out_head,
    M: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows `BLOCK_T * program_id(0)` and on of one head's outputs `BLOCK_M * program_id(1)` and on."""
    head = tl.program_id(2)
    t_T, m_M, k_K = (
        tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T),
        tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M),
        tl.arange(0, BLOCK_K),
    )
    await_previous(PDL)
    row_T1, is_row_T1 = t_T.to(tl.int64)[:, None], (t_T < num_rows)[:, None]
    weight_M1 = weight + (head.to(tl.int64) * M + m_M)[:, None] * K
    acc_TM = tl.zeros((BLOCK_T, BLOCK_M), tl.float32)
    for start in range(0, K, BLOCK_K):
        in_K = ((start + k_K) < K)[None, :]
        x_TK = tl.load(x + row_T1 * x_row + head * x_head + (start + k_K)[None, :], mask=is_row_T1 & in_K, other=0.0)
        w_MK = tl.load(weight_M1 + (start + k_K)[None, :], mask=(m_M < M)[:, None] & in_K, other=0.0)
        acc_TM = tl.dot(x_TK.to(w_MK.dtype), tl.trans(w_MK), acc_TM, input_precision="ieee")
    tl.store(
        out + row_T1 * out_row + head * out_head + m_M[None, :],
        acc_TM.to(out.dtype.element_ty),
        mask=is_row_T1 & (m_M < M)[None, :],
    )


@two_ways("head_linear")
def head_linear(x_TNK: torch.Tensor, weight: HeadWeight, out_TNM: torch.Tensor, *, is_invariant: bool = False) -> None:
    """`latent.head_linear`, in blocks that fit the number of rows, or in the same ones for any number."""
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel")
    tokens, m, k = x_TNK.shape[0], weight.out_features, weight.in_features
    block_t = 64 if is_invariant else 16 if tokens <= 16 else 64 if tokens <= 1024 else 128
    block_m = 64 if block_t == 16 else 128
    _head_linear[(cdiv(tokens, block_t), cdiv(m, block_m), weight.heads)](
        x_TNK,
        weight.data,
        out_TNM,
        tokens,
        x_TNK.stride(0),
        x_TNK.stride(1),
        out_TNM.stride(0),
        out_TNM.stride(1),
        M=m,
        K=k,
        BLOCK_T=block_t,
        BLOCK_M=block_m,
        BLOCK_K=64,
        num_warps=4,
        num_stages=3,
        **launch_options(),
    )


@triton.jit
def _latent_and_cache(
    q,
    latent,
    norm,
    cache,
    out,
    slots,
    positions,
    cos_sin,
    eps,
    inverse_scale,
    q_row,
    q_head,
    latent_row,
    out_row,
    out_head,
    page_stride,
    N: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: its latent, or its heads `BLOCK * (program_id(1) - 1)` and on."""
    token = tl.program_id(0).to(tl.int64)
    dim_E, dim_R = tl.arange(0, E_PAD), tl.arange(0, R_PAD)
    partner_E, pair_E, sign_E = rotary_partner(dim_E, E, INTERLEAVED)
    in_E = dim_E < E
    await_previous(PDL)
    cos_E, sin_E = load_cos_sin(cos_sin, tl.load(positions + token), dim_E, pair_E, sign_E, E, True)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token)
        row = latent + token * latent_row
        x_R = tl.load(row + dim_R, mask=dim_R < R, other=0.0).to(tl.float32)
        x_R = x_R * tl.rsqrt(tl.sum(x_R * x_R, 0) / R + eps) * tl.load(norm + dim_R, mask=dim_R < R, other=0.0)
        key_E = tl.load(row + R + dim_E, mask=in_E, other=0.0).to(tl.float32)
        partner = tl.load(row + R + partner_E, mask=in_E, other=0.0).to(tl.float32)
        key_E = key_E * cos_E + partner * sin_E
        target = cache + (slot // PAGE) * page_stride + (slot % PAGE) * (R + E)
        is_kept = slot >= 0
        tl.store(target + dim_R, to_cache_type(x_R, inverse_scale, cache.dtype.element_ty), mask=(dim_R < R) & is_kept)
        tl.store(target + R + dim_E, to_cache_type(key_E, inverse_scale, cache.dtype.element_ty), mask=in_E & is_kept)
    else:
        head_B = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        mask_BE = (head_B < N)[:, None] & in_E[None, :]
        row_B1 = q + token * q_row + (head_B * q_head)[:, None]
        x_BE = tl.load(row_B1 + dim_E[None, :], mask=mask_BE, other=0.0).to(tl.float32)
        partner_BE = tl.load(row_B1 + partner_E[None, :], mask=mask_BE, other=0.0).to(tl.float32)
        x_BE = x_BE * cos_E[None, :] + partner_BE * sin_E[None, :]
        out_B1 = out + token * out_row + (head_B * out_head)[:, None]
        tl.store(out_B1 + dim_E[None, :], x_BE.to(out.dtype.element_ty), mask=mask_BE)


@kernel("latent_and_cache", platform="cuda", priority=10)
def latent_and_cache(
    q_TNE: torch.Tensor,
    latent_TC: torch.Tensor,
    norm_R: torch.Tensor,
    eps: float,
    rope: Rope,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    out_TNE: torch.Tensor,
    scale: float = 1.0,
) -> None:
    """`latent.latent_and_cache`."""
    tokens, heads, rank = latent_TC.shape[0], q_TNE.shape[1], norm_R.shape[0]
    block = min(HEADS_PER_PROGRAM, next_power_of_2(heads))
    _latent_and_cache[(tokens, 1 + cdiv(heads, block))](
        q_TNE,
        latent_TC,
        norm_R,
        kv_cache,
        out_TNE,
        metadata.slot_mapping,
        metadata.positions,
        rope.cos_sin,
        eps,
        1.0 / scale,
        q_TNE.stride(0),
        q_TNE.stride(1),
        latent_TC.stride(0),
        out_TNE.stride(0),
        out_TNE.stride(1),
        kv_cache.stride(1),
        N=heads,
        R=rank,
        R_PAD=next_power_of_2(rank),
        E=rope.rotary_dim,
        E_PAD=next_power_of_2(rope.rotary_dim),
        PAGE=metadata.block_size,
        BLOCK=block,
        INTERLEAVED=rope.interleaved,
        num_warps=2,
        **launch_options(),
    )
