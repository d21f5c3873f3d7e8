"""Operations on matrices whose weights are small codes with a scale a group of columns, and on int8 matrices; what they take.

A packed weight's value is `(value of its code - zero) * scale`, where scale and zero belong to a row and a group of adjacent
columns. Nearly every weight-only format can be written so; which checkpoint becomes what is `quantization/`'s business.
Activations are not rounded, except by `int8_linear` and by kernels that say so. Products are summed in float32 (or int32).

Legend: T rows (tokens), N outputs, K inputs, G groups of K / G adjacent columns.
"""

import dataclasses

import torch

from quire.kernels import ops
from quire.kernels.ops import LinearWeight

INT8_MAX = 127.0
INT8_MIN_SCALE = 1e-12
"""Scales are at least this, so that rows of zeros stay zeros."""

OPERATIONS = (
    "pack_codes", "pack_expert_codes", "packed_linear", "packed_linear_add", "packed_norm_linear_gated",
    "pack_int8", "int8_linear",
)  # fmt: skip


@dataclasses.dataclass(kw_only=True)
class PackedWeight(LinearWeight):
    """A weight-only format's weight. `data` holds the codes, `dtype` is the type of the model.

    Codes of 4 bits: uint8 [N, K/2], the low half of a byte is the even column; a code's value is itself (0 to 15), or
    `table[code]`. Codes of 8 bits: int8 [N, K], or float8 (e4m3) where a device has kernels for that (GPUs); a code's value is
    itself. A kernel that packs a weight into its own layout may leave None in place of every tensor but the bias.

    Attributes:
        scale: float32 [N, G].
        zero: float32 [N, G], in units of a code's value; None: 0 everywhere.
        table: float32 [16], only with 4 bits.
        perm: int32 [K]: column k of the codes multiplies x[perm[k]]; None: they are in order.
        layout: what the kernel that packed it knows of its own layout.
    """

    scale: torch.Tensor | None
    zero: torch.Tensor | None = None
    table: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    layout: object = None

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scale).

        Raises:
            ValueError: a kernel has packed them and dropped these.
        """
        if self.data is None or self.scale is None:
            raise ValueError(
                "this weight was packed by another kernel: choose `pack_codes` and `packed_linear` together"
            )
        return self.data, self.scale


@dataclasses.dataclass(kw_only=True)
class ExpertCodes(PackedWeight):
    """One of the two matrices of a mixture's experts, of all of them, in the layout of the kernel that packed it. Rows, columns
    and type are one expert's.

    Attributes:
        count: experts.
    """

    count: int

    def shape_only(self) -> torch.Tensor:
        """[count, rows, columns] without values."""
        return torch.empty(self.count, self.out_features, self.in_features, dtype=self.dtype, device="meta")


@dataclasses.dataclass(kw_only=True)
class Int8Weight(LinearWeight):
    """A weight whose products take inputs in int8 too. `data` is int8 [N, K] until a kernel packs it, `dtype` the model's.

    Attributes:
        scale: float32 [N]; a weight's value is its code times it.
        input_scale: float32 [1] that rows of the input are divided by; None: each by its largest magnitude / 127.
        layout: what the kernel that packed it knows of its own layout.
    """

    scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    layout: object = None


def code_bits(codes: torch.Tensor) -> int:
    """4 or 8, by the type of a weight's codes."""
    return 4 if codes.dtype == torch.uint8 else 8


def unpack_nibbles(packed_NB: torch.Tensor) -> torch.Tensor:
    """uint8 [..., B] to uint8 [..., 2B]: the low half of each byte, then the high one."""
    return torch.stack((packed_NB & 15, packed_NB >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes_NK: torch.Tensor) -> torch.Tensor:
    """Codes of 0 to 15, [..., K], to uint8 [..., K/2]."""
    codes = codes_NK.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def dequantize(weight: PackedWeight) -> torch.Tensor:
    """The weight's values, float32 [N, K], its columns in the input's order. Needs the plain layout."""
    codes, scale_NG = weight.plain()
    if code_bits(codes) == 4:
        codes = unpack_nibbles(codes)
    values_NK = codes.float() if weight.table is None else weight.table[codes.long()]
    values_NGC = values_NK.unflatten(1, (scale_NG.shape[1], -1))
    if weight.zero is not None:
        values_NGC = values_NGC - weight.zero[:, :, None]
    values_NK = (values_NGC * scale_NG[:, :, None]).flatten(1)
    if weight.perm is None:
        return values_NK
    ordered_NK = torch.empty_like(values_NK)
    ordered_NK[:, weight.perm.long()] = values_NK
    return ordered_NK


def pack_codes(weight: PackedWeight) -> PackedWeight:
    """Prepare a weight for `packed_linear`; its plain tensors may be taken over or dropped."""
    return ops.chosen("pack_codes")(weight)


def pack_expert_codes(experts: list[PackedWeight], *, is_gated: bool) -> ExpertCodes | None:
    """One weight of all experts', for `moe_experts`; None where there is no kernel for such codes, or they are not alike.

    Args:
        experts: is emptied one by one, so that no more than one matrix is in memory twice; left as it is where None is returned.
        is_gated: the upper half of an expert's rows is the gate's.
    """
    return ops.chosen("pack_expert_codes")(experts, is_gated=is_gated)


def packed_linear(x_TK: torch.Tensor, weight: PackedWeight, out_TN: torch.Tensor) -> None:
    """out = x @ weight.T (+ bias)."""
    ops.chosen("packed_linear")(x_TK, weight, out_TN)


def packed_linear_add(x_TK: torch.Tensor, weight: PackedWeight, residual_TN: torch.Tensor) -> None:
    """residual += x @ weight.T (+ bias)."""
    ops.chosen("packed_linear_add")(x_TK, weight, residual_TN)


def packed_norm_linear_gated(
    x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight: PackedWeight, kind: str, out_TI: torch.Tensor,
    scratch_TD: torch.Tensor, scratch_T2I: torch.Tensor,
) -> None:  # fmt: skip
    """As `ops.norm_linear_gated`, of a packed weight."""
    ops.chosen("packed_norm_linear_gated")(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)


def pack_int8(weight: Int8Weight) -> Int8Weight:
    """Prepare a weight for `int8_linear`; its plain tensors may be taken over or dropped."""
    return ops.chosen("pack_int8")(weight)


def int8_linear(x_TK: torch.Tensor, weight: Int8Weight, out_TN: torch.Tensor) -> None:
    """out = (q @ weight.data.T) * input scale * weight scale (+ bias), with q = round(x / input scale), to even at the half,
    kept within -127 and 127. The input scale is the weight's own, or each row's largest magnitude / 127."""
    ops.chosen("int8_linear")(x_TK, weight, out_TN)
