"""An encoder beside a decoder, which runs the layers of one. It is whole on every rank.

Knows whose weights are whose. What it reads, and what becomes of its rows, is for encoders of one kind to say.
Legend: T rows of the step, B runs of rows that see one another, P pages of a run; X rows, K and C columns.
"""

import abc
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels.norm import ACTIVATIONS
from quire.kernels.types import LinearWeight
from quire.layers import weights as weight_table
from quire.layers.activation import kernel_activation
from quire.layers.assembly import Weight
from quire.layers.decoder import Decoder
from quire.layers.held_weights import HeldWeights, apply_norm
from quire.layers.interface import ModelContext
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.layers.modules import Module, ModuleBuilder
from quire.layers.parallel import ParallelPlan
from quire.layers.weights import CheckpointTensor
from quire.models.residual import Norm
from quire.models.spec import DecoderSpec


class RunPages:
    """The pages of one encoder: runs of rows that see one another, each as a request whose tokens are all new. What a layer keeps
    is of use within it alone, so all layers share them.

    Args:
        decoder: its layers.
        slot_dtype: of slots in pages (`Capabilities.slot_dtype`).
        groups: which of a step's descriptions each layer reads; None: all the only one.
    """

    def __init__(
        self, decoder: Decoder, context: ModelContext, slot_dtype: torch.dtype, groups: Sequence[int] | None = None
    ) -> None:
        self._decoder, self._context, self._slot_dtype = decoder, context, slot_dtype
        self._groups = groups
        self._num_pages = 0

    def num_bytes(self, length: int) -> int:
        """Memory of the pages of a run of so many rows."""
        return self._pages_of([length]) * max((spec.page_bytes for spec in self._decoder.kv_cache_specs()), default=0)

    def describe(
        self, lengths: Sequence[int], positions_T: torch.Tensor, seen: Sequence[int] | None = None
    ) -> AttentionMetadata:
        """A step of runs of these lengths, one after another; there are pages for it from now on. `seen`: the rows of each that
        are seen, the first ones; None: all are."""
        self._reserve(self._pages_of(lengths))
        size, device = self._context.block_size, self._context.device
        lengths_B = np.array(lengths, dtype=np.int32)
        pages_B = -(-lengths_B // size)
        first_B = 1 + np.cumsum(pages_B) - pages_B
        within_T = np.arange(lengths_B.sum()) - np.repeat(np.cumsum(lengths_B) - lengths_B, lengths_B)
        table_BP = first_B[:, None] + np.arange(pages_B.max())
        shape = (len(within_T), len(lengths), int(lengths_B.max()), int(lengths_B.max()))

        def on_device(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

        return AttentionMetadata(
            block_size=size,
            query_start=on_device(np.concatenate(([0], np.cumsum(lengths_B)))),
            seq_lens=on_device(lengths_B if seen is None else np.array(seen)),
            rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
            block_table=on_device(np.where(np.arange(pages_B.max()) < pages_B[:, None], table_BP, 0)),
            slot_mapping=on_device(np.repeat(first_B * size, lengths_B) + within_T, self._slot_dtype),
            positions=positions_T,
            shape=on_device(np.array(shape), torch.int64),
            num_tokens=shape[0],
            num_requests=shape[1],
            max_query_len=shape[2],
            max_seq_len=shape[3],
            decodes=bool((lengths_B == 1).any()),
        )

    def _pages_of(self, lengths: Sequence[int]) -> int:
        return 1 + sum(-(-length // self._context.block_size) for length in lengths)

    def _reserve(self, num_pages: int) -> None:
        """Have at least so many pages."""
        specs = self._decoder.kv_cache_specs()
        if num_pages <= self._num_pages or not specs:
            return
        self._num_pages = num_pages
        groups = [0] * len(specs) if self._groups is None else list(self._groups)
        self._decoder.bind_kv_cache([torch.empty(0)] * len(specs), groups)  # the old ones go first
        pages = self._context.backend.allocate(specs[0], num_pages, self._context.device)
        self._decoder.bind_kv_cache([pages] * len(specs), groups)


Arrays = Mapping[str, npt.NDArray[Any]]
"""What an item has for an encoder, by name."""


class TowerPart(HeldWeights, abc.ABC):
    """What a tower has before or behind its layers. What it computes is in tensors of its own.

    Args:
        method: multiplies its matrices.
    """

    def __init__(self, method: LinearMethod | None = None) -> None:
        super().__init__()
        self.method = method or UnquantizedLinear()

    @abc.abstractmethod
    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Its matrices and norms, in the order of computation."""

    def multiply(self, name: str, x_XK: torch.Tensor, act: str = "") -> torch.Tensor:
        """Rows times a matrix, and what follows it."""
        weight = self.linears[name]
        out = x_XK.new_empty(len(x_XK), weight.out_features)
        self.method.apply(x_XK.contiguous(), weight, out)
        return activated(act, out)

    def normed(self, norm: Norm, name: str, x_XC: torch.Tensor) -> torch.Tensor:
        """Rows behind a norm."""
        out = torch.empty_like(x_XC, memory_format=torch.contiguous_format)
        apply_norm(norm, self.norms[name], x_XC.contiguous(), out)
        return out


def activated(act: str, x: torch.Tensor) -> torch.Tensor:
    """What is behind an activation of this name, or of none."""
    return ACTIVATIONS[kernel_activation(act)](x.float()).to(x.dtype) if act else x


class Tower(abc.ABC):
    """One encoder.

    Attributes:
        prefix: of its modules' names within the whole model.
        modules: those that the model's weights fill. An encoder may have others, which it reads itself.
        own_parameters: of these others.
    """

    prefix: str
    modules: list[Module]
    own_parameters = 0

    def sources(self) -> dict[str, CheckpointTensor]:
        """The checkpoint's tensors that fill its modules."""
        return {}

    def set_weight(self, module: str, weight: Weight) -> None:
        """Take a module's weight; `module` is its name here."""
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def buffer_bytes(self) -> int:
        """Memory of its own buffers, and of its pages when they are as many as one step needs."""

    @abc.abstractmethod
    def encode(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """What an item of a prompt is for the decoder, each in a tensor of its own. No gradient is kept."""


class LayeredTower(Tower):
    """One that runs the layers of a decoder.

    Args:
        prefix: of its modules' names within the whole model.
        parts: what it has besides layers.
        context: with a backend for the trunk's layers, and `max_tokens` as the rows of one step.
        slot_dtype: of slots in pages (`Capabilities.slot_dtype`).
        groups: which of a step's descriptions each layer reads; None: all the only one.
    """

    def __init__(
        self,
        prefix: str,
        trunk: DecoderSpec,
        parts: Sequence[TowerPart],
        context: ModelContext,
        slot_dtype: torch.dtype,
        groups: Sequence[int] | None = None,
    ) -> None:
        self.prefix, self._trunk, self._context = prefix, trunk, context
        self.decoder = Decoder(trunk, context)
        self._pages = RunPages(self.decoder, context, slot_dtype, groups)
        self._owners: dict[str, TowerPart] = {}
        self.modules = [
            dataclasses.replace(module, name=prefix + module.name, shard="none", plain=True)
            for module in self._list_modules(parts)
        ]

    def _list_modules(self, parts: Sequence[TowerPart]) -> Iterator[Module]:
        builder = ModuleBuilder(self._trunk)
        for part in parts:
            for module in part.modules(builder):
                self._owners[module.name] = part
                yield module
        yield from self.decoder.modules

    def sources(self) -> dict[str, CheckpointTensor]:
        return weight_table.sources_of(self.modules, self._trunk, ParallelPlan())

    def set_weight(self, module: str, weight: Weight) -> None:
        if module not in self._owners:
            self.decoder.take_weights([(module, weight)])
            return
        if isinstance(weight, LinearWeight):
            weight.name = self.prefix + module
        self._owners[module].set_weight(module, weight)

    @property
    def buffer_bytes(self) -> int:
        return self.decoder.buffer_bytes + self._pages.num_bytes(self._context.max_tokens)


class TowerDecoder(Decoder):
    """A decoder with encoders beside it: its own layers, and towers whose modules are in the same checkpoint.

    Args:
        towers: by what they read, a modality of items.
    """

    def __init__(self, spec: DecoderSpec, context: ModelContext, towers: Mapping[str, Tower]) -> None:
        super().__init__(spec, context)
        self.towers = towers
        self._num_own = len(self.modules)
        self._add_towers()

    def _add_towers(self) -> None:
        for tower in self.towers.values():
            self.modules = [*self.modules, *tower.modules]
            self.sources |= tower.sources()

    @property
    def buffer_bytes(self) -> int:
        return super().buffer_bytes + self._tower_bytes

    @property
    def _tower_bytes(self) -> int:
        return sum(tower.buffer_bytes for tower in self.towers.values())

    @property
    def media_width(self) -> int:
        """Columns of an embedding, with what joins behind the first layers."""
        return self.spec.hidden * (1 + (0 if self.spec.vision is None else len(self.spec.vision.taps)))

    def follow_names(self, names: Collection[str]) -> None:
        self.modules = self.modules[: self._num_own]
        super().follow_names(names)
        self._num_own = len(self.modules)
        self._add_towers()

    def _set_weight(self, module: str, weight: Weight) -> None:
        for tower in self.towers.values():
            if module.startswith(tower.prefix):
                tower.set_weight(module.removeprefix(tower.prefix), weight)
                return
        super()._set_weight(module, weight)

    def parts(self) -> Iterator[object]:
        yield from (*super().parts(), *self.towers.values())

    def describe(self) -> dict[str, Any]:
        report, own = super().describe(), sum(tower.own_parameters for tower in self.towers.values())
        return report | {
            "parameters": report["parameters"] + own,
            "weight_bytes": report["weight_bytes"] + own * self.context.activation_dtype.itemsize,
            "workspace_bytes": report["workspace_bytes"] + self._tower_bytes,
        }
