"""From the frames of sounds, or from images, to the rows that an encoder's layers read: convolutions, or Transformers' own
modules, for encoders that are worth no layers of ours.

Knows names of modules and weights. Knows no architecture.
Legend: N sounds or images, B bins, F frames, K chunks, C channels, H height, W width, T rows of a sound (F / 2) or of a chunk,
E rows of an item, D hidden.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.nn import functional

from quire.errors import ConfigError
from quire.extras import import_optional
from quire.layers.assembly import Weight
from quire.layers.interface import ModelContext
from quire.layers.linear import LinearMethod
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.tower import TowerPart
from quire.models.sight import Modules
from quire.models.sound import Chunks, Frames

WIDTH = 3
"""Frames, and bins, that a convolution looks at."""


class Front(TowerPart):
    """What makes the rows that an encoder's layers read."""

    @abstractmethod
    def __call__(self, read: torch.Tensor) -> torch.Tensor:
        """The rows of sounds [N, B, F], or of images [N, C, H, W]."""


class MelFront(Front):
    """Two convolutions (Whisper's). Each is a product with each row's neighbours side by side."""

    def __init__(self, frames: Frames, method: LinearMethod) -> None:
        super().__init__(method)
        self._frames = frames

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Both matrices."""
        for name, columns in (("conv1", self._frames.bins), ("conv2", builder.spec.hidden)):
            linear = builder.linear(name, (builder.hidden,), columns * WIDTH, bias=True)
            yield dataclasses.replace(linear, dims=(columns, WIDTH))

    def __call__(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """The rows [N * T, D] of sounds of one length."""
        first_NDF = self._convolve("conv1", mel_NBF, 1)
        second_NDT = self._convolve("conv2", first_NDF, 2)
        return second_NDT.transpose(1, 2).flatten(0, 1)

    def _convolve(self, name: str, x_NCF: torch.Tensor, stride: int) -> torch.Tensor:
        padded = torch.nn.functional.pad(x_NCF, (1, 1))
        rows = padded.unfold(2, WIDTH, stride).transpose(1, 2)  # [N, T, C, WIDTH]
        flat = rows.reshape(rows.shape[0] * rows.shape[1], -1)
        return self.multiply(name, flat, self._frames.act).view(rows.shape[0], rows.shape[1], -1).transpose(1, 2)


class ChunkFront(Front):
    """Chunks of frames, each by itself through convolutions over frames and bins, whose rows count from 0 in each chunk."""

    def __init__(self, chunks: Chunks, method: LinearMethod) -> None:
        super().__init__(method)
        self._chunks = chunks
        self._sines_TD = chunks.positions.table(chunks.hidden)

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Three convolutions, and the matrix behind them."""
        channels = RowBlock(self._chunks.channels, 1)
        for number, columns in enumerate((1, channels.rows, channels.rows), 1):
            yield builder.table(f"front{number}", (channels,), columns * WIDTH**2)
            yield builder.vector(f"front{number}_bias", channels)
        yield builder.linear("input", (builder.hidden,), self._chunks.columns)

    def __call__(self, mel_NBF: torch.Tensor) -> torch.Tensor:
        """The rows [K * T, D] of one sound (N is 1): whole chunks, or one that is shorter."""
        frames = min(self._chunks.frames, mel_NBF.shape[2])
        x_KCBF = mel_NBF[0].unflatten(1, (-1, frames)).transpose(0, 1)[:, None]
        for number in (1, 2, 3):
            kernel, bias = (self.tensors[f"front{number}{end}"] for end in ("", "_bias"))
            kernel = kernel.view(len(kernel), -1, WIDTH, WIDTH).to(x_KCBF.dtype)
            x_KCBF = functional.gelu(functional.conv2d(x_KCBF, kernel, bias.to(x_KCBF.dtype), stride=2, padding=1))
        out = self.multiply("input", x_KCBF.permute(0, 3, 1, 2).flatten(0, 1).flatten(1))
        sines_TD = self._sines_TD[: x_KCBF.shape[3]].to(out.device, out.dtype)
        return out + sines_TD.repeat(len(x_KCBF), 1)


TREE = "tree."
"""Of its modules' names within the encoder."""


class ModuleFront(Front):
    """Transformers' own modules. They compute in the type of the buffers between layers."""

    def __init__(self, modules: Modules, context: ModelContext) -> None:
        super().__init__()
        self._tree = _build(modules, context).to(context.device, context.activation_dtype)
        self._modules, self._call = modules, getattr(self._tree, modules.call)
        own = self._tree.state_dict()
        self._tensors = {TREE + name: tensor for name, tensor in own.items() if tensor.is_floating_point()}

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """One for each tensor."""
        for name, tensor in self._tensors.items():
            rows, *dims = tensor.shape
            source, columns = (self._modules.within + name.removeprefix(TREE),), math.prod(dims) if dims else 0
            yield Module(name, "table", source, (RowBlock(rows, 1),), columns, dims=tuple(dims))

    def set_weight(self, name: str, weight: Weight) -> None:
        own = self._tensors[name]
        own.copy_(cast(torch.Tensor, weight).view_as(own))

    def __call__(self, read: torch.Tensor) -> torch.Tensor:
        """The rows [N * E, D] of images [N, C, H, W] of one size, or of sounds [N, B, F]."""
        read = read.transpose(1, 2) if read.ndim == 3 else read
        given: Any = self._call(**{self._modules.reads: read}, **dict.fromkeys(self._modules.others))
        if not isinstance(given, torch.Tensor):
            given = given.last_hidden_state if self._call == self._tree.forward else given.pooler_output
        return given.flatten(0, 1)


def _build(modules: Modules, context: ModelContext) -> torch.nn.Module:
    """The class with only those of its modules that read images or sounds, and no numbers in them yet."""
    needs = "this model's encoder is made of Transformers' modules"
    transformers = import_optional("transformers", "transformers", "model", needs)
    kind: Any = getattr(transformers, modules.model, None)
    if kind is None:
        raise ConfigError(f"{needs}; the installed one has no {modules.model}: install a newer one", setting="model")
    section = context.hf.get(modules.section) if modules.section else context.hf
    loading = transformers.modeling_utils
    try:
        with getattr(loading, "init", loading).no_init_weights():  # where it is depends on Transformers' version
            tree = kind(kind.config_class.from_dict(section.to_dict())).eval().requires_grad_(False)
    except Exception as error:  # a config class may raise anything
        raise ConfigError(
            f"config.json does not fit Transformers' {modules.model}: {error}", setting="model"
        ) from error
    if not modules.section:
        del tree.language_model
    return tree
