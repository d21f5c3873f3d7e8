"""Checkpoints of the torchao library in its safetensors layout (version 2 of its configurations).

A matrix's tensors are called `_weight_qdata`, `_weight_scale` and `_weight_zero_point`. Knows the library's configurations by
their names; activations are rounded only where weights are 8 bits wide and the configuration says so.
"""

import torch

from quire.config.hf_config import HFConfig
from quire.guards import is_dict, is_sequence
from quire.kernels.packed import unpack_nibbles
from quire.layers.linear import ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization import fp8
from quire.quantization.codes import affine_weight, check_groups
from quire.quantization.integers import int8
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, chosen, is_within, matches, one_of, refused

CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
"""Configurations that hold others, by modules' names."""
SUPPORTED = (
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8WeightOnlyConfig",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
)


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `torchao` stores each matrix.

    Raises:
        ConfigError: another configuration, version or packing.
    """
    types = section.get("quant_type")
    default = types.get("default") if isinstance(types, HFConfig) else types
    if not isinstance(default, HFConfig):
        raise refused("quant_type", default, "an object with `default`, as Transformers writes it")
    plain = [str(name) for name in section.get("modules_to_not_convert") or []]
    by_name: dict[str, Scheme | None] = {}
    if default.get("_type") in BY_NAME:
        facts = default.get("_data") or HFConfig({})
        given = facts.get("fqn_to_config") or facts.get("module_fqn_to_config") or HFConfig({})
        by_name = {name: _scheme(HFConfig(own)) if is_dict(own) else None for name, own in given.to_dict().items()}
        scheme = by_name.pop("_default", None)
    else:
        scheme = _scheme(default)

    # A name in full says more than a regular expression.
    rules = sorted(by_name.items(), key=lambda rule: (rule[0].startswith("re:"), rule[0]))
    return chosen(
        scheme,
        lambda source: is_within(plain, source),
        rules,
        lambda name, source: matches(name.removesuffix(".weight"), source),
    )


def _scheme(config: HFConfig) -> Scheme:
    kind, facts = one_of("quant_type", str(config.get("_type")), SUPPORTED), config.get("_data") or HFConfig({})
    one_of("quant_type._version", config.get("_version", 1), (2,))
    packings = ("int4_packing_format", "intx_packing_format", "packing_format")
    packing = next((facts.get(name) for name in packings if name in facts), None)
    packing = packing.get("_data") if isinstance(packing, HFConfig) else packing
    if str(packing).upper() not in ("NONE", "PLAIN", "UNPACKED_TO_INT8"):
        raise refused("packing_format", packing, "plain, unpacked_to_int8")
    if kind == "Int4WeightOnlyConfig":
        return _int4(int(facts.get("group_size", 128)))
    rows, columns = _granularity(facts)
    if kind.startswith("Float8"):
        if columns != WHOLE:
            raise refused("granularity", "PerGroup", "PerRow, PerTensor")
        scheme = fp8.scaled(rows, False, CODES, SCALE)
        return fp8.weights_only(scheme) if kind == "Float8WeightOnlyConfig" else scheme
    rounds = kind == "Int8DynamicActivationInt8WeightConfig"
    return int8(
        "int8, activations too (torchao)" if rounds else "int8 (torchao)",
        (CODES, SCALE, ZERO),
        rows=1 if rows else WHOLE,
        columns=columns,
        rounding="dynamic" if rounds else "no",
    )


def _granularity(facts: HFConfig) -> tuple[bool, int]:
    """(whether each row has its own scale, columns that share one)."""
    given = facts.get("weight_granularity") or facts.get("granularity")
    given = HFConfig(given[-1]) if is_sequence(given) else given
    kind = str(given.get("_type")) if isinstance(given, HFConfig) else "PerRow"
    data = given.get("_data") if isinstance(given, HFConfig) else None
    if kind in ("PerRow", "PerAxis"):
        group = facts.get("group_size")
        return True, int(group) if group else WHOLE
    if kind == "PerGroup" and isinstance(data, HFConfig):
        return True, int(data.group_size)
    if kind == "PerTensor":
        return False, WHOLE
    raise refused("granularity", kind, "PerRow, PerAxis, PerGroup, PerTensor")


def _int4(group: int) -> Scheme:
    """Signed codes, two a byte, worth code * scale + zero; scales and zeros lie group by group."""

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        codes_NK = unpack_nibbles(tensors[CODES].view(torch.uint8)) ^ 8
        scale_NG, zero_NG = tensors[SCALE].float().T, tensors[ZERO].float().T
        check_groups(shape[1], scale_NG.shape[1])
        return affine_weight(codes_NK, scale_NG, 8 * scale_NG - zero_NG, 4, dtype)

    by_group = (Axis("columns", group), ROWS)
    tensors = {
        CODES: Stored((ROWS, Axis("columns", 2, is_packed=True)), (torch.int8, torch.uint8)),
        SCALE: Stored(by_group),
        ZERO: Stored(by_group),
    }
    return Scheme(
        f"int4 (torchao), groups of {group}", tensors, decode, Form("packed", 4, group, True, fits_tiles=False)
    )
