"""What joins the residual besides the halves of layers, as `models/residual.py` describes it: layer inputs, factors, and streams.

`LayerInputs` makes vectors for all layers before the first one, and `LayerEnd` is one layer's share of them. `HyperConnection` is
how a half reads residual streams, and how its output joins them. Every rank computes all of it.
Legend: T tokens, D hidden, L layers, P width of a layer's vector, N streams.
"""

from collections.abc import Iterator
from typing import cast

import torch

from quire.kernels import hyper, ops, recurrent
from quire.kernels.norm import head_norm
from quire.kernels.types import StreamWeights
from quire.layers.activation import kernel_activation
from quire.layers.assembly import NormWeight, Weight
from quire.layers.held_weights import HeldWeights
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.workspace import TokenViews
from quire.models.residual import HyperConnections, LayerInput
from quire.models.spec import DecoderSpec


class LayerInputs(HeldWeights):
    """The vectors of all layers: (norm(projection(embedding)) + embedding of the token's id) / sqrt(2)."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, method: LinearMethod) -> None:
        super().__init__()
        self.input = cast(LayerInput, spec.layer_input)
        self._method, self._layers, self._hidden = method, spec.layers, spec.hidden
        # As of the model's embeddings: the factor has the number type of the weights.
        self._scale = float(torch.tensor(self.input.width**0.5, dtype=dtype))
        self._norm_LP = torch.empty(0)

    @staticmethod
    def modules(builder: ModuleBuilder) -> Iterator[Module]:
        """Of a model with layer inputs."""
        inputs = builder.spec.layer_input
        if inputs is None:
            return
        columns = builder.spec.layers * inputs.width
        yield builder.embedding("input_embedding", inputs.vocab, columns)
        yield builder.linear("input_projection", (RowBlock(columns, 1),))
        yield builder.norm("input_norm", inputs.norm, inputs.width)

    def set_weight(self, name: str, weight: Weight) -> None:
        if isinstance(weight, NormWeight):  # divided here, so that the table of ids needs no factor
            self._norm_LP = (weight.weight / self._scale).expand(self._layers, -1).contiguous()
        super().set_weight(name, weight)

    def run(self, ids_T: torch.Tensor, embedded_TD: torch.Tensor, out_TC: torch.Tensor) -> None:
        """out [T, L * P] from token ids and (scaled) embeddings."""
        self._method.apply(embedded_TD, self.linears["input_projection"], out_TC)
        # The projection is divided by sqrt(D) before its norm, which matters to epsilon alone.
        head_norm(out_TC, self._norm_LP, None, self.input.norm.eps * self._hidden, subtract_mean=False)
        ops.add_embedding(ids_T, self.linears["input_embedding"], out_TC)
        ops.scale_and_cap(out_TC, self._scale * 0.5**0.5, 0.0)


class LayerEnd(HeldWeights):
    """One layer's: the gate, the matrix back, the norm behind it, and the factor."""

    def __init__(self, layer: int, inputs: LayerInput | None, method: LinearMethod) -> None:
        super().__init__()
        self._layer, self._input, self._method = layer, inputs, method
        self._activation = "" if inputs is None else kernel_activation(inputs.act)
        self._scale = 1.0

    @property
    def narrow(self) -> int:
        """Columns of the narrow buffer that it needs."""
        return 0 if self._input is None else self._input.width

    @staticmethod
    def modules(builder: ModuleBuilder) -> Iterator[Module]:
        """Of one layer."""
        inputs = builder.spec.layer_input
        if inputs is not None:
            yield builder.linear("input_gate", (RowBlock(inputs.width, 1),))
            yield builder.linear("input_out", (builder.hidden,), inputs.width)
            yield builder.norm("after_input", inputs.norm, builder.spec.hidden)
        if builder.spec.layer_scale:
            yield builder.vector("layer_scale", RowBlock(1, 1))

    def set_weight(self, name: str, weight: Weight) -> None:
        if isinstance(weight, torch.Tensor):
            self._scale = float(weight[0])
        super().set_weight(name, weight)

    def run(self, views: TokenViews, inputs_TC: torch.Tensor) -> None:
        """Change the residual, which both halves have joined. `inputs_TC`: the vectors of all layers."""
        if self._input is not None:
            width, gate_TP = self._input.width, views.narrow(self._input.width)
            self._method.apply(views.residual_TD, self.linears["input_gate"], gate_TP)
            ops.activation(gate_TP, self._activation)
            mine_TP = inputs_TC[:, self._layer * width : (self._layer + 1) * width]
            recurrent.gate(gate_TP, mine_TP, "identity", gate_TP)
            self._method.apply(gate_TP, self.linears["input_out"], views.delta_TD)
            ops.rms_norm(views.delta_TD, self.norms["after_input"].weight, self._input.norm.eps, views.delta_TD)
            ops.add(views.delta_TD, views.residual_TD)
        if self._scale != 1.0:
            ops.scale_and_cap(views.residual_TD, self._scale, 0.0)


class HyperConnection(HeldWeights):
    """One half's weights; or those of the head, which only reads."""

    def __init__(self, spec: HyperConnections) -> None:
        super().__init__()
        self._spec = spec

    @staticmethod
    def modules(builder: ModuleBuilder, name: str) -> Iterator[Module]:
        """A matrix from all streams to weights, their biases, and a factor for each kind of weights."""
        spec = builder.spec.hyper
        if spec is None:
            return
        outputs, kinds = spec.streams, 1
        if name != "hyper_head":
            outputs, kinds = (2 + (spec.streams if spec.sinkhorn else 0)) * spec.streams, 3 if spec.sinkhorn else 2
        yield builder.table(name, (RowBlock(outputs, 1),), spec.streams * builder.spec.hidden)
        yield builder.vector(f"{name}_base", RowBlock(outputs, 1))
        yield builder.vector(f"{name}_scale", RowBlock(kinds, 1))

    def set_weight(self, name: str, weight: Weight) -> None:
        kind = next((kind for kind in ("base", "scale") if name.endswith(kind)), "matrix")
        super().set_weight(kind, cast(torch.Tensor, weight).float())

    def read(self, streams_TND: torch.Tensor, out_TD: torch.Tensor) -> StreamWeights:
        """out = the streams' weighted sum; gives the weights with which the half's output is to join."""
        spec = self._spec
        tensors = (self.tensors["matrix"], self.tensors["base"], self.tensors["scale"])
        constants = (spec.norm_eps, spec.eps, spec.magnitude, spec.write_eps, spec.sinkhorn)
        return hyper.read_streams(streams_TND, *tensors, *constants, out_TD)

    def write(self, streams_TND: torch.Tensor, weights: StreamWeights, x_TD: torch.Tensor) -> None:
        """Add a half's output to the streams."""
        hyper.write_streams(streams_TND, weights, x_TD)
