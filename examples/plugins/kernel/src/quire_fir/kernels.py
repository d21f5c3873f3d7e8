"""An RMS norm of its own. Its signature is the declaration's (`quire.kernels.norm`), which is its reference, too.

`priority` decides among the implementations that can run here: those of the CPU have 10. `unavailable` says why one cannot.
"""

import torch

from quire.kernels import ops  # noqa: F401  (declares the operations)
from quire.kernels.registry import kernel

CALLS = [0]
"""How often it was called."""


@kernel("rms_norm", platform="cpu", priority=50, unavailable=lambda: None)
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    """The norm of rows, or of their sum with a residual, which is kept."""
    CALLS[0] += 1
    if residual_TD is not None:
        residual_TD.add_(x_TD)
    x = (x_TD if residual_TD is None else residual_TD).float()
    out_TD.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float())
