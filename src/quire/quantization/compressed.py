"""Checkpoints of the compressed-tensors library: groups of modules, each with its types of weights and activations.

Knows the library's words: formats, strategies, targets. What is stored is one of the schemes that other formats have too, or
integers in words along the inputs.
"""

from typing import Any

import torch

from quire.config.hf_config import HFConfig
from quire.guards import is_sequence
from quire.kernels.packed import Int8Weight
from quire.layers.linear import COLUMNS, ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization import fp4, fp8
from quire.quantization.codes import packed_weight, unpack_words, weight_of_words, words_axis
from quire.quantization.scheme import INT8_FORM, Form, Scheme, SchemeOf, Tensors, matches, refused

BITS = range(2, 9)
INTEGERS = (torch.int8, torch.int32, torch.int64)
FORMATS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip


def parse(section: HFConfig) -> SchemeOf:
    """How each matrix is stored: as the first group says whose targets name it.

    Raises:
        ConfigError: no group, or one that has no scheme.
    """
    sparsity, transforms = section.get("sparsity_config"), section.get("transform_config")
    if isinstance(sparsity, HFConfig) and sparsity.get("format", "dense") != "dense":
        raise refused("sparsity_config.format", sparsity.get("format"), "dense")
    if isinstance(transforms, HFConfig) and transforms.get("config_groups"):
        raise refused("transform_config", sorted(transforms.config_groups), "none: activations are not rotated")
    groups = section.get("config_groups")
    values = groups.to_dict() if isinstance(groups, HFConfig) else {}
    if not values and not section.get("kv_cache_scheme"):
        raise refused("config_groups", sorted(values), "one group or more")
    rules = [_group(HFConfig(group), section) for group in values.values()]
    ignored = [str(name) for name in section.get("ignore") or []]

    def scheme_of(source: str) -> Scheme | None:
        if any(matches(name, source) for name in ignored):
            return None
        # A name says more than a class of modules.
        for is_class in (False, True):
            for targets, scheme in rules:
                if any((name == "Linear") == is_class and (is_class or matches(name, source)) for name in targets):
                    return scheme
        return None

    return scheme_of


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
    if stored_as not in FORMATS:
        raise refused("format", stored_as, ", ".join(FORMATS))
    return [str(name) for name in targets], _scheme(str(stored_as), weights, inputs)


def _scheme(stored_as: str, weights: HFConfig, inputs: Any) -> Scheme:
    kind, bits = weights.get("type"), weights.get("num_bits")
    if stored_as.startswith(("nvfp4", "mxfp4")):
        if (kind, bits) != ("float", 4):
            raise refused("weights", (kind, bits), "type float with num_bits 4")
        return fp4.nvfp4("weight_packed", "weight_global_scale", True) if stored_as[0] == "n" else fp4.mxfp4()
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
    if isinstance(inputs, HFConfig) and (inputs.get("type"), inputs.get("num_bits")) != ("float", 8):
        raise refused("input_activations", (inputs.get("type"), inputs.get("num_bits")), "type float with num_bits 8")
    if strategy == "block":
        sizes = weights.get("block_structure")
        if not is_sequence(sizes) or len(sizes) != 2:
            raise refused("weights.block_structure", sizes, "two numbers")
        return fp8.blocks(int(sizes[0]), int(sizes[1]), "weight_scale")
    if strategy == "group":
        return fp8.blocks(1, int(weights.get("group_size", 128)), "weight_scale")
    if strategy not in ("tensor", "channel"):
        raise refused("weights.strategy", strategy, "tensor, channel, group or block")
    if not isinstance(inputs, HFConfig):
        return fp8.weights_only(fp8.scaled(strategy == "channel", False))
    return fp8.scaled(strategy == "channel", _is_static(inputs))


def _is_static(inputs: HFConfig) -> bool:
    """Whether the checkpoint holds the activations' scale."""
    if inputs.get("dynamic", False):
        return False
    if inputs.get("strategy") != "tensor":
        raise refused("input_activations.strategy", inputs.get("strategy"), "tensor where scales are given")
    return True


def _groups(weights: HFConfig) -> Axis | None:
    """How columns share a scale; None: all rows do too."""
    strategy = weights.get("strategy")
    if strategy == "group":
        return Axis("columns", int(weights.get("group_size", 128)))
    if strategy not in ("channel", "tensor"):
        raise refused("weights.strategy", strategy, "group, channel or tensor")
    return Axis("columns", WHOLE) if strategy == "channel" else None


