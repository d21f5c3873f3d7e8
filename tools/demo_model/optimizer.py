"""Muon for the matrices, AdamW for the embedding and the norms.

Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon/): momentum, then each update made nearly orthogonal
by Newton-Schulz steps. Updates are scaled to AdamW's size (Moonlight, arXiv:2502.16982), so both share one learning rate.
Matrices of one shape are updated together: sixty small products become three batched ones.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(update_BMN: Tensor) -> Tensor:
    """Each matrix with its singular values brought near 1, by five quintic Newton-Schulz steps in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update_BMN.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class AdamW(torch.optim.AdamW):
    """AdamW whose steps are told their learning rate."""

    def step(self, rate: float) -> None:
        """One update from the gradients present, which are then cleared."""
        for group in self.param_groups:
            group["lr"] = rate
        super().step()
        self.zero_grad(set_to_none=True)


class MuonAdamW:
    """Both optimizers as one.

    Args:
        model: its 2-D parameters but the embedding go to Muon, the others to AdamW.
        weight_decay: decoupled, on Muon's matrices.
    """

    def __init__(self, model: nn.Module, weight_decay: float, momentum: float = 0.95) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed_tokens" not in name:
                self.groups[min(parameter.shape), max(parameter.shape)].append(parameter)
            else:
                others.append(parameter)
        self.momenta = {
            shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups.items()
        }
        self.adamw = AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=others[0].is_cuda)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate `rate`, from the gradients present, which are then cleared."""
        self.adamw.step(rate)
        for shape, parameters in self.groups.items():
            flipped = [parameter.shape[0] > parameter.shape[1] for parameter in parameters]
            gradients = torch.stack(
                [p.grad.mT if flip else p.grad for p, flip in zip(parameters, flipped, strict=True)]
            )
            momentum = self.momenta[shape]
            momentum.lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp(momentum, self.momentum)) * (0.2 * max(shape) ** 0.5)
            torch._foreach_mul_(parameters, 1 - rate * self.weight_decay)
            moves = [matrix.mT if flip else matrix for matrix, flip in zip(update.unbind(), flipped, strict=True)]
            torch._foreach_add_(parameters, moves, alpha=-rate)
            for parameter in parameters:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on needs."""
        return {"momenta": self.momenta, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from such a state."""
        self.momenta = state["momenta"]
        self.adamw.load_state_dict(state["adamw"])
