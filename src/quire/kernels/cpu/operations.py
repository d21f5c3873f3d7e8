"""The operations of `kernels/ops.py` on the native library: tensors become pointers, and that is all.

Activations are float32 and contiguous; weights and caches bfloat16, float16 or float32. Weights are repacked at load into the
one layout that every batch size reads (`csrc/micro.h`), and the original is dropped.
"""

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.binding import address, cpu_kernel, float_address, pack_panels, rows_address, run
from quire.kernels.cpu.library import DTYPES
from quire.kernels.types import LinearWeight, Rope

ACTIVATIONS = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4, "quick_gelu": 5, "gelu_10": 6, "relu6": 7, "leaky_relu": 8,
    "sigmoid": 9, "tanh": 10, "mish": 11, "hardswish": 12, "linear": 13, "laplace": 14, "sqrtsoftplus": 15,
}  # fmt: skip
MAX_HEAD_DIM = 1024


def _pages(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """The address of pages [2, P, K, S, H], and the strides of planes and pages."""
    if kv_cache.device.type != "cpu" or not kv_cache[0, 0].is_contiguous():
        raise ValueError(
            f"a page must be contiguous and on the CPU; it is on {kv_cache.device}, strides {kv_cache.stride()}"
        )
    return kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1)


def _dtype_number(dtype: torch.dtype, what: str) -> int:
    number = DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"{what} has type {dtype}; the CPU kernels take {', '.join(map(str, DTYPES))}")
    return number


def _packed(weight: LinearWeight) -> torch.Tensor:
    if weight.packed is None:
        raise ValueError(f"this weight [{weight.out_features}, {weight.in_features}] was not packed by the CPU kernels")
    return weight.packed


@cpu_kernel("pack_linear")
def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearWeight:
    _dtype_number(weight_NK.dtype, "a weight")
    bias = None if bias_N is None else bias_N.float().contiguous()
    n, k = weight_NK.shape
    return LinearWeight(n, k, weight_NK.dtype, None, pack_panels(weight_NK[None]), bias)


@cpu_kernel("linear")
def linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
    packed = _packed(weight)
    call = native.LinearArguments(
        float_address(x_TK, "x"),
        packed.data_ptr(),
        float_address(weight.bias, "bias"),
        float_address(out_TN, "out"),
        weight.out_features,
        weight.in_features,
        DTYPES[weight.dtype],
    )
    run("linear", call, x_TK.shape[0], x_TK, packed, weight.bias, out_TN)


def _embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float, accumulate: int) -> None:
    packed = _packed(weight)
    call = native.EmbeddingArguments(
        address(ids_T, torch.int32, "ids"),
        packed.data_ptr(),
        float_address(out_TD, "out"),
        weight.out_features,
        weight.in_features,
        scale,
        accumulate,
        DTYPES[weight.dtype],
    )
    run("embedding", call, ids_T.shape[0], ids_T, packed, out_TD)


@cpu_kernel("embedding")
def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    _embedding(ids_T, weight, out_TD, scale, 0)


@cpu_kernel("add_embedding")
def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    _embedding(ids_T, weight, out_TD, 1.0, 1)


def _norm(x_TD, weight_D, bias_D, eps: float, out_TD, residual_TD, subtract_mean: int) -> None:
    call = native.NormArguments(
        float_address(x_TD, "x"),
        float_address(weight_D, "weight"),
        float_address(bias_D, "bias"),
        float_address(out_TD, "out"),
        float_address(residual_TD, "residual"),
        x_TD.shape[-1],
        1,
        x_TD.shape[-1],
        eps,
        subtract_mean,
    )
    run("norm", call, x_TD.shape[0], x_TD, weight_D, bias_D, out_TD, residual_TD)


@cpu_kernel("rms_norm")
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _norm(x_TD, weight_D, None, eps, out_TD, residual_TD, 0)


@cpu_kernel("layer_norm")
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _norm(x_TD, weight_D, bias_D, eps, out_TD, residual_TD, 1)


