"""Plain matrices whose inputs and outputs are kept within bounds, which a checkpoint has for each of them.

Legend: T tokens, K columns and N rows of a matrix, P its parts (q, k and v, say).
"""

import itertools
from collections.abc import Sequence

import torch

from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers.linear import Products, UnquantizedLinear


class BoundedLinear(UnquantizedLinear):
    """Products by themselves, so that bounds stand around each; a part whose inputs have other bounds is computed apart."""

    apply_normed = Products.apply_normed
    apply_normed_gated = Products.apply_normed_gated
    apply_add = Products.apply_add

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[slice, list[float]]]] = {}

    def bound(self, name: str, bounds_P4: torch.Tensor, rows: Sequence[int]) -> None:
        ends = list(itertools.accumulate(rows, initial=0))
        self._parts[name] = list(zip(map(slice, ends, ends[1:]), bounds_P4.view(-1, 4).tolist(), strict=True))

    def apply(self, x_TK: torch.Tensor, weight: LinearWeight, out_TN: torch.Tensor) -> None:
        parts, within, product_TN = self._parts.get(weight.name), list[float](), out_TN
        if parts is None:
            ops.linear(x_TK, weight, out_TN)
            return
        for rows, (low, high, least, most) in parts:
            if within != [low, high]:
                product_TN, within = torch.empty_like(out_TN), [low, high]
                ops.linear(x_TK.clamp(low, high), weight, product_TN)
            torch.clamp(product_TN[:, rows], least, most, out=out_TN[:, rows])
