"""What the model runner and a model say to one another.

Legend: T tokens of the step, S positions that need logits, V vocabulary, D hidden.
"""

import abc
import dataclasses
from collections.abc import Iterable

import torch

from quire.attention.interface import AttentionMetadata
from quire.config.kv_spec import KVCacheSpec


@dataclasses.dataclass
class StepInputs:
    """A step as tensors; persistent buffers of the model runner at their largest size, with this step's counts.

    Attributes:
        input_ids: int32 [max_T].
        positions: int32 [max_T].
        logits_index: int32 [max_S]; which tokens need logits.
        attention: one description a KV group; they share query_start, seq_lens, rows, positions and shape.
        num_tokens, num_logits: how much of the buffers is meant.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor
    attention: list[AttentionMetadata]
    num_tokens: int = 0
    num_logits: int = 0


class CausalLM(abc.ABC):
    """A loaded model. Buffers for intermediate results are its own, allocated once for `max_tokens`, `max_logits`."""

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One spec a layer."""

    @abc.abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """One streaming pass over (checkpoint name, tensor). Raises ConfigError that lists missing and unknown names."""

    @abc.abstractmethod
    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        """Layer i's pages, and which of `StepInputs.attention` describes them."""

    @abc.abstractmethod
    def forward(self, step: StepInputs) -> torch.Tensor:
        """Run the layers over the step's tokens; returns final hidden states before the last norm, a view [T, D] of the
        model's own buffer. Uses only preallocated buffers and `kernels.ops`, so that it can be recorded and replayed."""

    @abc.abstractmethod
    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        """Float32 logits [S, V] at `logits_index` of the hidden states that `forward` left: a view of an own buffer."""
