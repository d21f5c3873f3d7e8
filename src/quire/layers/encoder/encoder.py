"""An encoder beside a decoder, which runs the layers of one: what a request has beside its prompt in, rows out.

It is whole on every rank. Knows nothing of requests or caches.
Legend: T rows of the step, E rows of an item, D hidden, B bins, F frames.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.types import LinearWeight
from quire.layers import weights as weight_table
from quire.layers.assembly import Weight
from quire.layers.decoder import Decoder
from quire.layers.encoder.mel_front import MelFront
from quire.layers.interface import ModelContext, StepInputs
from quire.layers.modules import Module, ModuleBuilder
from quire.layers.parallel import ParallelPlan
from quire.layers.run_pages import RunPages
from quire.layers.weights import CheckpointTensor
from quire.models.spec import EncoderSpec

PREFIX = "encoder."
"""Of its modules' names within the whole model."""
TOKENS = "token_ids"
MEL = "mel"
"""What an item has: token ids [E], or frames [B, F]."""
Arrays = Mapping[str, npt.NDArray[Any]]


class Encoder:
    """An encoder of text or of sound.

    Args:
        context: with a backend for the trunk's layers, and `max_tokens` as the rows of one step.
        slot_dtype: of slots in pages (`Capabilities.slot_dtype`).
    """

    def __init__(self, spec: EncoderSpec, context: ModelContext, slot_dtype: torch.dtype = torch.int64) -> None:
        self.spec, self._context = spec, context
        self.decoder = Decoder(spec.trunk, context)
        self._front = None if spec.trunk.frames is None else MelFront(spec.trunk.frames)
        self._pages = RunPages(self.decoder, context, slot_dtype)
        self.modules = list(self._list_modules())

    def _list_modules(self) -> Iterator[Module]:
        builder = ModuleBuilder(self.spec.trunk)
        front = [] if self._front is None else list(self._front.modules(builder))
        self._of_front = [module.name for module in front]
        for module in [*front, *self.decoder.modules]:
            yield dataclasses.replace(module, name=PREFIX + module.name, shard="none", plain=True)

    def sources(self) -> dict[str, CheckpointTensor]:
        """The checkpoint's tensors that fill its modules."""
        return weight_table.sources_of(self.modules, self.spec.trunk, ParallelPlan())

    def set_weight(self, module: str, weight: Weight) -> None:
        """Take a module's weight; `module` is its name here."""
        if module in self._of_front and self._front is not None:
            if isinstance(weight, LinearWeight):
                weight.name = PREFIX + module
            self._front.set_weight(module, weight)
        else:
            self.decoder.take_weights([(module, weight)])

    @property
    def buffer_bytes(self) -> int:
        """Memory of its own buffers, and of its pages when they are as many as one step needs."""
        return self.decoder.buffer_bytes + self._pages.num_bytes(self._context.max_tokens)

    def encode(self, items: Sequence[Arrays]) -> list[torch.Tensor]:
        """The rows [E, D] of items that are computed together, each in a tensor of its own. No gradient is kept."""
        with torch.no_grad():
            if self._front is None:
                lengths = [len(item[TOKENS]) for item in items]
                ids_T = torch.from_numpy(np.concatenate([item[TOKENS] for item in items]).astype(np.int32))
                step = self._step(lengths, ids_T.to(self._context.device))
            else:
                rows = [self._hear(self._front, item[MEL]) for item in items]
                lengths = list(map(len, rows))
                step = self._step(lengths, None, torch.cat(rows))
            self.decoder.begin_step(step)
            self.decoder.forward(step)
            return [part.clone() for part in self.decoder.compute_hidden(step).split(lengths)]

    def _hear(self, front: MelFront, mel_BF: npt.NDArray[Any]) -> torch.Tensor:
        mel = torch.from_numpy(mel_BF.copy()).to(self._context.device, self._context.activation_dtype)
        return front(mel[None])

    def _step(
        self, lengths: Sequence[int], ids_T: torch.Tensor | None, embedded: torch.Tensor | None = None
    ) -> StepInputs:
        within_T = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        positions_T = torch.from_numpy(within_T).to(self._context.device)
        return StepInputs(
            input_ids=positions_T if ids_T is None else ids_T,
            positions=positions_T,
            logits_index=positions_T[:0],
            attention=[self._pages.describe(lengths, positions_T)],
            num_tokens=len(within_T),
            embedded=embedded,
        )
