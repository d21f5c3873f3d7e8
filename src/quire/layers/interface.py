"""What the model runner and a model say to one another.

Legend: T tokens of the step, S positions that need logits, V vocabulary, D hidden.
"""

import abc
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from quire.attention.interface import AttentionBackend, AttentionMetadata, AttentionRequest
from quire.config.hf_config import HFConfig
from quire.config.kv_spec import KVCacheSpec
from quire.distributed.communicator import Communicator, SingleRank
from quire.distributed.token_exchange import TokenExchange
from quire.errors import ConfigError
from quire.layers.linear import LinearMethod, UnquantizedLinear
from quire.layers.parallel import ParallelPlan, StagePlan


@dataclasses.dataclass
class PatchInputs:
    """What an encoder of images reads.

    Attributes:
        rows_TP: the patches' numbers; zeros where a class token stands.
        class_rows: which tokens these are; None where the encoder has none.
        blend_KT, weights_KT: each token's position is a weighted sum of K rows of the table, if it is no row of it.
    """

    rows_TP: torch.Tensor
    class_rows: torch.Tensor | None = None
    blend_KT: torch.Tensor | None = None
    weights_KT: torch.Tensor | None = None


@dataclasses.dataclass
class MediaInputs:
    """Embeddings that take the place of tokens' own.

    Attributes:
        is_media_T: bool [max_T]; which tokens.
        rows_TE: [max_T, E]: their embeddings; behind these, what joins the residual behind the first layers, one after another.
        seen_end_T: `AttentionMetadata.seen_end`, of models with layers that see items whole.
    """

    is_media_T: torch.Tensor
    rows_TE: torch.Tensor
    seen_end_T: torch.Tensor | None = None

    def place(self, out_TD: torch.Tensor) -> None:
        """Put embeddings in their tokens' places."""
        count, width = out_TD.shape
        torch.where(self.is_media_T[:count, None], self.rows_TE[:count, :width], out_TD, out=out_TD)

    def ids_of_text(self, ids_T: torch.Tensor, media_id: int) -> torch.Tensor:
        """A step's token ids, with this one in the places of embeddings."""
        return torch.where(self.is_media_T[: len(ids_T)], media_id, ids_T)

    def join(self, number: int, residual_TD: torch.Tensor) -> None:
        """Add what joins behind a layer to the residual of these tokens."""
        count, width = residual_TD.shape
        start = (number + 1) * width
        residual_TD.add_(self.rows_TE[:count, start : start + width] * self.is_media_T[:count, None])


@dataclasses.dataclass
class StepInputs:
    """A step as tensors; persistent buffers of the model runner at their largest size, with this step's counts.

    Attributes:
        input_ids: int32 [max_T].
        positions: int32 [max_T].
        logits_index: int32 [max_S]; which tokens need logits.
        token_types: int32 [max_T]; the segment of each token, for models that have a table of them; else None.
        attention: one description a KV group; they share query_start, seq_lens, rows, positions and shape.
        num_tokens, num_logits: how much of the buffers is meant.
        features: [T, D] each; what a head that drafts reads of the model's layers; None: what its own last pass has left.
        sampled: the tokens at `logits_index` by themselves, each as a request of one token, where the hidden states of the
            others are not used: a model may then compute only these in its last layer, which still keeps keys and values
            of all tokens. It has counts and `attention` of its own; the rest is this step's.
        axes: int32 [max_T, A]; each token's position on every axis, for models whose positions have several.
        patches: for encoders of images, in the place of `input_ids`.
        media: embeddings in the place of some tokens' own; None for a step without any.
        embedded: [T, D]; for encoders of sound, in the place of `input_ids`.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor
    attention: list[AttentionMetadata]
    num_tokens: int = 0
    num_logits: int = 0
    token_types: torch.Tensor | None = None
    features: "list[torch.Tensor] | None" = None
    sampled: "StepInputs | None" = None
    axes: torch.Tensor | None = None
    patches: PatchInputs | None = None
    media: MediaInputs | None = None
    embedded: torch.Tensor | None = None

    def take_media(self, media: MediaInputs | None) -> None:
        """Let media stand in this step, or none."""
        self.media = media
        for metadata in self.attention:
            metadata.seen_end = None if media is None else media.seen_end_T


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelContext:
    """What a model is made from, besides its spec.

    Attributes:
        dtype: type of the weights. `kv_dtype`: of keys and values in their pages. `activation_dtype`: of the platform's
            buffers between layers.
        block_size: tokens a page.
        max_tokens, max_logits: the largest step.
        backend: computes attention; made for layers as `attention_requests` lists them.
        max_positions: tokens that a request may have; 0 means as many as the spec names.
        linear_method: format of the matrices.
        plan: this rank's share.
        stage: which layers this rank has.
        communicator: sums over ranks.
        exchange: brings tokens to experts that are whole on other ranks; None: every rank computes its own for all tokens.
        deterministic: a request's logits must be the same to the bit in any batch.
        path: the checkpoint's folder, and `hf` its config.json: for model classes that read them by themselves.
        seed: of random weights that a model class makes by itself.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    activation_dtype: torch.dtype
    block_size: int
    max_tokens: int
    max_logits: int
    backend: AttentionBackend
    max_positions: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    linear_method: LinearMethod = dataclasses.field(default_factory=UnquantizedLinear)
    plan: ParallelPlan = dataclasses.field(default_factory=ParallelPlan)
    stage: StagePlan = dataclasses.field(default_factory=StagePlan)
    communicator: Communicator = dataclasses.field(default_factory=SingleRank)
    exchange: TokenExchange | None = None
    deterministic: bool = False
    path: str = ""
    hf: HFConfig = dataclasses.field(default_factory=lambda: HFConfig({}))
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext(ModelContext):
    """What the layers of one model have in common.

    Attributes:
        tables: what layers share and one of them made, by what it was made from (rotary tables by `Rope`).
    """

    hidden: int
    tables: dict[Any, Any] = dataclasses.field(default_factory=dict)


