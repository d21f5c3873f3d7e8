"""Lightning attention as a layer's mixer: linear attention whose heads forget at fixed rates.

It is Mamba-2's scan with keys and queries in the places of B and C, a time step of 1, and decays that no weight holds.
Legend: T tokens, D hidden, N heads, H size of a head, C channels of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import recurrent
from quire.kernels.types import SsdWeights
from quire.layers.interface import StepInputs
from quire.layers.mixers.interface import LayerContext
from quire.layers.mixers.state import Read, StateLayer
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.spec import Lightning


class LightningLayer(StateLayer):
    """A state is a matrix [H, H] a head."""

    NAMES = frozenset(("lightning_in", "lightning_norm", "lightning_out"))
    OUT = "lightning_out"

    def __init__(self, mixer: Lightning, context: LayerContext) -> None:
        mine, size = context.plan.groups(mixer.heads, "heads"), mixer.head_dim
        self.mixer, self.heads = mixer, mine.stop - mine.start
        self.inner = self.heads * size
        super().__init__(mixer, context, (self.heads, size, size))
        self.wide, self.narrow = 4 * self.inner, self.inner
        self._steps_1N = torch.zeros(1, self.heads, device=context.device)
        nothing_N = torch.zeros(self.heads, device=context.device)
        decays_N = torch.tensor(mixer.decays[mine], dtype=torch.float32, device=context.device)
        self._weights = SsdWeights(decays_N, nothing_N, nothing_N, dt_min=1.0, dt_max=1.0)

    @staticmethod
    def modules(scope: LayerScope, mixer: Lightning) -> Iterator[Module]:
        inner = Part(mixer.heads * mixer.head_dim, mixer.heads)
        deals = scope.deals("lightning_in", 4, (0, 1, 2), mixer.heads)
        yield scope.linear("lightning_in", (inner, inner, inner, inner), shard="rows", deals=deals)
        yield scope.table("lightning_norm", (inner,), shard="rows")
        yield scope.linear("lightning_out", (scope.hidden,), inner.rows, shard="columns", groups=mixer.heads)

    def mix(self, read: Read, step: StepInputs, views: TokenViews) -> torch.Tensor:
        projected_TC, y_TC = views.wide(self.wide), views.narrow(self.inner)
        read("lightning_in", projected_TC)
        qkv_TC, gate_TC = projected_TC.split((3 * self.inner, self.inner), dim=1)
        recurrent.gate(qkv_TC, qkv_TC, "sigmoid", qkv_TC)  # x * sigmoid(x): SiLU
        by_head = (self.heads, self.mixer.head_dim)
        q_TNH, k_TNH, v_TNH = (part.unflatten(1, by_head) for part in qkv_TC.chunk(3, dim=1))
        recurrent.ssd_scan(
            v_TNH, self._steps_1N.expand(len(y_TC), -1), k_TNH, q_TNH, self._weights, self.states[0], self.metadata(step),
            y_TC.unflatten(1, by_head),
        )  # fmt: skip
        weight_C, eps = self.tensors["lightning_norm"], self.mixer.norm.eps
        if self.context.plan.size > 1:
            self._norm_over_ranks(y_TC, weight_C, eps)
            recurrent.gate(y_TC, gate_TC, "sigmoid", y_TC)
        else:
            recurrent.gated_norm(y_TC, gate_TC, weight_C, eps, self.inner, True, y_TC, "sigmoid")
        return y_TC

    def _norm_over_ranks(self, y_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> None:
        """One norm over the heads of all ranks. Heads that ranks share count once for each."""
        means_T = y_TC.float().square().mean(-1) / self.context.plan.size
        self.context.communicator.all_reduce(means_T)
        y_TC.copy_(y_TC.float() * torch.rsqrt(means_T + eps)[:, None] * weight_C)
