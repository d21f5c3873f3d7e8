"""The device's kernels. What has none here is computed by the plain PyTorch reference of its operation."""

import torch

from quire.kernels.registry import kernel


@kernel("rms_norm", platform="npu", priority=10, owner="quire-fake-npu")
def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    residual_TD: torch.Tensor | None = None,
) -> None:
    """The driver's kernel, which takes float32."""
    if residual_TD is not None:
        residual_TD.add_(x_TD)
        x_TD = residual_TD
    normed_TD = torch.empty(x_TD.shape, device=x_TD.device)
    torch.ops.quire_fake_npu.rms_norm(x_TD.float(), weight_D, eps, normed_TD)
    out_TD.copy_(normed_TD)
