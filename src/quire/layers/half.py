"""Both ends of a layer's half: the input that its first matrices read, and the output that its last matrix gives.

A number format may do the norm before a half and a product, or a product and the sum with the residual, in one pass: a half
leaves to its ends how that is done. Ends are made once, with the list of operations; they take the buffers of a step.
Legend: T tokens of the step, S tokens that need logits, D hidden, I intermediate.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight
from quire.layers.linear import LinearMethod
from quire.layers.workspace import TokenViews
from quire.models.spec import GatedMLP

Buffer = Callable[[TokenViews], torch.Tensor]


class HalfInput:
    """Hidden states as they are in a buffer [T, D]."""

    def __init__(self, method: LinearMethod, buffer: Buffer) -> None:
        self._method, self._buffer = method, buffer

    def tensor(self, views: TokenViews) -> torch.Tensor:
        """The input itself [T, D]."""
        return self._buffer(views)

    def multiply(self, weight: LinearWeight, out_TN: torch.Tensor, views: TokenViews) -> None:
        """out = input @ weight.T + bias."""
        self._method.apply(self._buffer(views), weight, out_TN)

    def multiply_gated(
        self, weight: LinearWeight, mlp: GatedMLP, kind: str, out_TI: torch.Tensor, views: TokenViews
    ) -> None:
        """out = act(gate) * up of input @ weight.T + bias, scaled and limited as the spec says."""
        gate_up_T2I = views.wide(2 * out_TI.shape[1])
        self.multiply(weight, gate_up_T2I, views)
        if mlp.scale != 1.0:
            ops.scale_and_cap(gate_up_T2I, mlp.scale, 0.0)
        if mlp.limit > 0:
            gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
            gate_TI.clamp_(max=mlp.limit if mlp.gate_limit is None else mlp.gate_limit)
            up_TI.clamp_(-mlp.limit, mlp.limit)
        ops.gated_activation(gate_up_T2I, kind, out_TI)


class NormedInput(HalfInput):
    """rms_norm(residual).

    Args:
        norms: the layer's, by place; filled when weights are loaded.
    """

    def __init__(self, method: LinearMethod, norms: Mapping[str, NormWeight], place: str, eps: float) -> None:
        self._method, self._norms, self._place, self.eps = method, norms, place, eps

    @property
    def norm_D(self) -> torch.Tensor:
        """The norm's weight."""
        return self._norms[self._place].weight

    def tensor(self, views: TokenViews) -> torch.Tensor:
        ops.rms_norm(views.residual_TD, self.norm_D, self.eps, views.normed_TD)
        return views.normed_TD

    def multiply(self, weight: LinearWeight, out_TN: torch.Tensor, views: TokenViews) -> None:
        norm_D = self._norms[self._place].weight
        self._method.apply_normed(views.residual_TD, norm_D, self.eps, weight, out_TN, views.normed_TD)

    def multiply_gated(
        self, weight: LinearWeight, mlp: GatedMLP, kind: str, out_TI: torch.Tensor, views: TokenViews
    ) -> None:
        x_TD, normed_TD, gate_up_T2I = views.residual_TD, views.normed_TD, views.wide(2 * out_TI.shape[1])
        self._method.apply_normed_gated(x_TD, self.norm_D, self.eps, weight, kind, out_TI, normed_TD, gate_up_T2I)


@dataclasses.dataclass(frozen=True)
class SampledViews:
    """Buffers of the tokens that need logits, in a last layer that computes no others.

    Attributes:
        views: of these tokens.
        rows: room for their rows of the wide buffer.
        index_S: their places among the step's tokens.
    """

    views: TokenViews
    rows: torch.Tensor
    index_S: torch.Tensor


class HalfOutput:
    """A buffer [T, D] in which the output of a half is alone.

    Attributes:
        sampled: where only these tokens have an output.
    """

    sampled: SampledViews | None = None

    def __init__(self, method: LinearMethod, buffer: Buffer) -> None:
        self._method, self._buffer = method, buffer

    def tensor(self, views: TokenViews) -> torch.Tensor:
        """Where the output is."""
        return self._buffer(views)

    def multiply(self, x_TK: torch.Tensor, weight: LinearWeight, views: TokenViews) -> None:
        """output = x @ weight.T + bias."""
        self._method.apply(x_TK, weight, self._buffer(views))


class ResidualOutput(HalfOutput):
    """The residual, to which a half's output is added.

    Over several ranks rank 0 adds its part to the residual and the others put theirs in its place: the caller sums.
    """

    def __init__(self, method: LinearMethod, *, is_first: bool) -> None:
        self._method, self._is_first = method, is_first

    def tensor(self, views: TokenViews) -> torch.Tensor:
        return views.residual_TD

    def multiply(self, x_TK: torch.Tensor, weight: LinearWeight, views: TokenViews) -> None:
        if self._is_first:
            self._method.apply_add(x_TK, weight, views.residual_TD, views.delta_TD)
        else:
            self._method.apply(x_TK, weight, views.residual_TD)


class SampledOutput(HalfOutput):
    """An output for the tokens that need logits alone; to their residual, gathered from that of all tokens, if it joins that."""

    def __init__(self, output: HalfOutput, sampled: SampledViews) -> None:
        self._output, self.sampled, self._few, self._method = output, sampled, sampled, output._method

    def tensor(self, views: TokenViews) -> torch.Tensor:
        return self._output.tensor(self._few.views)

    def multiply(self, x_TK: torch.Tensor, weight: LinearWeight, views: TokenViews) -> None:
        few = self._few.views
        self._method.see_rows(are_samples=True)
        if isinstance(self._output, ResidualOutput):
            ops.gather_rows(views.residual_TD, self._few.index_S, few.residual_TD)
        self._output.multiply(x_TK, weight, few)
