"""The argument structures of the native operations, field by field as `csrc/arguments.h` declares them, and how one is made."""

import ctypes


def structure(name: str, *first: tuple[str, type], **kinds: str) -> type[ctypes.Structure]:
    """A structure of fields in the order of the keywords, after those of `first`.

    Args:
        kinds: `pointers`, `longs` (64 bits), `ints` (32) or `floats`: names of the fields of that type, by spaces.
    """
    types = {"pointers": ctypes.c_void_p, "longs": ctypes.c_int64, "ints": ctypes.c_int32, "floats": ctypes.c_float}
    fields = [*first, *((field, types[kind]) for kind, names in kinds.items() for field in names.split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


PackArguments = structure("PackArguments", pointers="source packed", longs="n k source_stride", ints="dtype")
LinearArguments = structure("LinearArguments", pointers="x packed bias out", longs="n k", ints="dtype")
EmbeddingArguments = structure(
    "EmbeddingArguments", pointers="ids packed out", longs="n k", floats="scale", ints="accumulate dtype"
)
NormArguments = structure(
    "NormArguments", pointers="x weight bias out residual", longs="d groups stride", floats="eps", ints="subtract_mean"
)
AddArguments = structure("AddArguments", pointers="x out", longs="d", floats="scale")
ActivationArguments = structure("ActivationArguments", pointers="x out", longs="d", ints="kind gated")
XieluArguments = structure("XieluArguments", pointers="x alphas", longs="d")
ClipArguments = structure("ClipArguments", pointers="x", longs="d stride", floats="limit")
ScaleRowsArguments = structure("ScaleRowsArguments", pointers="x table index", longs="d stride")
GatherArguments = structure("GatherArguments", pointers="x index out", longs="d")
ScaleAndCapArguments = structure("ScaleAndCapArguments", pointers="x", longs="d", floats="scale soft_cap")
ArgmaxArguments = structure(
    "ArgmaxArguments",
    pointers="logits inverse_temperature seed position slots allowed threshold out",
    longs="v words",
)
ThresholdsArguments = structure(
    "ThresholdsArguments", pointers="logits inverse_temperature top_k top_p min_p out", longs="v"
)
KeepAllowedArguments = structure("KeepAllowedArguments", pointers="logits slots allowed", longs="v words")
RopeArguments = structure(
    "RopeArguments",
    pointers="qkv cache slot_mapping positions cos_sin q_norm k_norm",
    longs="plane_stride page_stride qkv_stride block_size",
    ints="num_heads num_kv_heads head_dim rotary_dim interleaved dtype",
    floats="eps",
)
AttentionArguments = structure(
    "AttentionArguments",
    pointers="qkv cache out query_start seq_lens table_rows block_table shape sinks alibi_slopes seen_end lse",
    longs="plane_stride page_stride qkv_stride block_size block_table_stride",
    ints="num_heads num_kv_heads head_dim value_dim window causal chunk dtype",
    floats="scale soft_cap",
)
ReadArguments = structure("ReadArguments", ("source", ctypes.c_void_p), longs="bytes", pointers="sink")
