"""Checkpoints of AutoRound: one of other formats' packings for all matrices, and other bits or groups for some of them."""

import re
from collections.abc import Mapping

from quire.config.hf_config import HFConfig
from quire.guards import is_dict, is_sequence
from quire.quantization import awq, fp4, fp8, gptq
from quire.quantization.scheme import Scheme, SchemeOf, matches, refused, spellings

PACKINGS = ("auto_round", "auto_gptq", "auto_awq", "gptqmodel", "llm_compressor", "fp8_static")
PLAIN_BITS = 16


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `auto-round` stores each matrix.

    Raises:
        ConfigError: a packing, bits or a type that has no scheme, or rotated activations.
    """
    base = section.to_dict()
    for name in ("rotation_config", "hadamard_config"):
        if base.get(name):
            raise refused(name, base[name], "none: activations are not rotated")
    packing = str(base.get("packing_format", "auto_round:auto_gptq")).removeprefix("auto_round:")
    if packing not in PACKINGS:
        raise refused(
            "packing_format", base.get("packing_format"), ", ".join(f"auto_round:{name}" for name in PACKINGS)
        )
    overrides = base.get("extra_config")
    rules = {str(name): values for name, values in overrides.items()} if is_dict(overrides) else {}
    blocks, plain = base.get("block_name_to_quantize"), base.get("modules_to_not_convert")
    blocks = blocks.split(",") if isinstance(blocks, str) else blocks if is_sequence(blocks) else []
    prefixes = [str(block[0] if is_sequence(block) else block).strip() for block in blocks]
    excluded = [str(name) for name in plain] if is_sequence(plain) else []

    def values_of(source: str) -> Mapping[str, object] | None:
        """What an override says, by its name in full or as a regular expression."""
        exact = [values for name, values in rules.items() if matches(name, source)]
        found = exact or [
            values for name, values in rules.items() if any(_is_found(name, each) for each in spellings(source))
        ]
        return found[0] if found and is_dict(found[0]) else None

    def scheme_of(source: str) -> Scheme | None:
        own = values_of(source)
        is_inside = not prefixes or any(
            f"{each}.".startswith(f"{name}.") for each in spellings(source) for name in prefixes
        )
        if own is None and (source == "lm_head" or not is_inside or any(_is_found(name, source) for name in excluded)):
            return None
        values = base | {name: value for name, value in (own or {}).items() if value is not None}
        return _scheme(packing, values)

    if (default := base.get("bits", 4)) != PLAIN_BITS:
        _scheme(packing, base | {"bits": default})
    return scheme_of


def _is_found(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _scheme(packing: str, values: Mapping[str, object]) -> Scheme | None:
    bits, group, kind = values.get("bits", 4), values.get("group_size", 128), str(values.get("data_type", "int"))
    if isinstance(bits, int) and bits >= PLAIN_BITS:
        return None
    if kind.startswith("nv_fp") and bits == 4:
        return fp4.nvfp4("weight_packed", "weight_global_scale", True)
    if kind.startswith("mx_fp") and bits in (4, 8):
        return fp4.mxfp4() if bits == 4 else fp8.mxfp8("weight_scale")
    if kind.startswith("fp8") or packing == "fp8_static":
        return fp8.scaled(group == -1, packing == "fp8_static")
    if not kind.startswith("int") or packing == "llm_compressor":
        raise refused(
            "data_type", f"{kind} with {bits} bits in {packing}", "int, fp8, nv_fp with 4 bits, mx_fp with 4 or 8"
        )
    if packing == "auto_awq":
        if bits != 4 or not isinstance(group, int):
            raise refused("bits", bits, "4, in packing_format auto_awq")
        return awq.gemm(group, True)
    version = "gptq" if packing == "auto_gptq" else "gptq_v2"
    return gptq.scheme({"bits": bits, "group_size": group, "checkpoint_format": version})