@cpu_kernel("head_norm")
def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    x = rows_address(x_TGH, "x")
    weight, bias, (groups, size) = float_address(weight_GH, "weight"), float_address(bias_GH, "bias"), weight_GH.shape
    call = native.NormArguments(x, weight, bias, x, None, size, groups, x_TGH.stride(0), eps, int(subtract_mean))
    run("norm", call, x_TGH.shape[0], x_TGH, weight_GH, bias_GH)


@cpu_kernel("add")
def add(x_TD: torch.Tensor, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    call = native.AddArguments(float_address(x_TD, "x"), float_address(out_TD, "out"), x_TD.shape[-1], scale)
    run("add", call, x_TD.shape[0], x_TD, out_TD)


def _activation_number(kind: str) -> int:
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]


@cpu_kernel("gated_activation")
def gated_activation(x_T2I: torch.Tensor, kind: str, out_TI: torch.Tensor) -> None:
    call = native.ActivationArguments(
        float_address(x_T2I, "x"), float_address(out_TI, "out"), out_TI.shape[-1], _activation_number(kind), 1
    )
    run("activation", call, x_T2I.shape[0], x_T2I, out_TI)


@cpu_kernel("activation")
def activation(x_TI: torch.Tensor, kind: str) -> None:
    x = float_address(x_TI, "x")
    call = native.ActivationArguments(x, x, x_TI.shape[-1], _activation_number(kind), 0)
    run("activation", call, x_TI.shape[0], x_TI)


@cpu_kernel("rope_and_cache")
def rope_and_cache(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rope: Rope | None,
    q_norm_H: torch.Tensor | None = None,
    k_norm_H: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the CPU kernels take at most {MAX_HEAD_DIM}")
    pages, plane_stride, page_stride = _pages(kv_cache)
    cos_sin = None if rope is None else rope.cos_sin
    call = native.RopeArguments(
        rows_address(qkv_TC, "qkv"),
        pages,
        address(metadata.slot_mapping, torch.int64, "slot_mapping"),
        address(metadata.positions, torch.int32, "positions"),
        float_address(cos_sin, "cos_sin"),
        float_address(q_norm_H, "q_norm"),
        float_address(k_norm_H, "k_norm"),
        plane_stride,
        page_stride,
        qkv_TC.stride(0),
        metadata.block_size,
        num_heads,
        num_kv_heads,
        head_dim,
        0 if rope is None else rope.rotary_dim,
        0 if rope is None else int(rope.interleaved),
        _dtype_number(kv_cache.dtype, "the KV cache"),
        eps,
    )
    tensors = (qkv_TC, kv_cache, metadata.slot_mapping, metadata.positions, cos_sin, q_norm_H, k_norm_H)
    run("rope_and_cache", call, qkv_TC.shape[0], *tensors)


@cpu_kernel("paged_attention")
def paged_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: torch.Tensor,
) -> None:
    pages, plane_stride, page_stride = _pages(kv_cache)
    call = native.AttentionArguments(
        rows_address(qkv_TC, "qkv"),
        pages,
        float_address(out_TNH, "out"),
        address(metadata.query_start, torch.int32, "query_start"),
        address(metadata.seq_lens, torch.int32, "seq_lens"),
        address(metadata.rows, torch.int32, "rows"),
        address(metadata.block_table, torch.int32, "block_table"),
        address(metadata.shape, torch.int64, "shape"),
        float_address(params.sinks, "sinks"),
        float_address(params.alibi_slopes, "alibi_slopes"),
        plane_stride,
        page_stride,
        qkv_TC.stride(0),
        metadata.block_size,
        metadata.block_table.stride(0),
        params.num_heads,
        params.num_kv_heads,
        params.head_dim,
        params.value_dim,
        params.window,
        int(params.causal),
        params.chunk,
        _dtype_number(kv_cache.dtype, "the KV cache"),
        params.scale,
        params.soft_cap,
    )
    tensors = (
        qkv_TC,
        kv_cache,
        out_TNH,
        metadata.query_start,
        metadata.seq_lens,
        metadata.rows,
        metadata.block_table,
        metadata.shape,
        params.sinks,
        params.alibi_slopes,
    )
    run("paged_attention", call, qkv_TC.shape[0], *tensors)


