"""Checkpoints of AMD's Quark: a type and a way of sharing scales for all matrices, for some by name, and names to leave out.

Activations are rounded where both they and the weights are 8 bits wide and symmetric.
"""

import fnmatch
from typing import Any

import torch

from quire.config.hf_config import HFConfig
from quire.guards import is_sequence
from quire.layers.linear import WHOLE, Decoded
from quire.quantization import awq, fp4, fp8
from quire.quantization.integers import int8
from quire.quantization.scheme import Scheme, SchemeOf, Tensors, chosen, matches, one_of, refused, spellings

TYPES = ("fp8_e4m3", "fp4", "int8", "uint8", "int4", "uint4")


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `quark` stores each matrix.

    Raises:
        ConfigError: a type or a way of sharing scales that has no scheme, or weights that are stored plain.
    """
    export = section.get("export")
    stored_as = export.get("weight_format", "real_quantized") if isinstance(export, HFConfig) else "real_quantized"
    one_of("export.weight_format", stored_as, ("real_quantized",))
    reorders = not isinstance(export, HFConfig) or export.get("pack_method", "reorder") == "reorder"
    by_name = [(name, _scheme(HFConfig(own), reorders)) for name, own in _entries(section, "layer_quant_config")]
    by_type = dict(_entries(section, "layer_type_quant_config"))
    common = by_type.get("Linear") or section.get("global_quant_config")
    default = _scheme(common if isinstance(common, HFConfig) else HFConfig(common or {}), reorders)
    excluded = [str(name) for name in section.get("exclude") or []]

    return chosen(default, lambda source: any(_is_named(name, source) for name in excluded), by_name, _is_named)


def _entries(section: HFConfig, name: str) -> list[tuple[str, dict[str, Any]]]:
    values = section.get(name)
    return [*values.to_dict().items()] if isinstance(values, HFConfig) else []


def _is_named(pattern: str, source: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) or matches(pattern, name) or name.startswith(f"{pattern}.")
        for name in spellings(source)
    )


def _scheme(group: HFConfig, reorders: bool) -> Scheme | None:
    weight, inputs = group.get("weight"), group.get("input_tensors")
    if not isinstance(weight, HFConfig):
        if is_sequence(weight):
            raise refused("weight", "a list of types", "one type")
        return None
    kind, sharing = str(weight.get("dtype")), str(weight.get("qscheme"))
    inputs = inputs if isinstance(inputs, HFConfig) else None
    size = int(weight.get("group_size") or 0)
    if kind == "fp8_e4m3" and sharing in ("per_tensor", "per_channel"):
        return _float8(sharing == "per_channel", inputs)
    if kind == "fp4" and sharing == "per_group" and size == 32:
        return fp4.mxfp4("weight")
    if kind in ("int4", "uint4") and sharing == "per_group":
        return _four_bits(size, kind == "int4", reorders)
    if kind in ("int8", "uint8") and sharing in ("per_tensor", "per_channel", "per_group"):
        return _int8(sharing, size, kind == "int8", inputs)
    raise refused("weight", (kind, sharing, size), f"dtype {', '.join(TYPES)} per_tensor, per_channel or per_group")


def _float8(by_channel: bool, inputs: HFConfig | None) -> Scheme:
    if inputs is None or inputs.get("dtype") != "fp8_e4m3":
        return fp8.weights_only(fp8.scaled(by_channel, False))
    return fp8.scaled(by_channel, not inputs.get("is_dynamic", False))


def _four_bits(group: int, is_signed: bool, reorders: bool) -> Scheme:
    """Words along the outputs, in AWQ's order or one after another; signed codes are two's complements."""
    inner = awq.gemm(group, False, ("weight", "weight_scale", "weight_zero_point"), is_ordered=reorders)
    if not is_signed:
        return inner

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        eights = torch.tensor(-0x77777778, dtype=torch.int32)  # 8 in every four bits
        words = {name: t ^ eights.to(t.device) for name, t in tensors.items() if name != "weight_scale"}
        return inner.decode({**tensors, **words}, shape, dtype)

    return Scheme(f"int4 (Quark), groups of {group}", inner.tensors, decode, inner.form)


def _int8(sharing: str, size: int, is_signed: bool, inputs: HFConfig | None) -> Scheme:
    """A byte a code; of groups all inputs of a column of scales first."""
    by_group = sharing == "per_group"
    rounds = is_signed and not by_group and inputs is not None and _are_rounded(inputs)
    rounding = "no" if not rounds else "dynamic" if inputs and inputs.get("is_dynamic", False) else "static"
    return int8(
        "int8, activations too" if rounds else f"{'int8' if is_signed else 'uint8'} (Quark)",
        rows=WHOLE if sharing == "per_tensor" else 1,
        columns=size if by_group else WHOLE,
        rounding=rounding,
        is_signed=is_signed,
        is_transposed=by_group,
    )


def _are_rounded(inputs: HFConfig) -> bool:
    """Whether activations are rounded to int8 so that products can be in integers."""
    sharing = ("per_tensor", "per_channel", "per_token")
    return inputs.get("dtype") == "int8" and inputs.get("symmetric", True) and inputs.get("qscheme") in sharing
