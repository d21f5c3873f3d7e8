"""Checkpoints of the compressed-tensors library: groups of modules, each with its types of weights and activations.

Knows the library's words: formats, strategies, targets. What is stored is one of the schemes that other formats have too, or
integers in words along the inputs.
"""

import dataclasses
from typing import Any

import torch

from quire.config.hf_config import HFConfig
from quire.guards import is_sequence
from quire.layers.linear import WHOLE, Stored
from quire.quantization import fp4, fp8
from quire.quantization.integers import int8, words
from quire.quantization.scheme import Scheme, SchemeOf, chosen, matches, one_of, refused

BITS = range(2, 9)
FORMATS = (
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mxfp6-pack-quantized",
)


def parse(section: HFConfig) -> SchemeOf:
    """How each matrix is stored: as the first group says whose targets name it.

    Raises:
        ConfigError: no group, or one that has no scheme.
    """
    sparsity, transforms = section.get("sparsity_config"), section.get("transform_config")
    if isinstance(sparsity, HFConfig):
        one_of("sparsity_config.format", sparsity.get("format", "dense"), ("dense",))
    if isinstance(transforms, HFConfig) and transforms.get("config_groups"):
        raise refused("transform_config", sorted(transforms.config_groups), "none: activations are not rotated")
    groups = section.get("config_groups")
    values = groups.to_dict() if isinstance(groups, HFConfig) else {}
    if not values and not section.get("kv_cache_scheme"):
        raise refused("config_groups", sorted(values), "one group or more")
    rules = [_group(HFConfig(group), section) for group in values.values()]
    ignored = [str(name) for name in section.get("ignore") or []]

    # A name says more than a class of modules.
    targets = sorted(
        ((name, scheme) for names, scheme in rules for name in names), key=lambda rule: rule[0] == "Linear"
    )
    return chosen(
        None,
        lambda source: any(matches(name, source) for name in ignored),
        targets,
        lambda name, source: name == "Linear" or matches(name, source),
    )


def _group(group: HFConfig, section: HFConfig) -> tuple[list[str], Scheme | None]:
    targets = group.get("targets")
    if not is_sequence(targets) or not targets:
        raise refused("targets", targets, "a list of module names or Linear")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, HFConfig):
        return [str(name) for name in targets], None
    stored_as = group.get("format") or section.get("format")
    if stored_as == "mixed-precision":
        raise refused("format", stored_as, "one for each of config_groups")
    return [str(name) for name in targets], _scheme(one_of("format", stored_as, FORMATS), weights, inputs)


def _scheme(stored_as: str, weights: HFConfig, inputs: Any) -> Scheme:
    kind, bits = weights.get("type"), weights.get("num_bits")
    if stored_as.startswith(("nvfp4", "mxfp4")):
        if (kind, bits) != ("float", 4):
            raise refused("weights", (kind, bits), "type float with num_bits 4")
        return fp4.nvfp4("weight_packed", "weight_global_scale", True) if stored_as[0] == "n" else fp4.mxfp4()
    if stored_as == "mxfp6-pack-quantized":
        return fp4.mxfp6()
    if stored_as == "pack-quantized":
        return _packed(weights, kind, bits)
    if stored_as == "mxfp8-quantized":
        return fp8.mxfp8("weight_scale")
    if (kind, bits) == ("float", 8):
        return _float8(weights, inputs)
    if kind == "int" and isinstance(bits, int) and bits <= 8:
        return _int8(weights, inputs)
    raise refused("weights", (kind, bits), "type float with num_bits 8, type int with num_bits of at most 8")


def _float8(weights: HFConfig, inputs: Any) -> Scheme:
    strategy = weights.get("strategy")
    if strategy == "block":
        return fp8.blocks(*_block(weights), "weight_scale")
    if strategy == "group":
        return fp8.blocks(1, int(weights.get("group_size", 128)), "weight_scale")
    if strategy not in ("tensor", "channel"):
        raise refused("weights.strategy", strategy, "tensor, channel, group or block")
    if not _rounds_to(inputs, "float"):
        return fp8.weights_only(fp8.scaled(strategy == "channel", False))
    return fp8.scaled(strategy == "channel", _is_static(inputs))


def _rounds_to(inputs: Any, kind: str) -> bool:
    """Whether activations are rounded to numbers of 8 bits of this kind; by others they are multiplied as they are."""
    return isinstance(inputs, HFConfig) and (inputs.get("type"), inputs.get("num_bits")) == (kind, 8)


def _is_static(inputs: HFConfig) -> bool:
    """Whether the checkpoint holds the activations' scale."""
    if inputs.get("dynamic", False):
        return False
    if inputs.get("strategy") != "tensor":
        raise refused("input_activations.strategy", inputs.get("strategy"), "tensor where scales are given")
    return True


def _block(weights: HFConfig) -> tuple[int, int]:
    sizes = weights.get("block_structure")
    if not is_sequence(sizes) or len(sizes) != 2:
        raise refused("weights.block_structure", sizes, "two numbers")
    return int(sizes[0]), int(sizes[1])


def _shared(weights: HFConfig) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    strategy = weights.get("strategy")
    if strategy == "group":
        return 1, int(weights.get("group_size", 128))
    if strategy == "block":
        return _block(weights)
    if strategy not in ("channel", "tensor"):
        raise refused("weights.strategy", strategy, "group, channel, tensor or block")
    return 1 if strategy == "channel" else WHOLE, WHOLE


def _int8(weights: HFConfig, inputs: Any) -> Scheme:
    """Integers in a byte each; where weights and activations are symmetric integers without groups, products are in integers
    too. Other activations are not rounded."""
    (rows, columns), is_symmetric = _shared(weights), bool(weights.get("symmetric", True))
    rounds = _rounds_to(inputs, "int") and is_symmetric and inputs.get("symmetric", True) and columns == WHOLE
    return int8(
        "int8, activations too" if rounds else "int8",
        rows=rows,
        columns=columns,
        rounding="no" if not rounds else "static" if _is_static(inputs) else "dynamic",
        is_symmetric=is_symmetric,
    )


def _packed(weights: HFConfig, kind: object, bits: object) -> Scheme:
    """Integers in words along the inputs, without sign; zeros (if any) so along the outputs, or of tensors and blocks signed."""
    if kind != "int" or bits not in BITS or not isinstance(bits, int):
        raise refused("weights", (kind, bits), "type int with num_bits 2 to 8")
    (rows, columns), symmetric = _shared(weights), bool(weights.get("symmetric", True))
    has_words = weights.get("strategy") in ("group", "channel")
    scheme = words(
        f"int{bits}, {weights.get('strategy')}",
        ("weight_packed", "weight_scale", "weight_zero_point"),
        bits,
        columns,
        rows=rows,
        zeros="no" if symmetric else "words" if has_words else "numbers",
        group_index="weight_g_idx",
        is_ordered=weights.get("actorder") == "group",
        fits_tiles=bits <= 4 or symmetric,
    )
    shape = Stored(None, (torch.int64, torch.int32), optional=True)
    return dataclasses.replace(scheme, tensors={**scheme.tensors, "weight_shape": shape})