def _scales(groups: Axis | None) -> Stored:
    return Stored(() if groups is None else (ROWS, groups))


def _int8(weights: HFConfig, inputs: Any) -> Scheme:
    """Integers in a byte each; where weights and activations are symmetric integers without groups, products are in integers
    too. Other activations are not rounded."""
    groups = _groups(weights)
    size, is_symmetric = WHOLE if groups is None else groups.per, bool(weights.get("symmetric", True))
    rounds = isinstance(inputs, HFConfig) and is_symmetric and inputs.get("symmetric", True) and size == WHOLE
    if isinstance(inputs, HFConfig) and (inputs.get("type"), inputs.get("num_bits")) != ("int", 8):
        raise refused("input_activations", (inputs.get("type"), inputs.get("num_bits")), "type int with num_bits 8")
    static = rounds and _is_static(inputs)

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        codes, scale = tensors["weight"].contiguous(), tensors["weight_scale"].float()
        if rounds:
            input_scale = tensors["input_scale"].float().reshape(1) if static else None
            scale_N = scale.reshape(-1).expand(shape[0]).contiguous()
            return Int8Weight(*shape, dtype, codes, scale=scale_N, input_scale=input_scale)
        scale_NG, zero_NG = (
            None
            if values is None
            else values.float().reshape(1 if values.numel() == 1 else shape[0], -1).expand(shape[0], -1)
            for values in (scale, tensors.get("weight_zero_point"))
        )
        assert scale_NG is not None
        zero_NG = None if zero_NG is None else zero_NG + 128
        return packed_weight(codes.view(torch.uint8) ^ 128, scale_NG, zero_NG, 8, dtype, size)

    tensors = {
        "weight": Stored(dtypes=(torch.int8,)),
        "weight_scale": _scales(groups),
        "weight_zero_point": Stored(_scales(groups).axes, INTEGERS, optional=is_symmetric),
        "input_scale": Stored(() if static else None, optional=not static),
        "input_zero_point": Stored(None, INTEGERS, optional=True),
    }
    name = "int8, activations too" if rounds else "int8"
    return Scheme(
        name,
        tensors,
        decode,
        INT8_FORM if rounds else Form("packed", 8, size, not is_symmetric, fits_tiles=is_symmetric),
    )


def _packed(weights: HFConfig, kind: object, bits: object) -> Scheme:
    """Integers in words along the inputs, zeros (if any) along the outputs; both without sign."""
    if kind != "int" or bits not in BITS or not isinstance(bits, int):
        raise refused("weights", (kind, bits), "type int with num_bits 2 to 8")
    groups, symmetric = _groups(weights), bool(weights.get("symmetric", True))
    size, is_ordered = WHOLE if groups is None else groups.per, weights.get("actorder") == "group"
    int32, int64 = (torch.int32,), (torch.int64, torch.int32)

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        scale = tensors["weight_scale"]
        scale_NG = scale.reshape(1 if scale.numel() == 1 else shape[0], -1).expand(shape[0], -1)
        zeros = tensors.get("weight_zero_point")
        zeros_NG = None if zeros is None else unpack_words(zeros, bits, 0)[: shape[0]]
        words_NW, group_K = tensors["weight_packed"], tensors.get("weight_g_idx")
        return weight_of_words(words_NW, shape[1], scale_NG, zeros_NG, bits, dtype, size, group_K)

    tensors = {
        "weight_packed": Stored((ROWS, words_axis("columns", bits)), int32),
        "weight_scale": _scales(groups),
        "weight_shape": Stored(None, int64, optional=True),
        "weight_g_idx": Stored((COLUMNS,), int32, optional=True, cuts=("rows",) if is_ordered else ("rows", "columns")),
    }
    if not symmetric:
        if groups is None:
            raise refused("weights.strategy", "tensor", "group or channel, where symmetric is false")
        tensors["weight_zero_point"] = Stored((words_axis("rows", bits), groups), int32)
    has_zeros = bits <= 4 or not symmetric
    return Scheme(
        f"int{bits}, {weights.get('strategy')}",
        tensors,
        decode,
        Form("packed", 4 if bits <= 4 else 8, size, has_zeros, fits_tiles=bits <= 4 or symmetric),
    )
