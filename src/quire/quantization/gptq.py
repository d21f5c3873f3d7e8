"""GPTQ checkpoints (AutoGPTQ, GPTQModel): integer codes in int32 words along the inputs, scales and zeros a group of them.

`g_idx` says to which group a column belongs: with act order, columns of a group are not adjacent. Version 1 stores a zero as
one less than it is.
"""

import dataclasses
import re
from collections.abc import Mapping

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.layers.linear import ROWS, WHOLE, Decoded, Stored
from quire.quantization.integers import words
from quire.quantization.scheme import Scheme, SchemeOf, Tensors, one_of, refused, spellings

BITS = range(2, 9)


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `gptq` stores each matrix.

    Raises:
        ConfigError: other bits, or a packing that is a kernel's own.
    """
    stored_as = section.get("checkpoint_format", "gptq")
    if stored_as not in ("gptq", "gptq_v2") or section.get("is_marlin_format"):
        raise refused("checkpoint_format", "marlin" if stored_as == "gptq" else stored_as, "gptq, gptq_v2")
    one_of("pack_dtype", section.get("pack_dtype", "int32"), ("int32",))
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
    is_ordered = bool(values.get("desc_act", False))  # columns belong to any groups
    codes = words(
        f"int{bits}, groups of {group}",
        ("qweight", "scales", "qzeros"),
        bits,
        WHOLE if group < 0 else group,
        zero_offset=1 if version == "gptq" else 0,
        group_index="g_idx",
        is_ordered=is_ordered,
        is_transposed=True,
        fits_tiles=not is_ordered,
    )

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        if "bias" in tensors and bool(tensors["bias"].any()):
            raise ConfigError("it has a bias, which this architecture has not", setting="model")
        return codes.decode(tensors, shape, dtype)

    tensors = {**codes.tensors, "bias": Stored((ROWS,), optional=True)}
    return dataclasses.replace(codes, tensors=tensors, decode=decode)
