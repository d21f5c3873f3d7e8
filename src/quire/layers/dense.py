"""A dense feed-forward but for its last matrix: a gated one, a plain one, or what every token takes beside a mixture's experts.

Legend: T tokens, D hidden, I intermediate.
"""

import torch

from quire.kernels import ops
from quire.kernels.norm import XIELU, xielu
from quire.kernels.types import LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.half import HalfInput
from quire.layers.interface import LayerContext
from quire.layers.workspace import TokenViews
from quire.models.spec import MLP, GatedMLP


class DenseFeedForward:
    """act(gate(x)) * up(x), or act(up(x)), on this rank.

    Attributes:
        activation: the kernels' name of it.
        width: columns of the result. wide: columns a token that it needs of the workspace's wide buffer.
        alphas: of xIELU, which is learned; else None.
    """

    def __init__(self, mlp: GatedMLP | MLP, context: LayerContext) -> None:
        self.mlp, self.activation = mlp, kernel_activation(mlp.act)
        self.width = mlp.intermediate // context.plan.size
        self.wide = 2 * self.width if isinstance(mlp, GatedMLP) else 0
        self.alphas = torch.zeros(2, device=context.device) if mlp.act == XIELU else None

    def activate(self, x: HalfInput, weight: LinearWeight, views: TokenViews) -> torch.Tensor:
        """[T, I] in the narrow buffer. `weight`: of gate and up under one another, or of up alone."""
        activated_TI = views.narrow(self.width)
        if isinstance(self.mlp, GatedMLP):
            x.multiply_gated(weight, self.mlp, self.activation, activated_TI, views)
            return activated_TI
        x.multiply(weight, activated_TI, views)
        if self.alphas is None:
            ops.activation(activated_TI, self.activation)
        else:
            xielu(activated_TI, self.alphas)
        return activated_TI
