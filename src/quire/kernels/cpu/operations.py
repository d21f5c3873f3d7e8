"""The operations of `kernels/ops.py` on the native library: tensors become pointers, and that is all.

Activations are float32 and contiguous; weights and caches bfloat16, float16 or float32. Weights are repacked at load into the
one layout that every batch size reads (`csrc/micro.h`), and the original is dropped.
"""

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.cpu import arguments as native
from quire.kernels.cpu.library import DTYPES, library, load
from quire.kernels.ops import LinearWeight, Rope
from quire.kernels.registry import kernel

PRIORITY = 10
PANEL = 16
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
MAX_HEAD_DIM = 1024


def unavailable() -> str | None:
    """Why the library cannot serve, or None."""
    found, why = load()
    return None if found is not None else why


def _cpu(op: str):
    return kernel(op, platform="cpu", priority=PRIORITY, unavailable=unavailable)


def _pointer(tensor: torch.Tensor | None, dtype: torch.dtype, name: str) -> int | None:
    if tensor is None:
        return None
    if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"{name} must be a contiguous CPU tensor of {dtype}; it is {tensor.dtype} on {tensor.device}"
            f" with strides {tensor.stride()}"
        )
    return tensor.data_ptr()


def _float(tensor: torch.Tensor | None, name: str) -> int | None:
    return _pointer(tensor, torch.float32, name)


def _pages(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """The address of pages [2, P, K, S, H], and the strides of planes and pages."""
    if kv_cache.device.type != "cpu" or not kv_cache[0, 0].is_contiguous():
        raise ValueError(
            f"a page must be contiguous and on the CPU; it is on {kv_cache.device}, strides {kv_cache.stride()}"
        )
    return kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1)


