"""GPTQ checkpoints (AutoGPTQ, GPTQModel): integer codes in int32 words along the inputs, scales and zeros a group of them.

`g_idx` says to which group a column belongs: with act order, columns of a group are not adjacent. Version 1 stores a zero as
one less than it is.
"""

import re
from collections.abc import Mapping

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.layers.linear import COLUMNS, ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization.codes import unpack_words, weight_of_words, words_axis
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, refused, spellings

BITS = range(2, 9)
INT32 = (torch.int32,)


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `gptq` stores each matrix.

    Raises:
        ConfigError: other bits, or a packing that is a kernel's own.
    """
    stored_as = section.get("checkpoint_format", "gptq")
    if stored_as not in ("gptq", "gptq_v2") or section.get("is_marlin_format"):
        raise refused("checkpoint_format", "marlin" if stored_as == "gptq" else stored_as, "gptq, gptq_v2")
    if section.get("pack_dtype", "int32") != "int32":
        raise refused("pack_dtype", section.get("pack_dtype"), "int32")
    base = section.to_dict()
    overrides = section.get("dynamic")
    rules: Mapping[str, object] = overrides.to_dict() if isinstance(overrides, HFConfig) else {}
    default = scheme(base)

    def scheme_of(source: str) -> Scheme | None:
        if source == "lm_head" and not section.get("lm_head", False):
            return None
        for pattern, values in rules.items():
            if not any(re.match(pattern.removeprefix("-:").removeprefix("+:"), name) for name in spellings(source)):
                continue
            if pattern.startswith("-:"):
                return None
            return scheme(base | values) if is_dict(values) else default
        return default

    return scheme_of


def scheme(values: Mapping[str, object]) -> Scheme:
    """How a matrix is stored with these bits, group and version of the format."""
    bits, group, version = values.get("bits", 4), values.get("group_size", 128), values.get("checkpoint_format", "gptq")
    if bits not in BITS or not isinstance(bits, int):
        raise refused("bits", bits, "2 to 8")
    if not isinstance(group, int) or group == 0:
        raise refused("group_size", group, "a number of columns, or -1 for all")
    size = WHOLE if group < 0 else group
    offset = 1 if version == "gptq" else 0
    is_ordered = bool(values.get("desc_act", False))  # columns belong to any groups
    groups = Axis("columns", size)

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        if "bias" in tensors and bool(tensors["bias"].any()):
            raise ConfigError("it has a bias, which this architecture has not", setting="model")
        zeros_NG = unpack_words(tensors["qzeros"], bits, 1).T[: shape[0]].int()
        zeros_NG = zeros_NG + offset & (1 << bits) - 1
        words_NW, scale_NG = tensors["qweight"].T, tensors["scales"].T
        return weight_of_words(words_NW, shape[1], scale_NG, zeros_NG, bits, dtype, size, tensors.get("g_idx"))

    tensors = {
        "qweight": Stored((words_axis("columns", bits), ROWS), INT32),
        "qzeros": Stored((groups, words_axis("rows", bits)), INT32),
        "scales": Stored((groups, ROWS)),
        "g_idx": Stored((COLUMNS,), INT32, optional=True, cuts=("rows",) if is_ordered else ("rows", "columns")),
        "bias": Stored((ROWS,), optional=True),
    }
    form = Form("packed", 4 if bits <= 4 else 8, size, True, fits_tiles=not values.get("desc_act", False))
    return Scheme(f"int{bits}, groups of {group}", tensors, decode, form)