class CausalLM(abc.ABC):
    """A loaded model. Buffers for intermediate results are its own, allocated once for `max_tokens`, `max_logits`.

    A class of its own can be registered for an architecture (`ModelRegistry.register_model`): it is then made from a
    `ModelContext`.
    """

    attention_backend: AttentionBackend
    num_axes: int = 0
    """Axes of each token's position; 0 where a position is one number."""
    can_replay: bool = True
    """Whether a step can be recorded, or captured as a graph, and run again for other requests."""

    @classmethod
    def attention_requests(
        cls, hf: HFConfig, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        """What its layers need of an attention backend, each kind of layer once; for classes that are registered.

        Raises:
            ConfigError: the config is not one that it can run.
        """
        raise NotImplementedError

    @property
    @abc.abstractmethod
    def buffer_bytes(self) -> int:
        """Memory of its own buffers."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Numbers for `quire explain`: at least `parameters`, `weight_bytes`, `workspace_bytes`, `hidden` and `dtype`."""

    @abc.abstractmethod
    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """One spec a layer."""

    @abc.abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """One streaming pass over (checkpoint name, tensor). Raises ConfigError that lists missing and unknown names."""

    def load_dummy(self) -> None:
        """Random weights in place of a checkpoint's.

        Raises:
            ConfigError: this class has none.
        """
        raise ConfigError(f"load_format='dummy': {type(self).__name__} has no random weights", setting="load_format")

    def parts(self) -> Iterator[object]:
        """What takes part in `post_load` if it has such a method: the backend, and whatever else a class adds."""
        yield self.attention_backend

    def post_load(self) -> None:
        """All weights are there, or have changed: every part that has a `post_load` is told, before a step is recorded."""
        for part in self.parts():
            finish = getattr(part, "post_load", None)
            if finish is not None:
                finish()

    @abc.abstractmethod
    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        """Layer i's pages, and which of `StepInputs.attention` describes them."""

    def begin_step(self, step: StepInputs) -> None:
        """What of a step is not recorded with `forward`, and comes before it: on a device that captures steps it is captured,
        too, so it uses only preallocated buffers."""

    @abc.abstractmethod
    def forward(self, step: StepInputs) -> torch.Tensor:
        """Run the layers over the step's tokens; returns final hidden states before the last norm, a view [T, D] of the
        model's own buffer. Uses only preallocated buffers and `kernels.ops`, so that it can be recorded and replayed."""

    def payload(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """What a stage of a pipeline hands to the next one, by name: views of own buffers, which `forward` has left, and from
        which the next stage's goes on.

        Raises:
            ConfigError: this class of models has no stages.
        """
        message = f"{type(self).__name__} has no stages: pipeline_parallel_size must be 1"
        raise ConfigError(message, setting="pipeline_parallel_size")

    def compute_hidden(self, step: StepInputs) -> torch.Tensor:
        """The hidden states [T, D] that `forward` left, after the last norm: a view of an own buffer.

        Raises:
            ConfigError: this class of models gives none.
        """
        raise ConfigError(f"{type(self).__name__} cannot pool: runner='pooling' needs a spec", setting="runner")

    @abc.abstractmethod
    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        """Float32 logits [S, V] at `logits_index` of the hidden states that `forward` left: a view of an own buffer."""
