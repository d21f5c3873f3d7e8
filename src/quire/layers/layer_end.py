"""What may follow a layer's two halves: a vector of the token that joins the residual, and a factor on the residual.

`LayerInputs` makes the vectors of all layers before the first one; `LayerEnd` is one layer's share. Every rank computes it all.
Legend: T tokens, D hidden, L layers, P width of a layer's vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch

from quire.kernels import ops, recurrent
from quire.kernels.norm import head_norm
from quire.kernels.types import LinearWeight
from quire.layers.activation import kernel_activation
from quire.layers.linear import LinearMethod
from quire.layers.modules import LayerScope, Module, Part
from quire.layers.workspace import TokenViews
from quire.models.residual import LayerInput
from quire.models.spec import DecoderSpec

if TYPE_CHECKING:
    from quire.layers.assembly import NormWeight, Weight


class LayerInputs:
    """The vectors of all layers: (norm(projection(embedding)) + embedding of the token's id) / sqrt(2)."""

    NAMES = frozenset(("input_embedding", "input_projection", "input_norm"))

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, method: LinearMethod) -> None:
        self.input = cast(LayerInput, spec.layer_input)
        self._method, self._layers, self._hidden = method, spec.layers, spec.hidden
        # As of the model's embeddings: the factor has the number type of the weights.
        self._scale = float(torch.tensor(self.input.width**0.5, dtype=dtype))
        self._linears: dict[str, LinearWeight] = {}
        self._norm_LP = torch.empty(0)

    @staticmethod
    def modules(scope: LayerScope) -> Iterator[Module]:
        """Of a model with layer inputs."""
        inputs = scope.spec.layer_input
        if inputs is None:
            return
        columns = scope.spec.layers * inputs.width
        yield scope.embedding("input_embedding", inputs.vocab, columns)
        yield scope.linear("input_projection", (Part(columns, 1),))
        yield scope.norm("input_norm", inputs.norm, inputs.width)

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        if isinstance(weight, LinearWeight):
            self._linears[name] = weight
        else:  # divided here, so that the table of ids needs no factor
            norm_P = cast("NormWeight", weight).weight / self._scale
            self._norm_LP = norm_P.expand(self._layers, -1).contiguous()

    def run(self, ids_T: torch.Tensor, embedded_TD: torch.Tensor, out_TC: torch.Tensor) -> None:
        """out [T, L * P] from token ids and (scaled) embeddings."""
        self._method.apply(embedded_TD, self._linears["input_projection"], out_TC)
        # The projection is divided by sqrt(D) before its norm, which matters to epsilon alone.
        head_norm(out_TC, self._norm_LP, None, self.input.norm.eps * self._hidden, subtract_mean=False)
        ops.add_embedding(ids_T, self._linears["input_embedding"], out_TC)
        ops.scale_and_cap(out_TC, self._scale * 0.5**0.5, 0.0)


class LayerEnd:
    """One layer's: the gate, the matrix back, the norm behind it, and the factor."""

    NAMES = frozenset(("input_gate", "input_out", "after_input", "layer_scale"))

    def __init__(self, layer: int, inputs: LayerInput | None, method: LinearMethod) -> None:
        self._layer, self._input, self._method = layer, inputs, method
        self._activation = "" if inputs is None else kernel_activation(inputs.act)
        self._linears: dict[str, LinearWeight] = {}
        self._norm_D = torch.empty(0)
        self._scale = 1.0

    @property
    def narrow(self) -> int:
        """Columns of the narrow buffer that it needs."""
        return 0 if self._input is None else self._input.width

    @staticmethod
    def modules(scope: LayerScope) -> Iterator[Module]:
        """Of one layer."""
        inputs = scope.spec.layer_input
        if inputs is not None:
            yield scope.linear("input_gate", (Part(inputs.width, 1),))
            yield scope.linear("input_out", (scope.hidden,), inputs.width)
            yield scope.norm("after_input", inputs.norm, scope.spec.hidden)
        if scope.spec.layer_scale:
            yield scope.vector("layer_scale", Part(1, 1))

    def set_weight(self, name: str, weight: Weight) -> None:
        """Take one of its modules' weights."""
        if isinstance(weight, LinearWeight):
            self._linears[name] = weight
        elif isinstance(weight, torch.Tensor):
            self._scale = float(weight[0])
        else:
            self._norm_D = cast("NormWeight", weight).weight

    def run(self, views: TokenViews, inputs_TC: torch.Tensor | None) -> None:
        """Change the residual, which both halves have joined. `inputs_TC`: the vectors of all layers."""
        if self._input is not None and inputs_TC is not None:
            width, gate_TP = self._input.width, views.narrow(self._input.width)
            self._method.apply(views.residual_TD, self._linears["input_gate"], gate_TP)
            ops.activation(gate_TP, self._activation)
            mine_TP = inputs_TC[:, self._layer * width : (self._layer + 1) * width]
            recurrent.gate(gate_TP, mine_TP, "identity", gate_TP)
            self._method.apply(gate_TP, self._linears["input_out"], views.delta_TD)
            ops.rms_norm(views.delta_TD, self._norm_D, self._input.norm.eps, views.delta_TD)
            ops.add(views.delta_TD, views.residual_TD)
        if self._scale != 1.0:
            ops.scale_and_cap(views.residual_TD, self._scale, 0.0)