def rows_address(tensor: torch.Tensor, name: str) -> int:
    """The address of float32 rows, which may lie apart."""
    if tensor.dtype is not torch.float32 or tensor.stride(1) != 1 or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be float32 rows on the CPU; it is {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def _dtype_number(dtype: torch.dtype, what: str) -> int:
    number = DTYPES.get(dtype)
    if number is None:
        raise ValueError(f"{what} has type {dtype}; the CPU kernels take {', '.join(map(str, DTYPES))}")
    return number


def _packed(weight: LinearWeight) -> torch.Tensor:
    if weight.packed is None:
        raise ValueError(f"this weight [{weight.out_features}, {weight.in_features}] was not packed by the CPU kernels")
    return weight.packed


@_cpu("pack_linear")
def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> LinearWeight:
    dtype = _dtype_number(weight_NK.dtype, "a weight")
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    n, k = weight_NK.shape
    panels, pairs = (n + PANEL - 1) // PANEL, (k + 1) // 2
    lib = library()
    packed = lib.allocate(panels * pairs * 2 * PANEL, weight_NK.dtype)
    if lib.recorder is not None:
        lib.recorder.refuse("a weight was packed")
    packing = native.PackArguments(weight_NK.data_ptr(), packed.data_ptr(), n, k, weight_NK.stride(0), dtype)
    lib.run(lib.operation("pack"), packing, panels, (weight_NK, packed))
    bias = None if bias_N is None else bias_N.float().contiguous()
    return LinearWeight(n, k, weight_NK.dtype, None, packed, bias)


@_cpu("linear")
def linear(x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
    packed, lib = _packed(weight), library()
    call = native.LinearArguments(
        _float(x_TK, "x"),
        packed.data_ptr(),
        _float(weight.bias, "bias"),
        _float(out_TN, "out"),
        weight.out_features,
        weight.in_features,
        DTYPES[weight.dtype],
    )
    lib.run(lib.operation("linear"), call, x_TK.shape[0], (x_TK, packed, weight.bias, out_TN))


def _embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float, accumulate: int) -> None:
    packed, lib = _packed(weight), library()
    call = native.EmbeddingArguments(
        _pointer(ids_T, torch.int32, "ids"),
        packed.data_ptr(),
        _float(out_TD, "out"),
        weight.out_features,
        weight.in_features,
        scale,
        accumulate,
        DTYPES[weight.dtype],
    )
    lib.run(lib.operation("embedding"), call, ids_T.shape[0], (ids_T, packed, out_TD))


@_cpu("embedding")
def embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    _embedding(ids_T, weight, out_TD, scale, 0)


@_cpu("add_embedding")
def add_embedding(ids_T: torch.Tensor, weight: LinearWeight, out_TD: torch.Tensor) -> None:
    _embedding(ids_T, weight, out_TD, 1.0, 1)


def _norm(x_TD, weight_D, bias_D, eps: float, out_TD, residual_TD, subtract_mean: int) -> None:
    lib = library()
    call = native.NormArguments(
        _float(x_TD, "x"),
        _float(weight_D, "weight"),
        _float(bias_D, "bias"),
        _float(out_TD, "out"),
        _float(residual_TD, "residual"),
        x_TD.shape[-1],
        1,
        x_TD.shape[-1],
        eps,
        subtract_mean,
    )
    lib.run(lib.operation("norm"), call, x_TD.shape[0], (x_TD, weight_D, bias_D, out_TD, residual_TD))


@_cpu("rms_norm")
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _norm(x_TD, weight_D, None, eps, out_TD, residual_TD, 0)


@_cpu("layer_norm")
def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    _norm(x_TD, weight_D, bias_D, eps, out_TD, residual_TD, 1)


@_cpu("head_norm")
def head_norm(
    x_TGH: torch.Tensor, weight_GH: torch.Tensor, bias_GH: torch.Tensor | None, eps: float, subtract_mean: bool
) -> None:
    lib, x = library(), rows_address(x_TGH, "x")
    weight, bias, (groups, size) = _float(weight_GH, "weight"), _float(bias_GH, "bias"), weight_GH.shape
    call = native.NormArguments(x, weight, bias, x, None, size, groups, x_TGH.stride(0), eps, int(subtract_mean))
    lib.run(lib.operation("norm"), call, x_TGH.shape[0], (x_TGH, weight_GH, bias_GH))


@_cpu("add")
def add(x_TD: torch.Tensor, out_TD: torch.Tensor, scale: float = 1.0) -> None:
    lib = library()
    call = native.AddArguments(_float(x_TD, "x"), _float(out_TD, "out"), x_TD.shape[-1], scale)
    lib.run(lib.operation("add"), call, x_TD.shape[0], (x_TD, out_TD))


def _activation_number(kind: str) -> int:
    if kind not in ACTIVATIONS:
        raise ValueError(f"activation {kind!r} is unknown; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[kind]


@_cpu("gated_activation")
def gated_activation(x_T2I: torch.Tensor, kind: str, out_TI: torch.Tensor) -> None:
    lib = library()
    call = native.ActivationArguments(
        _float(x_T2I, "x"), _float(out_TI, "out"), out_TI.shape[-1], _activation_number(kind), 1
    )
    lib.run(lib.operation("activation"), call, x_T2I.shape[0], (x_T2I, out_TI))


@_cpu("activation")
def activation(x_TI: torch.Tensor, kind: str) -> None:
    lib = library()
    x = _float(x_TI, "x")
    call = native.ActivationArguments(x, x, x_TI.shape[-1], _activation_number(kind), 0)
    lib.run(lib.operation("activation"), call, x_TI.shape[0], (x_TI,))


@_cpu("rope_and_cache")
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
) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; the CPU kernels take at most {MAX_HEAD_DIM}")
    lib = library()
    pages, plane_stride, page_stride = _pages(kv_cache)
    cos_sin = None if rope is None else rope.cos_sin
    call = native.RopeArguments(
        rows_address(qkv_TC, "qkv"),
        pages,
        _pointer(metadata.slot_mapping, torch.int64, "slot_mapping"),
        _pointer(metadata.positions, torch.int32, "positions"),
        _float(cos_sin, "cos_sin"),
        _float(q_norm_H, "q_norm"),
        _float(k_norm_H, "k_norm"),
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
    lib.run(lib.operation("rope_and_cache"), call, qkv_TC.shape[0], tensors)


@_cpu("paged_attention")
def paged_attention(
    qkv_TC: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    out_TNH: torch.Tensor,
) -> None:
    lib = library()
    pages, plane_stride, page_stride = _pages(kv_cache)
    call = native.AttentionArguments(
        rows_address(qkv_TC, "qkv"),
        pages,
        _float(out_TNH, "out"),
        _pointer(metadata.query_start, torch.int32, "query_start"),
        _pointer(metadata.seq_lens, torch.int32, "seq_lens"),
        _pointer(metadata.rows, torch.int32, "rows"),
        _pointer(metadata.block_table, torch.int32, "block_table"),
        _pointer(metadata.shape, torch.int64, "shape"),
        _float(params.sinks, "sinks"),
        _float(params.alibi_slopes, "alibi_slopes"),
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
    lib.run(lib.operation("paged_attention"), call, qkv_TC.shape[0], tensors)


@_cpu("xielu")
def xielu(x_TI: torch.Tensor, alphas_2: torch.Tensor) -> None:
    lib = library()
    call = native.XieluArguments(_float(x_TI, "x"), _float(alphas_2, "alphas"), x_TI.shape[1])
    lib.run(lib.operation("xielu"), call, x_TI.shape[0], (x_TI, alphas_2))


@_cpu("clip")
def clip(x_TC: torch.Tensor, limit: float) -> None:
    lib = library()
    call = native.ClipArguments(rows_address(x_TC, "x"), x_TC.shape[1], x_TC.stride(0), limit)
    lib.run(lib.operation("clip"), call, x_TC.shape[0], (x_TC,))


@_cpu("scale_rows")
def scale_rows(x_TC: torch.Tensor, table_L: torch.Tensor, index_T: torch.Tensor) -> None:
    lib = library()
    table, index = _float(table_L, "table"), _pointer(index_T, torch.int32, "index")
    call = native.ScaleRowsArguments(rows_address(x_TC, "x"), table, index, x_TC.shape[1], x_TC.stride(0))
    lib.run(lib.operation("scale_rows"), call, x_TC.shape[0], (x_TC, table_L, index_T))


@_cpu("gather_rows")
def gather_rows(x_TD: torch.Tensor, index_S: torch.Tensor, out_SD: torch.Tensor) -> None:
    lib = library()
    call = native.GatherArguments(
        _float(x_TD, "x"), _pointer(index_S, torch.int32, "index"), _float(out_SD, "out"), x_TD.shape[-1]
    )
    lib.run(lib.operation("gather_rows"), call, index_S.shape[0], (x_TD, index_S, out_SD))


@_cpu("scale_and_cap")
def scale_and_cap(x_TV: torch.Tensor, scale: float, soft_cap: float) -> None:
    lib = library()
    call = native.ScaleAndCapArguments(_float(x_TV, "x"), x_TV.shape[-1], scale, soft_cap)
    lib.run(lib.operation("scale_and_cap"), call, x_TV.shape[0], (x_TV,))


@_cpu("argmax")
def argmax(logits_SV: torch.Tensor, out_S: torch.Tensor) -> None:
    lib = library()
    call = native.ArgmaxArguments(
        _float(logits_SV, "logits"), None, None, None, _pointer(out_S, torch.int32, "out"), logits_SV.shape[-1]
    )
    lib.run(lib.operation("argmax"), call, logits_SV.shape[0], (logits_SV, out_S))


@_cpu("gumbel_argmax")
def gumbel_argmax(
    logits_SV: torch.Tensor,
    inverse_temperature_S: torch.Tensor,
    seed_S: torch.Tensor,
    position_S: torch.Tensor,
    out_S: torch.Tensor,
) -> None:
    lib = library()
    call = native.ArgmaxArguments(
        _float(logits_SV, "logits"),
        _float(inverse_temperature_S, "inverse_temperature"),
        _pointer(seed_S, torch.int64, "seed"),
        _pointer(position_S, torch.int64, "position"),
        _pointer(out_S, torch.int32, "out"),
        logits_SV.shape[-1],
    )
    lib.run(
        lib.operation("argmax"), call, logits_SV.shape[0], (logits_SV, inverse_temperature_S, seed_S, position_S, out_S)
    )
