"""The head between pooled hidden states and a pooling model's numbers: a few small matrices, kept and applied in float32.

Knows names, shapes and arithmetic. Knows nothing of requests.

Legend: X vectors (of sequences or tokens), I inputs, O outputs.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from quire.kernels.norm import ACTIVATIONS
from quire.layers.activation import KERNEL_KINDS

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    **{name: ACTIVATIONS[kind] for name, kind in KERNEL_KINDS.items() if kind in ACTIVATIONS},
}
"""By the names of config.json and of sentence-transformers' Dense modules, in small letters."""


@dataclasses.dataclass(frozen=True)
class HeadLayer:
    """One matrix, followed by an activation and perhaps a norm.

    Attributes:
        names: the checkpoint's module, under each of the names that it may have there.
        folder: where its own safetensors file lies, relative to the checkpoint's; empty for the checkpoint itself.
        norm: the module of a layer norm behind the activation, under each of its names; `norm_eps` is its epsilon.
        token_ids: the matrix is made of these rows of the named one; of two rows, the second less the first.
    """

    names: tuple[str, ...]
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "identity"
    folder: str = ""
    norm: tuple[str, ...] = ()
    norm_eps: float = 0.0
    token_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LoadedLayer:
    """A layer's float32 tensors on its device. `names`: the checkpoint's module, as of `HeadLayer`; none: it stays as it is."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]
    norm_O: torch.Tensor | None = None
    norm_bias_O: torch.Tensor | None = None
    norm_eps: float = 0.0
    names: tuple[str, ...] = ()


class PoolingHead:
    """The layers of a head, loaded. Without any it gives what it gets."""

    def __init__(self, layers: Sequence[LoadedLayer]) -> None:
        self.layers = layers

    def __call__(self, x_XI: torch.Tensor) -> torch.Tensor:
        """float32 [X, O]."""
        x = x_XI.float()
        for layer in self.layers:
            x = layer.activation(torch.nn.functional.linear(x, layer.weight_OI, layer.bias_O))
            if layer.norm_O is not None:
                x = torch.nn.functional.layer_norm(x, x.shape[-1:], layer.norm_O, layer.norm_bias_O, layer.norm_eps)
        return x
