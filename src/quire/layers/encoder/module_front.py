"""Rows of images, or of sounds, through Transformers' own modules, for encoders that are worth no layers of ours.

Knows names of modules and weights. Knows no architecture.
Legend: N images or sounds, C channels, H height, W width, B bins, F frames, E rows of an item, D columns.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch

from quire.errors import ConfigError
from quire.extras import import_optional
from quire.layers.assembly import Weight
from quire.layers.encoder.front_layers import Front
from quire.layers.interface import ModelContext
from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.models.sight import Modules

TREE = "tree."
"""Of its modules' names within the encoder."""


class ModuleFront(Front):
    """The modules and their weights. They compute in the type of the buffers between layers."""

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
