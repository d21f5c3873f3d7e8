"""The argument structures of the native operations, field by field as `csrc/arguments.h` declares them."""

import ctypes

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(**kinds: str) -> list[tuple[str, type]]:
    """Fields by kind, in order: each keyword is a field, its value `pointer`, `long`, `int` or `float`."""
    types = {"pointer": _POINTER, "long": _LONG, "int": _INT, "float": _FLOAT}
    return [(name, types[kind]) for name, kind in kinds.items()]


class PackArguments(ctypes.Structure):
    _fields_ = _fields(source="pointer", packed="pointer", n="long", k="long", source_stride="long", dtype="int")


class LinearArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", packed="pointer", bias="pointer", out="pointer", n="long", k="long", dtype="int")


class EmbeddingArguments(ctypes.Structure):
    _fields_ = _fields(
        ids="pointer", packed="pointer", out="pointer", n="long", k="long", scale="float", accumulate="int", dtype="int"
    )


class NormArguments(ctypes.Structure):
    _fields_ = _fields(
        x="pointer",
        weight="pointer",
        bias="pointer",
        out="pointer",
        residual="pointer",
        d="long",
        groups="long",
        stride="long",
        eps="float",
        subtract_mean="int",
    )


class AddArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", out="pointer", d="long", scale="float")


class ActivationArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", out="pointer", d="long", kind="int", gated="int")


class XieluArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", alphas="pointer", d="long")


class ClipArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", d="long", stride="long", limit="float")


class ScaleRowsArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", table="pointer", index="pointer", d="long", stride="long")


class GatherArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", index="pointer", out="pointer", d="long")


class ScaleAndCapArguments(ctypes.Structure):
    _fields_ = _fields(x="pointer", d="long", scale="float", soft_cap="float")


class ArgmaxArguments(ctypes.Structure):
    _fields_ = _fields(
        logits="pointer", inverse_temperature="pointer", seed="pointer", position="pointer", out="pointer", v="long"
    )


class RopeArguments(ctypes.Structure):
    _fields_ = _fields(
        qkv="pointer",
        cache="pointer",
        slot_mapping="pointer",
        positions="pointer",
        cos_sin="pointer",
        q_norm="pointer",
        k_norm="pointer",
        plane_stride="long",
        page_stride="long",
        qkv_stride="long",
        block_size="long",
        num_heads="int",
        num_kv_heads="int",
        head_dim="int",
        rotary_dim="int",
        interleaved="int",
        dtype="int",
        eps="float",
    )


class AttentionArguments(ctypes.Structure):
    _fields_ = _fields(
        qkv="pointer",
        cache="pointer",
        out="pointer",
        query_start="pointer",
        seq_lens="pointer",
        table_rows="pointer",
        block_table="pointer",
        shape="pointer",
        sinks="pointer",
        alibi_slopes="pointer",
        plane_stride="long",
        page_stride="long",
        qkv_stride="long",
        block_size="long",
        block_table_stride="long",
        num_heads="int",
        num_kv_heads="int",
        head_dim="int",
        value_dim="int",
        window="int",
        causal="int",
        chunk="int",
        dtype="int",
        scale="float",
        soft_cap="float",
    )


class ReadArguments(ctypes.Structure):
    _fields_ = _fields(source="pointer", bytes="long", sink="pointer")
