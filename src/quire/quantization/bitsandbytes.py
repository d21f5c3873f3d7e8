"""Checkpoints of the bitsandbytes library: nf4 and fp4 codes of a matrix laid end to end, or int8 with a scale a row.

Scales of 4-bit blocks may be rounded to 8 bits themselves ("double quantization"), by a table and scales of their own.
"""

import json

import torch

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.packed import pack_nibbles, unpack_nibbles
from quire.kernels.types import PackedWeight
from quire.layers.linear import ROWS, WHOLE, Axis, Decoded, Stored
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, all_but, one_of, refused

BLOCK, NESTED_BLOCK = 64, 256
"""Values that share a scale, and scales that share one: what the library stores in models."""
BYTES = (torch.uint8,)
STORAGES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""What bytes may be stored as: types that trainers can split over devices."""


def parse(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `bitsandbytes` stores each matrix.

    Raises:
        ConfigError: neither 4 nor 8 bits.
    """
    if section.get("load_in_4bit") or section.get("_load_in_4bit"):
        kind = one_of("bnb_4bit_quant_type", str(section.get("bnb_4bit_quant_type", "fp4")), ("nf4", "fp4"))
        storage = one_of("bnb_4bit_quant_storage", section.get("bnb_4bit_quant_storage", "uint8"), STORAGES)
        scheme = _four_bits(kind, STORAGES[storage], bool(section.get("bnb_4bit_use_double_quant", False)))
    elif section.get("load_in_8bit") or section.get("_load_in_8bit"):
        scheme = _eight_bits()
    else:
        raise refused("load_in_4bit and load_in_8bit", False, "one of them")
    return all_but(section.get("llm_int8_skip_modules"), scheme)


def _eight_bits() -> Scheme:
    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        scale_N1 = tensors["SCB"].float().reshape(-1, 1) / 127
        return PackedWeight(*shape, dtype, tensors["weight"].contiguous(), scale=scale_N1)

    tensors = {
        "weight": Stored(dtypes=(torch.int8,)),
        "SCB": Stored((ROWS,)),
        "weight_format": Stored(None, BYTES, optional=True),
    }
    return Scheme("int8 (bitsandbytes)", tensors, decode, Form("packed", 8, WHOLE))


def _four_bits(kind: str, storage: torch.dtype, is_nested: bool) -> Scheme:
    state = f"weight.quant_state.bitsandbytes__{kind}"

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        facts = _read_state(tensors[state])
        if facts.get("blocksize") != BLOCK or (is_nested and facts.get("nested_blocksize") != NESTED_BLOCK):
            sizes = f"{facts.get('blocksize')} and {facts.get('nested_blocksize')}"
            raise refused("blocksize and nested_blocksize", sizes, f"{BLOCK} and {NESTED_BLOCK}")
        scales = tensors["weight.absmax"]
        if is_nested:
            coarse = tensors["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: scales.shape[0]]
            offset = facts.get("nested_offset")
            if not isinstance(offset, float | int):
                raise ConfigError(f"its quant_state has nested_offset={offset!r}, not a number", setting="model")
            scales = tensors["weight.nested_quant_map"][scales.long()] * coarse + offset
        # The earlier value is in the high half of a byte.
        codes = (
            unpack_nibbles(tensors["weight"].reshape(-1).view(torch.uint8)).unflatten(0, (-1, 2)).flip(1).reshape(shape)
        )
        table = tensors["weight.quant_map"].float()
        if shape[1] % BLOCK:  # blocks go over the ends of rows
            return (
                (table[codes.long()].flatten() * scales.repeat_interleave(BLOCK)[: codes.numel()]).view(shape).to(dtype)
            )
        scale_NG = scales.float().reshape(shape[0], -1)
        return PackedWeight(*shape, dtype, pack_nibbles(codes), scale=scale_NG, table=table)

    tensors = {
        "weight": Stored((Axis("values", 2 * storage.itemsize),), (storage,)),
        "weight.absmax": Stored((Axis("values", BLOCK),), BYTES if is_nested else None),
        "weight.quant_map": Stored(None),
        state: Stored(None, BYTES),
    }
    if is_nested:
        tensors["weight.nested_absmax"] = Stored((Axis("values", BLOCK * NESTED_BLOCK),))
        tensors["weight.nested_quant_map"] = Stored(None)
    return Scheme(f"{kind} (bitsandbytes)", tensors, decode, Form("packed", 4, BLOCK))


def _read_state(data: torch.Tensor) -> dict[str, object]:
    try:
        facts = json.loads(bytes(data.cpu().tolist()))
    except ValueError as error:
        raise ConfigError(f"its quant_state is no JSON ({error})", setting="model") from error
    if not is_dict(facts):
        raise ConfigError("its quant_state is no JSON object", setting="model")
    return facts