@cpu_kernel("xielu")
def xielu(x_TI: torch.Tensor, alphas_2: torch.Tensor) -> None:
    call = native.XieluArguments(float_address(x_TI, "x"), float_address(alphas_2, "alphas"), x_TI.shape[1])
    run("xielu", call, x_TI.shape[0], x_TI, alphas_2)


@cpu_kernel("clip")
def clip(x_TC: torch.Tensor, limit: float) -> None:
    call = native.ClipArguments(rows_address(x_TC, "x"), x_TC.shape[1], x_TC.stride(0), limit)
    run("clip", call, x_TC.shape[0], x_TC)


@cpu_kernel("scale_rows")
def scale_rows(x_TC: torch.Tensor, table_L: torch.Tensor, index_T: torch.Tensor) -> None:
    table, index = float_address(table_L, "table"), address(index_T, torch.int32, "index")
    call = native.ScaleRowsArguments(rows_address(x_TC, "x"), table, index, x_TC.shape[1], x_TC.stride(0))
    run("scale_rows", call, x_TC.shape[0], x_TC, table_L, index_T)


@cpu_kernel("gather_rows")
def gather_rows(x_TD: torch.Tensor, index_S: torch.Tensor, out_SD: torch.Tensor) -> None:
    call = native.GatherArguments(
        float_address(x_TD, "x"), address(index_S, torch.int32, "index"), float_address(out_SD, "out"), x_TD.shape[-1]
    )
    run("gather_rows", call, index_S.shape[0], x_TD, index_S, out_SD)


@cpu_kernel("scale_and_cap")
def scale_and_cap(x_TV: torch.Tensor, scale: float, soft_cap: float) -> None:
    call = native.ScaleAndCapArguments(float_address(x_TV, "x"), x_TV.shape[-1], scale, soft_cap)
    run("scale_and_cap", call, x_TV.shape[0], x_TV)


@cpu_kernel("argmax")
def argmax(logits_SV: torch.Tensor, out_S: torch.Tensor) -> None:
    call = native.ArgmaxArguments(
        float_address(logits_SV, "logits"), None, None, None, None, None, address(out_S, torch.int32, "out"),
        logits_SV.shape[-1], 0,
    )  # fmt: skip
    run("argmax", call, logits_SV.shape[0], logits_SV, out_S)


@cpu_kernel("gumbel_argmax")
def gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    _draw(logits_SV, None, None, inverse_temperature_S, seed_S, position_S, out_S)


@cpu_kernel("allowed_gumbel_argmax")
def allowed_gumbel_argmax(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor,
    allowed_XW: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    _draw(logits_SV, slots_S, allowed_XW, inverse_temperature_S, seed_S, position_S, out_S)


def _draw(
    logits_SV: torch.Tensor,
    slots_S: torch.Tensor | None,
    allowed_XW: torch.Tensor | None,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    """Gumbel-max of what the rows' masks allow; None: of everything."""
    position_S = position_S.long()
    call = native.ArgmaxArguments(
        float_address(logits_SV, "logits"),
        float_address(inverse_temperature_S, "inverse_temperature"),
        address(seed_S, torch.int64, "seed"),
        address(position_S, torch.int64, "position"),
        None if slots_S is None else address(slots_S, torch.int32, "slots"),
        None if allowed_XW is None else address(allowed_XW, torch.int32, "allowed"),
        address(out_S, torch.int32, "out"),
        logits_SV.shape[-1],
        0 if allowed_XW is None else allowed_XW.shape[1],
    )
    tensors = (logits_SV, slots_S, allowed_XW, inverse_temperature_S, seed_S, position_S, out_S)
    run("argmax", call, logits_SV.shape[0], *tensors)


@cpu_kernel("keep_allowed")
def keep_allowed(logits_SV: torch.Tensor, slots_S: torch.Tensor, allowed_XW: torch.Tensor) -> None:
    call = native.KeepAllowedArguments(
        float_address(logits_SV, "logits"),
        address(slots_S, torch.int32, "slots"),
        address(allowed_XW, torch.int32, "allowed"),
        logits_SV.shape[1],
        allowed_XW.shape[1],
    )
    run("keep_allowed", call, logits_SV.shape[0], logits_SV, slots_S, allowed_XW)
