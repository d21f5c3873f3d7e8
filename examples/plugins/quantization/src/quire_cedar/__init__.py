"""Adds the number format `cedar`: plain checkpoints are rounded to it when they are loaded (`--quantization cedar`)."""

import torch

from quire.kernels.types import PackedWeight
from quire.quantization.registry import Format, register_linear_method
from quire.quantization.scheme import Form

GROUP = 32
"""Columns that share a scale."""
FORM = Form("packed", 8, GROUP)


def round_weight(
    weight_NK: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype
) -> PackedWeight | torch.Tensor:
    """Eight bits: the largest magnitude of each group of columns becomes 127. Kernels that know packed weights multiply it."""
    outputs, inputs = weight_NK.shape
    if inputs % GROUP:
        return weight_NK
    groups = weight_NK.float().unflatten(1, (-1, GROUP))
    scale_NG = (groups.abs().amax(-1) / 127).clamp(min=1e-10).half().float().clamp(min=2.0**-24)
    codes = (groups / scale_NG[..., None]).round().clamp(-127, 127).to(torch.int8).reshape(outputs, inputs)
    return PackedWeight(outputs, inputs, dtype, codes, bias=bias_N, scale=scale_NG)


def register() -> None:
    """Quire calls this in each of its processes."""
    register_linear_method("cedar", Format(online=(round_weight, FORM)))
