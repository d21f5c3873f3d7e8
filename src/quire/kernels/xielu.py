"""xIELU, an activation with two learned numbers (Huang and Schlag 2024), each above 0 by a softplus:
a * x^2 + x / 2 above zero, and (b + 1/2) * (exp(x) - 1 - x) + x / 2 below.

Legend: T tokens, I intermediate.
"""

import torch

from quire.kernels import ops

XIELU = "xielu"
BETA = 0.5


def xielu(x_TI: torch.Tensor, alphas_2: torch.Tensor) -> None:
    """x = xIELU(x), in place; alphas: float32 a, then b + 1/2."""
    ops.chosen("xielu")(x_TI, alphas_2)


def set_alpha(alphas_2: torch.Tensor, is_positive: bool, stored_1: torch.Tensor) -> None:
    """Put one of the two numbers, as a checkpoint has it before its softplus, in its place."""
    alpha_1 = torch.nn.functional.softplus(stored_1.float())
    alphas_2[0 if is_positive else 1] = alpha_1[0] + (0.0 if is_positive else BETA)
