"""A mixture whose router, experts and shared feed-forward have norms of their own (Gemma 4):
after_shared(shared(x)) + after_experts(experts(before_experts(r))), with r the residual and x its norm before the layer's half.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from quire.distributed.communicator import Communicator
from quire.kernels import ops
from quire.layers.moe import Mixture, Room
from quire.layers.workspace import TokenViews

if TYPE_CHECKING:
    from quire.kernels.types import LinearWeight
    from quire.layers.assembly import NormWeight


class NormedMixture(Mixture):
    """Sums over ranks by itself, since norms follow what is summed."""

    NORMS = ("shared_after", "experts_before", "experts_after")
    WEIGHTS = (*Mixture.WEIGHTS, *NORMS, "router_scale")

    def set_norms(self, eps: float, communicator: Communicator) -> None:
        """What its norms need; called before weights."""
        self._eps, self._communicator = eps, communicator
        self._norms: dict[str, torch.Tensor] = {}

    def set_weight(self, name: str, weight: LinearWeight | torch.Tensor | list[LinearWeight]) -> None:
        if name in self.NORMS:
            self._norms[name] = cast("NormWeight", weight).weight
        elif name == "router_scale":  # the router's input is divided by sqrt(D) besides
            tensor = cast(torch.Tensor, weight)
            self._norms[name] = tensor * len(tensor) ** -0.5
        else:
            super().set_weight(name, weight)

    def run(self, x_TD: torch.Tensor, out_TD: torch.Tensor, num_tokens: torch.Tensor, views: Room) -> None:
        """`x` is a buffer that may be overwritten."""
        assert self.shared is not None, "a mixture with norms of its own has a shared feed-forward"
        room, norms, eps = cast(TokenViews, views), self._norms, self._eps
        self._method.apply(self._activate_shared(x_TD, views, self.shared), self._linears["shared_down"], out_TD)
        self._communicator.all_reduce(out_TD)
        ops.rms_norm(out_TD, norms["shared_after"], eps, out_TD)
        ops.rms_norm(room.residual_TD, norms["router_scale"], eps, x_TD)
        choice = self._choose(x_TD, num_tokens)
        ops.rms_norm(room.residual_TD, norms["experts_before"], eps, x_TD)
        self._run_experts(x_TD, *choice, num_tokens, room.beside_TD)
        self._communicator.all_reduce(room.beside_TD)
        ops.rms_norm(room.beside_TD, norms["experts_after"], eps, room.beside_TD)
        ops.add(room.beside_TD, out_TD)
