"""The pooler's numbers as bytes: of which type (`embed_dtype`), in which order (`endianness`).

NumPy has no fractions of eight bits, nor bfloat16; their bits are computed here. Those of eight bits are defined in Micikevicius
and others, "FP8 Formats for Deep Learning" (2022): e4m3 has no infinity, and ends at 448.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
Bits = np.ndarray[Any, np.dtype[Any]]


def to_bytes(numbers: Bits, dtype: EmbedDtype, endianness: Endianness) -> bytes:
    """Float32 numbers, rounded to the nearest of a type (of two, the even one), row by row."""
    bits, order = _FORMATS[dtype](numbers), sys.byteorder if endianness == "native" else endianness
    return bits.astype(bits.dtype.newbyteorder(">" if order == "big" else "<")).tobytes()


def _bfloat16(numbers: Bits) -> Bits:
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(numbers), (bits >> 16) | 0x40, rounded).astype(np.uint16)


@functools.cache
def _magnitudes(exponent_bits: int, last: int) -> Bits:
    """What the codes 0 to `last` of a format of eight bits mean."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(last + 1)
    exponent, fraction = codes >> mantissa_bits, (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    return np.where(
        exponent == 0, np.exp2(1.0 - bias) * fraction, np.exp2(exponent.astype(float) - bias) * (1 + fraction)
    )


def _float8(numbers: Bits, exponent_bits: int, last: int, over: int, nan: int) -> Bits:
    """Codes of a format of eight bits.

    Args:
        last: the code of the largest number.
        over: the code of what is larger still.
    """
    magnitudes, size = _magnitudes(exponent_bits, last), np.abs(numbers.astype(np.float64))
    above = np.clip(np.searchsorted(magnitudes, size), 1, last)
    low, high = size - magnitudes[above - 1], magnitudes[above] - size
    codes = np.where((low > high) | ((low == high) & (above % 2 == 0)), above, above - 1)
    middle = magnitudes[last] + (magnitudes[last] - magnitudes[last - 1]) / 2
    codes = np.where(size >= middle, over, codes)
    codes = np.where(np.isnan(size), nan, codes)
    return (codes | (np.signbit(numbers).astype(np.int64) << 7)).astype(np.uint8)


_FORMATS: dict[EmbedDtype, Callable[[Bits], Bits]] = {
    "float32": lambda numbers: numbers.astype(np.float32),
    "float16": lambda numbers: numbers.astype(np.float16),
    "bfloat16": _bfloat16,
    "fp8_e4m3": functools.partial(_float8, exponent_bits=4, last=0x7E, over=0x7E, nan=0x7F),
    "fp8_e5m2": functools.partial(_float8, exponent_bits=5, last=0x7B, over=0x7C, nan=0x7F),
}
