"""Which operations multiply weights of each type: float8, packed codes, int8."""

from typing import cast

import torch

from quire.kernels import fp8, ops, packed
from quire.kernels.types import Fp8Scratch, Fp8Weight, Int8Weight, LinearWeight, PackedWeight
from quire.layers.linear import Products


class PackedProducts(Products):
    """Products of packed weights with inputs as they are."""

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        packed.packed_linear(x_TK, cast(PackedWeight, weight), out_TN)

    def apply_normed_gated(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        kind: str,
        out_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
    ) -> None:
        if ops.is_native("packed_norm_linear_gated"):
            packed.packed_norm_linear_gated(
                x_TD, norm_D, eps, cast(PackedWeight, weight), kind, out_TI, scratch_TD, scratch_T2I
            )
        else:
            super().apply_normed_gated(x_TD, norm_D, eps, weight, kind, out_TI, scratch_TD, scratch_T2I)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        if ops.is_native("packed_linear_add"):
            packed.packed_linear_add(x_TK, cast(PackedWeight, weight), residual_TN)
        else:
            super().apply_add(x_TK, weight, residual_TN, scratch_TN)


class Int8Products(Products):
    """Products of int8 weights with inputs that are rounded to int8."""

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        packed.int8_linear(x_TK, cast(Int8Weight, weight), out_TN)


class Fp8Products(Products):
    """Products of float8 weights with inputs that are rounded to float8.

    Args:
        scratch: memory for the rounded inputs.
    """

    def __init__(self, scratch: Fp8Scratch) -> None:
        self.scratch = scratch

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        fp8.fp8_linear(x_TK, cast(Fp8Weight, weight), out_TN, self.scratch)

    def apply_normed(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        out_TN: torch.Tensor,
        scratch_TD: torch.Tensor,
    ) -> None:
        fp8.fp8_norm_linear(x_TD, norm_D, eps, cast(Fp8Weight, weight), out_TN, self.scratch)

    def apply_normed_gated(
        self,
        x_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        weight: LinearWeight,
        kind: str,
        out_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
    ) -> None:
        fp8.fp8_norm_linear_gated(x_TD, norm_D, eps, cast(Fp8Weight, weight), kind, out_TI, scratch_T2I, self.scratch)

    def apply_add(
        self, x_TK: torch.Tensor, weight: LinearWeight, residual_TN: torch.Tensor, scratch_TN: torch.Tensor
    ) -> None:
        fp8.fp8_linear_add(x_TK, cast(Fp8Weight, weight), residual_TN, scratch_TN, self.scratch)

    def apply_gated_mlp(
        self,
        residual_TD: torch.Tensor,
        norm_D: torch.Tensor,
        eps: float,
        gate_up: LinearWeight,
        kind: str,
        down: LinearWeight,
        narrow_TI: torch.Tensor,
        scratch_TD: torch.Tensor,
        scratch_T2I: torch.Tensor,
        delta_TD: torch.Tensor,
    ) -> None:
        fp8.fp8_gated_mlp(
            residual_TD,
            norm_D,
            eps,
            cast(Fp8Weight, gate_up),
            kind,
            cast(Fp8Weight, down),
            scratch_T2I,
            narrow_TI,
            delta_TD,
            self.scratch,
        )
