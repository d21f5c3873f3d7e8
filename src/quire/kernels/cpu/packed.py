"""Products with packed weights and with int8 weights on the native library; argument structures are those of `csrc/packed.h`.

Two implementations of `packed_linear`. The fast one rounds its input to int8, 32 columns (or a part of a group) at a time, by
their largest magnitude: at most 1/254 of it away, half a percent of the product's size where values are like a Gaussian's, and
what llama.cpp's Q8_0 has. The other takes inputs as they are; `--deterministic` chooses it. Both give a row the same bits in
every batch. Weights are the format's own in both, but for tables whose values are no whole multiples of one number (NF4):
the fast one keeps 14 bits of those.

Legend: N outputs, K inputs, G groups of K / G columns.
"""

import dataclasses
import math

import torch

from quire.kernels.cpu.binding import PANEL, Operation, address, cpu_kernel, run, structure
from quire.kernels.cpu.library import library
from quire.kernels.packed import code_bits
from quire.kernels.types import Int8Weight, PackedWeight

NIBBLES, ONE_DIGIT, TWO_DIGITS, BYTES = range(4)
"""How codes become numbers: `PackedKind` in `csrc/packed.h`."""
DIGIT = 128
"""A digit's values, 0 to 127: what the multiplication of unsigned with signed bytes takes on every processor."""
LARGEST_CODE_ZERO = 255
"""Larger zeros that all groups share are multiplied like others, outside of whole numbers."""
MAX_INT8_INPUTS = 1 << 16
"""Sums of so many products of bytes stay within 32 bits."""


_PACK_CODES = Operation("pack_codes", "codes:any packed:any", longs="n k stride lines", ints="kind")
_PackedLinear = structure(
    "_PackedLinear",
    pointers="x codes scale zero perm table digits input_scale bias out",
    longs="n k groups block",
    floats="unit scale_unit",
    ints="kind half_scale half_zero code_zero",
)


