"""Matrices of 4-bit floats (e2m1): MXFP4 with a power of two every 32 columns, NVFP4 with a float8 scale every 16; MXFP6 (e2m3).

Activations are multiplied as they are: what a checkpoint says of their rounding is passed over.
"""

import torch

from quire.config.hf_config import HFConfig
from quire.kernels.types import FP8, PackedWeight
from quire.layers.linear import ROWS, Axis, Decoded, Stored
from quire.quantization.codes import e8m0_scale, unpack_e2m1, unpack_words
from quire.quantization.scheme import Form, Scheme, SchemeOf, Tensors, chosen, is_within

BYTES = (torch.uint8,)
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
PAIRS = Stored((ROWS, Axis("columns", 2, is_packed=True)), BYTES)


def nvfp4(codes: str, whole_scale: str, divides: bool) -> Scheme:
    """A float8 scale every 16 columns, and one number for the whole matrix.

    Args:
        codes, whole_scale: suffixes in the checkpoint.
        divides: scales are divided by the matrix's number, rather than multiplied.
    """

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        whole = tensors[whole_scale].float().reshape(-1).max()
        scale_NG = tensors["weight_scale"].float()
        return unpack_e2m1(tensors[codes], scale_NG / whole if divides else scale_NG * whole, dtype)

    tensors = {
        codes: PAIRS,
        "weight_scale": Stored((ROWS, Axis("columns", 16)), (FP8,)),
        whole_scale: Stored(()),
        "input_scale": Stored(None, optional=True),
        "input_global_scale": Stored(None, optional=True),
    }
    return Scheme("nvfp4", tensors, decode, Form("packed", 4, 16))


def mxfp4(codes: str = "weight_packed") -> Scheme:
    """A power of two every 32 columns.

    Args:
        codes: their suffix in the checkpoint.
    """

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        return unpack_e2m1(tensors[codes], e8m0_scale(tensors["weight_scale"]), dtype)

    tensors = {codes: PAIRS, "weight_scale": Stored((ROWS, Axis("columns", 32)), E8M0)}
    return Scheme("mxfp4", tensors, decode, Form("packed", 4, 32, has_powers=True))


def mxfp6() -> Scheme:
    """Floats of 6 bits (e2m3), four in three bytes, and a power of two every 32 columns. They are whole eighths up to 7.5: codes
    of 8 bits."""

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        words_NW = tensors["weight_packed"].contiguous().view(torch.int32)
        codes = unpack_words(words_NW, 6, 1).to(torch.int8)
        exponent, mantissa = codes >> 3 & 3, codes & 7
        eighths = torch.where(exponent == 0, mantissa, (mantissa | 8) << (exponent - 1).clamp(min=0))
        data = torch.where(codes & 32 != 0, -eighths, eighths)
        return PackedWeight(*shape, dtype, data, scale=e8m0_scale(tensors["weight_scale"]) / 8)

    tensors = {
        "weight_packed": Stored((ROWS, Axis("columns", 32, 24)), BYTES),
        "weight_scale": Stored((ROWS, Axis("columns", 32)), E8M0),
    }
    return Scheme("mxfp6", tensors, decode, Form("packed", 8, 32, has_powers=True))


def parse_mxfp4(section: HFConfig) -> SchemeOf:
    """How a checkpoint with quant_method `mxfp4` stores each matrix: experts in blocks of 16 bytes, all of a layer's in one
    tensor (gpt-oss); the rest in a plain type."""

    def decode(tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype) -> Decoded:
        return unpack_e2m1(tensors["_blocks"].flatten(-2), e8m0_scale(tensors["_scales"]), dtype)

    tensors = {
        "_blocks": Stored((ROWS, Axis("columns", 32), Axis("none", entries=16)), BYTES),
        "_scales": Stored((ROWS, Axis("columns", 32)), E8M0),
    }
    scheme = Scheme("mxfp4", tensors, decode, Form("packed", 4, 32, has_powers=True))
    plain = [str(name) for name in section.get("modules_to_not_convert") or [] if "*" not in str(name)]

    return chosen(scheme, lambda source: ".experts." not in f"{source}." or is_within(plain, source))
