"""HQQ checkpoints as Transformers writes them: codes in rows of a group each, a half or a quarter of all rows in the same bits.

So no matrix is read in parts. Metadata are stored beside the codes, and in config.json for all matrices or by their place in a
layer (`self_attn.q_proj`). Scales and zeros are floats whatever that says of them: the library has stopped rounding them, and
never wrote rounded ones into safetensors.
"""

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.layers.linear import WHOLE, Decoded, Stored
from quire.quantization.codes import packed_weight
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, is_within, refused

CODE_TYPES = (torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32)
"""Bytes, or words for 3 bits; or either seen as floats (`view_as_float`)."""
FACTS = (
    "nbits",
    "group_size",
    "shape",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)
FACT_TYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.bool)
BITS = {8: 8, 6: 8, 5: 8, 4: 4, 3: 3, 2: 2, 1.58: 2, 1: 1}
"""By a matrix's bits, those that a code takes."""


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `hqq` stores each matrix.

    Raises:
        ConfigError: other bits.
    """
    given = section.get("quant_config")
    if not isinstance(given, HFConfig):
        raise refused("quant_config", given, "an object with weight_quant_params, for all matrices or by their tag")
    skipped = [str(name) for name in section.get("skip_modules") or ["lm_head"]]
    values = given.to_dict()
    is_common = "weight_quant_params" in values
    schemes = {tag: _scheme(HFConfig(facts)) for tag, facts in ({"": values} if is_common else values).items() if facts}

    def scheme_of(source: str) -> Scheme | None:
        if source == "lm_head" or is_within(skipped, source):
            return None
        tag = ".".join(part for part in source.split(".") if part not in ("model", "layers") and not part.isnumeric())
        return schemes.get("" if is_common else tag)

    return scheme_of


def _scheme(facts: HFConfig) -> Scheme:
    weights = facts.get("weight_quant_params")
    if not isinstance(weights, HFConfig):
        raise refused("quant_config", sorted(facts.to_dict()), "weight_quant_params")
    bits, axis = weights.get("nbits", 4), weights.get("axis", 1)
    group = weights.group_size if "group_size" in weights else 64
    if not isinstance(bits, int | float) or bits not in BITS:
        raise refused("nbits", bits, ", ".join(map(str, BITS)))
    stored_bits = BITS[bits]

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        count, (rows, columns) = shape[0] * shape[1], shape
        width = group or columns
        stored_rows, stored_columns = (rows * columns // width, width) if axis == 1 else (width, count // width)
        codes, scale, zero = tensors["W_q"], tensors["scale"].float(), tensors["zero"].float()
        codes = unpack(codes.view(torch.int32 if bits == 3 else torch.uint8), stored_bits)[:stored_rows]
        if codes.shape != (stored_rows, stored_columns) or scale.numel() != count // width:
            raise ConfigError(
                f"its codes are {list(codes.shape)} for {rows} by {columns} values in groups of {width}",
                setting="model",
            )
        if axis == 1 and columns % width == 0:
            scale_NG, zero_NG = (values.reshape(rows, columns // width) for values in (scale, zero))
            return packed_weight(codes.reshape(shape), scale_NG, zero_NG, stored_bits, dtype)
        along = (-1, 1) if axis == 1 else (1, -1)
        return ((codes.float() - zero.reshape(along)) * scale.reshape(along)).reshape(shape).to(dtype)

    tensors = {"W_q": Stored(None, CODE_TYPES, cuts=()), "scale": Stored(None), "zero": Stored(None)}
    tensors |= {name: Stored(None, FACT_TYPES, optional=True) for name in FACTS}
    form = Form("packed", 4 if stored_bits <= 4 else 8, group or WHOLE, True, False) if axis == 1 else Form("dense")
    return Scheme(f"int{bits} (HQQ), groups of {group or 'all columns'}", tensors, decode, form)


def unpack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packed rows to codes: the highest bits of all rows, then the next ones; of words the highest 30 bits but two."""
    count = 10 if bits == 3 else 8 // bits
    shifts = range(bits * (count - 1), -1, -bits)
    return torch.cat([(codes >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])