class CpuLayout:
    """A weight as the library reads it: the arguments that it is named by, and the tensors that they point to.

    Args:
        codes: uint8 [N, K/2] or int8 [N, K].
        kind: NIBBLES … BYTES.
        block: columns of the input that share a scale.
        scale_NG, zero_NG: as `PackedWeight` has them, the zeros in units of codes.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        n: int,
        k: int,
        kind: int,
        block: int,
        scale_NG: torch.Tensor,
        zero_NG: torch.Tensor | None = None,
    ) -> None:
        lib = library()
        if lib.recorder is not None:
            lib.recorder.refuse("a weight was packed")
        lines, panels = -(-k // block) * block // (4 if kind == BYTES else 8), -(-n // PANEL)
        self.packed, codes = lib.allocate(panels * lines * 64, torch.uint8), codes.contiguous()
        stride = codes.shape[1] * codes.element_size()
        _PACK_CODES(panels, codes=codes, packed=self.packed, n=n, k=k, stride=stride, lines=lines, kind=kind)
        power = _power_of_two(scale_NG)
        scale = _panels(scale_NG / power)
        zero = None if zero_NG is None else _panels(zero_NG)
        self.call = _PackedLinear(
            n=n,
            k=k,
            groups=scale_NG.shape[1],
            block=block,
            unit=power,
            scale_unit=power,
            kind=kind,
            half_scale=scale.dtype is torch.float16,
            half_zero=zero is not None and zero.dtype is torch.float16,
        )
        self.tensors: list[torch.Tensor] = []
        self.keep(codes=self.packed, scale=scale, zero=zero, digits=torch.zeros(2, 16, dtype=torch.uint8))
        self.is_exact_only = False

    def keep(self, **tensors: torch.Tensor | None) -> None:
        """Point arguments to tensors."""
        for name, tensor in tensors.items():
            if tensor is not None:
                self.tensors.append(tensor.contiguous())
                setattr(self.call, name, self.tensors[-1].data_ptr())

    def run(self, operation: str, x_TK: torch.Tensor, bias_N: torch.Tensor | None, out_TN: torch.Tensor) -> None:
        """Multiply.

        Raises:
            ValueError: rows that are not contiguous float32 on the CPU.
        """
        call = _PackedLinear.from_buffer_copy(self.call)
        call.x, call.out = address(x_TK, "x"), address(out_TN, "out")
        call.bias = None if bias_N is None else address(bias_N, "bias")
        run(operation, call, x_TK.shape[0], x_TK, bias_N, out_TN, *self.tensors)


def _panels(values_NG: torch.Tensor) -> torch.Tensor:
    """[N, G] as [ceil(N / 16), G, 16], in float16 if that holds them exactly; missing rows are zero."""
    n, groups = values_NG.shape
    panels = -(-n // PANEL)
    dtype = torch.float16 if torch.equal(values_NG.half().float(), values_NG) else torch.float32
    packed = library().allocate(panels * groups * PANEL, dtype)
    padded = torch.zeros(panels * PANEL, groups)
    padded[:n] = values_NG
    packed.view(panels, groups, PANEL).copy_(padded.view(panels, PANEL, groups).transpose(1, 2))
    return packed


def _power_of_two(scale_NG: torch.Tensor) -> float:
    """What scales are divided by, so that float16 holds as many of them as it can: the largest comes below 2^15."""
    largest = float(scale_NG.abs().max())
    return 2.0 ** (math.frexp(largest)[1] - 15) if 2.0**-100 < largest < 2.0**100 else 1.0


def _digits(table_16: torch.Tensor) -> tuple[int, torch.Tensor, int, float]:
    """(kind, uint8 [2, 16], zero, unit): a table's values are (number - zero) * unit, where a number is its first digit, or
    128 times that and the second. Exact where a power of two from 2^-16 to 2^16 divides all values."""
    values = table_16.double()
    low, spread = float(values.min()), float(values.max() - values.min())
    units = (2.0**exponent for exponent in range(16, -17, -1))
    unit = next((unit for unit in units if torch.equal((values / unit).round() * unit, values)), 0.0)
    if not unit or spread / unit >= DIGIT * DIGIT:
        unit = spread / (DIGIT * DIGIT - 2) or 1.0
    zero = round(-low / unit)
    numbers = (values / unit).round().long() + zero
    if int(numbers.max()) < DIGIT:
        return ONE_DIGIT, torch.stack((numbers, torch.zeros_like(numbers))).to(torch.uint8), zero, unit
    return TWO_DIGITS, torch.stack((numbers // DIGIT, numbers % DIGIT)).to(torch.uint8), zero, unit


def _block(k: int, groups: int) -> int:
    """Columns of the input that share a scale.

    Raises:
        ValueError: groups that are no multiples of 8 columns.
    """
    block = next((block for block in (32, 16, 8) if groups == 1 or k // groups % block == 0), None)
    if block is None:
        raise ValueError(f"groups have {k // groups} columns; the CPU kernels take multiples of 8, or all in one group")
    return block


@cpu_kernel("pack_codes")
def pack_codes(weight: PackedWeight) -> PackedWeight:
    """As `packed.pack_codes`; nothing of the plain layout is kept."""
    codes, scale_NG = weight.plain()
    if codes.is_floating_point():
        raise ValueError(f"codes are {codes.dtype}; the CPU kernels take codes of 4 bits (uint8) and of 8 bits (int8)")
    n, k, zero_NG = weight.out_features, weight.in_features, weight.zero
    kind, digits, code_zero, unit = NIBBLES if code_bits(codes) == 4 else BYTES, None, 0, 1.0
    if weight.table is not None:
        kind, digits, code_zero, unit = _digits(weight.table)
    elif zero_NG is not None and bool((zero_NG == zero_NG[0, 0]).all()):
        common = float(zero_NG[0, 0])
        if common.is_integer() and abs(common) <= LARGEST_CODE_ZERO:
            zero_NG, code_zero = None, int(common)
    layout = CpuLayout(codes, n, k, kind, _block(k, scale_NG.shape[1]), scale_NG, zero_NG)
    layout.call.unit *= unit
    layout.call.code_zero = code_zero
    layout.keep(perm=weight.perm, table=weight.table, digits=digits)
    # A zero is in units of values, the sum that it is taken from in units of digits.
    layout.is_exact_only = weight.table is not None and weight.zero is not None
    return PackedWeight(n, k, weight.dtype, None, layout.packed, weight.bias, scale=None, layout=layout)


def _layout(weight: PackedWeight | Int8Weight, ops: str) -> CpuLayout:
    if not isinstance(weight.layout, CpuLayout):
        raise ValueError(f"this weight was packed by another kernel: choose {ops} together")
    return weight.layout


@cpu_kernel("packed_linear", invariant=False, tolerance=0.01)
def packed_linear(x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor) -> None:
    """As `packed.packed_linear`, with x rounded to int8 in blocks of columns: not for `--deterministic`, though its rows do not
    depend on the batch."""
    layout = _layout(weight, "`pack_codes` and `packed_linear`")
    layout.run("packed_linear_exact" if layout.is_exact_only else "packed_linear", x_TK, weight.bias, out_TN)


@cpu_kernel("packed_linear", below=5)
def packed_linear_exact(x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor) -> None:
    """As `packed.packed_linear`."""
    _layout(weight, "`pack_codes` and `packed_linear`").run("packed_linear_exact", x_TK, weight.bias, out_TN)


@cpu_kernel("pack_int8")
def pack_int8(weight: Int8Weight) -> Int8Weight:
    """As `packed.pack_int8`; the plain codes are not kept.

    Raises:
        ValueError: more inputs than sums in 32 bits allow.
    """
    n, k = weight.out_features, weight.in_features
    if weight.data is None:
        raise ValueError("this weight was packed by another kernel: choose `pack_int8` and `int8_linear` together")
    if k > MAX_INT8_INPUTS:
        raise ValueError(f"an int8 weight of {k} inputs; the CPU kernels take at most {MAX_INT8_INPUTS}")
    layout = CpuLayout(weight.data, n, k, BYTES, -(-k // 4) * 4, weight.scale.float().reshape(n, 1))
    layout.keep(input_scale=weight.input_scale)
    return dataclasses.replace(weight, data=None, packed=layout.packed, layout=layout)


@cpu_kernel("int8_linear")
def int8_linear(x_TK: torch.Tensor, weight: Int8Weight, out_TN: torch.Tensor) -> None:
    """As `packed.int8_linear`."""
    _layout(weight, "`pack_int8` and `int8_linear`").run("packed_linear", x_TK, weight.bias, out_TN)
