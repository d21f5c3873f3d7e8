"""Hyper connections: how a half reads the residual streams, and how its output joins them.

Every rank computes all of it, in float32. Legend: T tokens, N streams, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from quire.kernels import hyper
from quire.kernels.types import StreamWeights
from quire.layers.modules import LayerScope, Module, Part
from quire.models.residual import HyperConnections

if TYPE_CHECKING:
    from quire.layers.assembly import Weight


class HyperConnection:
    """One half's weights; or those of the head, which only reads."""

    def __init__(self, spec: HyperConnections, is_head: bool = False) -> None:
        self._spec, self._is_head = spec, is_head
        self._tensors: dict[str, torch.Tensor] = {}

    @staticmethod
    def modules(scope: LayerScope, name: str) -> Iterator[Module]:
        """A matrix from all streams to weights, their biases, and a factor for each kind of weights."""
        spec = scope.spec.hyper
        if spec is None:
            return
        outputs, kinds = spec.streams, 1
        if name != "hyper_head":
            outputs, kinds = (2 + (spec.streams if spec.sinkhorn else 0)) * spec.streams, 3 if spec.sinkhorn else 2
        yield scope.table(name, (Part(outputs, 1),), spec.streams * scope.spec.hidden)
        yield scope.vector(f"{name}_base", Part(outputs, 1))
        yield scope.vector(f"{name}_scale", Part(kinds, 1))

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        kind = next((kind for kind in ("base", "scale") if name.endswith(kind)), "matrix")
        self._tensors[kind] = cast(torch.Tensor, weight).float()

    def read(self, streams_TND: torch.Tensor, out_TD: torch.Tensor) -> StreamWeights:
        """out = the streams' weighted sum; gives the weights with which the half's output is to join."""
        weights, spec = self._tensors, self._spec
        return hyper.read_streams(
            streams_TND, weights["matrix"], weights["base"], weights["scale"], spec.norm_eps, spec.eps, spec.magnitude,
            spec.write_eps, spec.sinkhorn, out_TD,
        )  # fmt: skip

    def write(self, streams_TND: torch.Tensor, weights: StreamWeights, x_TD: torch.Tensor) -> None:
        """Add a half's output to the streams."""
        hyper.write_streams(streams_TND, weights, x_TD)
