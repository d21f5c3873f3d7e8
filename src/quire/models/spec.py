"""What a decoder-only model is made of, as data. An architecture is a function from a config to a `DecoderSpec`.

Knows shapes and constants. Knows nothing of tensors' contents, devices, or how anything is computed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.recurrent import (
    ChannelMix,
    DeltaNet,
    KimiDelta,
    Lightning,
    Mamba,
    Mamba2,
    RgLru,
    ShortConv,
    TimeMix,
)
from quire.models.residual import PRE, HyperConnections, Joint, LayerInput, Norm, Placement, RMSNorm
from quire.models.rope import Rope, Sinusoids
from quire.models.sight import Group, Modules, Patches, Pooled, Queries, Stage
from quire.models.sound import BlockConformer, Chunks, Conformer, Frames

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Attention:
    """Grouped-query attention over pages.

    Attributes:
        rope: None where positions come from elsewhere (learned, or none at all).
        window: a token sees itself and the window - 1 tokens before it; 0 means all.
        chunk: a token sees those before it in its own chunk of so many tokens; 0 means all.
        causal: a token sees only those before it; without it every other (or window // 2 to either side).
        qk_norm: a norm of queries and keys; `qk_norm_span` says of what: each `head` with one weight for all of them, each
            of the `heads` with a weight of its own, or `all` heads at once.
        qk_norm_after_rope: the norm (of each `head`) comes after rotation.
        scale: of the scores; None means head_dim ** -0.5.
        soft_cap: scores become cap * tanh(score / cap); 0 means none.
        sinks: one learned score a head that takes part in the softmax and carries no value.
        clip_qkv: queries, keys and values are kept within plus and minus this; 0 means none.
        alibi: one slope a head; a score grows by slope * (key's position - query's position).
        output_gate: what attention gives is multiplied by the sigmoid of as many further columns of the query's matrix, or
            with `gate_span` "head" of one more column a head; `gate_kind` may say softplus in the place of the sigmoid.
        temperature: queries grow with their position.
        out_scale: multiplies the output.
        v_norm: a norm of each value head, without weights.
        sees_items: a token of an item (an image in a prompt) that says so also sees the item's tokens behind itself.
        k_is_v: values are the keys as they are before norm and rotation; the checkpoint has one matrix for both.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    window: int = 0
    chunk: int = 0
    causal: bool = True
    qk_norm: Norm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    qk_norm_span: Literal["head", "heads", "all"] = "head"
    qk_norm_after_rope: bool = False
    clip_qkv: float = 0.0
    alibi: tuple[float, ...] = ()
    output_gate: bool = False
    gate_span: Literal["value", "head"] = "value"
    gate_kind: Literal["sigmoid", "softplus"] = "sigmoid"
    temperature: Temperature | None = None
    out_scale: float = 1.0
    v_norm: RMSNorm | None = None
    k_is_v: bool = False
    sees_items: bool = False

    @property
    def is_local(self) -> bool:
        """Whether a token sees a bounded past."""
        return self.causal and bool(self.window or self.chunk)


@dataclasses.dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2): all heads share one small latent a token and one rotated part of a key; each
    head makes its own keys and values of the latent.

    Attributes:
        nope_dim: values of a query and a key head that come from the latent and do not rotate; `rope` rotates further ones.
        value_dim: of a head.
        kv_rank: size of the latent.
        q_rank: of the queries' own latent; 0 means that queries come straight from the input.
        norm: of both latents.
        scale: of the scores; None means (nope_dim + rotary_dim) ** -0.5.
        in_bias: of the matrices that make latents.
        temperature: queries grow with their position.
        head_gate: what attention gives is multiplied, head by head, by the sigmoid of one more learned score.
        q_latent_scale, kv_latent_scale: multiply the latents behind their norms.
        sinks: one learned score a head that takes part in the softmax and carries no value.
        output_gate: heads' values are multiplied by the sigmoid of a further matrix' outputs.
    """

    heads: int
    nope_dim: int
    value_dim: int
    kv_rank: int
    rope: Rope
    norm: RMSNorm
    q_rank: int = 0
    scale: float | None = None
    in_bias: bool = False
    out_bias: bool = False
    temperature: Temperature | None = None
    head_gate: bool = False
    q_latent_scale: float = 1.0
    kv_latent_scale: float = 1.0
    sinks: bool = False
    output_gate: bool = False


@dataclasses.dataclass(frozen=True)
class Temperature:
    """A query at position p is multiplied by 1 + growth * log(1 + floor((p + offset) / length)); without `steps` by
    1 + growth * log(max((p + offset) / length, 1))."""

    growth: float
    length: int
    offset: int = 0
    steps: bool = True


@dataclasses.dataclass(frozen=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)); `act` is a name as checkpoints use it (`silu`, `gelu_pytorch_tanh` …). `scale` multiplies
    gate and up, `out_scale` the output; with a `limit` above 0 gate is at most that (or `gate_limit`), and up
    between minus and plus that.
    `up_first`: a checkpoint's one matrix for both holds up before gate. `learned_scale`: the output is multiplied by a number of
    the checkpoint."""

    intermediate: int
    act: str
    bias: bool = False
    scale: float = 1.0
    out_scale: float = 1.0
    down_bias: bool = False
    limit: float = 0.0
    up_first: bool = False
    learned_scale: bool = False
    gate_limit: float | None = None


@dataclasses.dataclass(frozen=True)
class MLP:
    """down(act(up(x)))."""

    intermediate: int
    act: str
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class MoE:
    """A mixture of experts: each token's output is the weighted sum of the few experts that the router chooses for it.

    Attributes:
        routing: how many experts there are, and how a token chooses.
        intermediate: of one expert, a gated feed-forward; with `is_gated` off a plain one, and `experts_gate_up` is its `up`.
        bias_correction: the choice (not the weights) adds a learned bias to each expert's score.
        router_bias, experts_bias: whether the router's and the experts' matrices have biases.
        clamp: replaces the activation.
        scales_input: a token's weight multiplies what its expert reads rather than what it gives.
        shared: a feed-forward that every token takes besides.
        shared_gate: the shared output is multiplied by a sigmoid of one more learned score.
        latent: what experts read and give has this size, with one matrix before and one behind all of them; 0 means hidden.
        latent_bias: of these two.
        own_norms: the shared feed-forward has a norm behind it, the experts one before and one behind them, and the router
            reads a norm of its own: those of the router and the experts are norms of the residual (Gemma 4).
        expert_scales: a token's weight for an expert is multiplied by the expert's learned number.
        by_token: experts are looked up in a table of token ids; scores only weigh them.
        zero_experts: of `routing`'s experts the last so many have no matrices and give what they read (LongCat).
        out_bias: a vector that is added to the output.
        learned_scale: all weights of a token's experts are multiplied by a number of the checkpoint.
        always: the last so many of `routing`'s experts, which every token chooses (they count in `top_k`); the checkpoint has
            their matrices apart, and no bias on their choice.
        late: what experts give joins the residual with the next layer's feed-forward; the shared one joins at once.
    """

    routing: Routing
    intermediate: int
    act: str
    bias_correction: bool = False
    router_bias: bool = False
    experts_bias: bool = False
    clamp: ClampedSwiglu | None = None
    scales_input: bool = False
    is_gated: bool = True
    shared: GatedMLP | MLP | None = None
    shared_gate: bool = False
    latent: int = 0
    latent_bias: bool = False
    own_norms: RMSNorm | None = None
    expert_scales: bool = False
    by_token: bool = False
    zero_experts: int = 0
    out_bias: bool = False
    learned_scale: bool = False
    always: int = 0
    late: bool = False

    @property
    def num_experts(self) -> int:
        """Experts with matrices, but for those of every token."""
        return self.routing.num_experts - self.zero_experts - self.always


@dataclasses.dataclass(frozen=True)
class SharedBlock:
    """A transformer on the hidden states beside the embeddings, shared by layers: its weights are in the layer `owner`, where
    also this layer's adapters do, by `index`: of the feed-forward, and if `adapts_attention` of queries, keys and values."""

    attention: Attention
    mlp: GatedMLP
    owner: int
    index: int
    adapter_rank: int
    adapts_attention: bool = False


@dataclasses.dataclass(frozen=True)
class Zamba:
    """Zamba2's layer: Mamba-2 of norm(x), or of norm(x + what a block gives). `shape` is a block of the model, if it has one;
    `is_first` marks the layer that sees the embeddings."""

    mamba: Mamba2
    norm: RMSNorm
    block: SharedBlock | None
    shape: SharedBlock | None
    is_first: bool = False


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Mixers that read the same input; their outputs are added."""

    mixers: tuple[Mixer, ...]


Recurrent: TypeAlias = (
    Mamba | Mamba2 | DeltaNet | KimiDelta | Lightning | RgLru | TimeMix | ChannelMix | ShortConv | Zamba
)
Mixer: TypeAlias = Attention | MLA | Recurrent
"""And those of `variants.py`."""
FeedForward: TypeAlias = GatedMLP | MLP | MoE


@dataclasses.dataclass(frozen=True)
class LearnedPositions:
    """A table of `count` positions; the checkpoint's has `offset` further rows before them that no token uses."""

    count: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class WeightNames:
    """From a checkpoint's names to the model's modules.

    Attributes:
        modules: our name → the checkpoint's module name, or several whose rows are stacked in that order. Ours outside
            layers: `embedding`, `positions`, `token_types`, `final_norm`, `lm_head`. In a layer: `qkv` (one source for q, k
            and v; or one each; or q's and one for k and v), `out`, `q_norm`, `k_norm` (with `{head}` where each head has
            its own), `sinks`; of latent attention `q` or `q_a`, `q_a_norm`, `q_b`, then `kv_a`, `kv_a_norm`, `kv_b`,
            `out`; `gate_up`, `mlp_scale`, `up`, `act_positive` and `act_negative` (of xIELU), `down`, `before_mixer`,
            `after_mixer`, `before_mlp`, `after_mlp`. In a mixture: `router`, `router_bias` (of the choice), `experts_gate_up` and
            `experts_down` (with `{expert}` for its number), `experts_gate_up_bias` and `experts_down_bias` ([experts,
            rows]), `always_gate_up` and `always_down` (of the experts of every token), `experts_scale`, `experts_in` and
            `experts_out` (of latents), `shared_gate_up`, `shared_down`, `shared_gate`; with norms of its own
            `shared_after`, `experts_before`, `experts_after`, `router_scale`; `expert_scales`. Of layer inputs, outside layers
            `input_embedding`, `input_projection`, `input_norm`, in a layer `input_gate`, `input_out`, `after_input`.
            `layer_scale`. Of streams `mixer_hyper`, `mlp_hyper` (with `_base` and `_scale` behind each), outside layers
            `hyper_head` and these. Of learned joints `after_mixer_scale`, `after_mlp_scale`. Of an indexer `index_q`,
            `index_k`, `index_k_norm`, `index_weights`. Attention that makes only queries has `q`, one whose values are its
            keys `qk`. Of relative attention also `relative` (or `buckets`), and of convolutions `kv_conv`, `out_conv`,
            `mlp_conv`.
        prefixes: possible prefixes of every name but `lm_head`'s; the one that the checkpoint uses is found by its embedding.
        layer: the prefix of a layer's names.
        transposed: modules whose matrices are stored [in, out] (GPT-2's Conv1D).
        by_head: modules of which a source with several parts (q, k, v) has them head by head: a KV head's queries, its key,
            its value, then the next one's.
        by_group: modules of which one source has its parts in so many groups, in another order: module -> (order, groups).
        ignored: patterns (as in shells) of names that carry nothing to load.
        stacked: for experts' matrices: the tensor [experts, rows, columns] (or `transposed`) that checkpoints have in the
            place of one an expert, some of them or, where `modules` has no such name, all of them; or two, of gate and of up.
        padded: of embeddings and the head, those whose tensor may have further rows, which no token uses.
        interleaved: modules of which a source with two parts (gate and up) has them row by row in turn.
        row_vectors: vectors that are stored as a matrix of one row.
        unbiased: sources that have no bias where their module has one.
        sublayers: how many of our layers one layer of the checkpoint holds; names have its number in place of `{sub}`, or
            counted from 1 in place of `{sub1}`.
        bias_scales: modules whose biases are multiplied when they are loaded: what multiplies the module's output in the
            spec multiplies in the model only some of the terms.
        flattened: what is stored with more dimensions than it has here: its numbers are read in order.
        bare: matrices and tables whose names in the checkpoint have no `.weight` behind them.
        aliases: parts of names that a checkpoint may have in the place of ours: theirs -> ours.
        sub_words: what names have in the place of `{word}`, by the number of the sublayer.
    """

    modules: Mapping[str, str | tuple[str, ...]]
    prefixes: tuple[str, ...] = ("model.", "")
    layer: str = "layers.{layer}."
    transposed: tuple[str, ...] = ()
    by_head: tuple[str, ...] = ()
    by_group: Mapping[str, tuple[tuple[int, ...], int]] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ("*.inv_freq",)
    stacked: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=dict)
    padded: tuple[str, ...] = ()
    interleaved: tuple[str, ...] = ()
    row_vectors: tuple[str, ...] = ()
    unbiased: tuple[str, ...] = ()
    sublayers: int = 1
    bias_scales: Mapping[str, float] = dataclasses.field(default_factory=dict)
    flattened: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sub_words: tuple[str, ...] = ("",)
    bare: tuple[str, ...] = ()

    def but(self, drop: tuple[str, ...] = (), **modules: str | tuple[str, ...]) -> WeightNames:
        """A copy with some modules named otherwise, and those in `drop` left out."""
        kept = {name: value for name, value in self.modules.items() if name not in drop}
        return dataclasses.replace(self, modules=kept | modules)


@dataclasses.dataclass(frozen=True)
class VisionSpec:
    """Eyes of a decoder: an encoder of images, and what makes embeddings of its output.

    Attributes:
        trunk: the encoder, with `patches`; its table of names has the projector's modules, too.
        projector: from the trunk's rows to embeddings, in order.
        taps: of each of the trunk's `taps` in order, a projector whose output is added behind the decoder's layer of the same
            number; empty: the taps side by side are what the projector reads, if there are any.
        between: modules of learned rows that stand between those of an image: places in a prompt that are -1 have the first
            of them, -2 the second; or one module, a table of `between_rows`. `projects_between`: they are rows of the trunk's,
            and the projector makes embeddings of them.
        grouped: the frontend names the rows of the trunk that become an embedding. pooled: how they become one row before the
            projector; else it reads them one after another.
        added: which of the learned rows is added to each of the projector's.
    """

    trunk: DecoderSpec
    projector: tuple[Stage, ...]
    taps: tuple[tuple[Stage, ...], ...] = ()
    between: tuple[str, ...] = ()
    projects_between: bool = False
    between_rows: int = 1
    grouped: bool = False
    pooled: Pooled | None = None
    added: int | None = None


@dataclasses.dataclass(frozen=True)
class EncoderSpec:
    """What reads text, sound or images for a decoder: beside the prompt, for layers with `CrossAttention`; or the sounds in it.

    Attributes:
        trunk: the encoder. Of text it has the decoder's embeddings.
        length: rows of the longest that it may read at once.
        projector: from the trunk's rows to embeddings, for sounds in a prompt; its modules are in the trunk's table of names.
        beside: the same of sounds in a prompt that has images, too; empty: there is no other.
    """

    trunk: DecoderSpec
    length: int
    projector: tuple[Stage, ...] = ()
    beside: tuple[Stage, ...] = ()

    @property
    def group(self) -> int:
        """Rows that make one embedding, or as many as are `given`."""
        return math.prod(stage.count for stage in self.projector if isinstance(stage, Group | Queries))

    @property
    def given(self) -> int:
        """Embeddings that a group makes."""
        return next((stage.queries for stage in self.projector if isinstance(stage, Queries)), 1)


@dataclasses.dataclass(frozen=True)
class Features:
    """What a head that drafts reads of the model that it drafts for, beside the next token's embedding.

    Attributes:
        layers: before which of the model's layers its residual is read; the number of all: behind its last norm.
        width: of the model.
        tokens: rows of the embedding.
        is_beside: the first layer's queries, keys and values read the normed embedding and the normed residual side by side
            (EAGLE-3; norms are the layer's own and `hidden_norm`), and features become the residual. Otherwise a matrix makes
            the residual of embedding and features together.
        normed: of the latter: whether both have a norm before that (`token_norm`, `hidden_norm`). bias: of the matrix.
        masked: it has features that stand for those of tokens that are not known yet.
        norms_residual: with `is_beside` the first layer adds to the normed features, not to themselves.
        maps_tokens: the head has its own vocabulary, with a table of how far each of its tokens is from the model's.
        borrows: modules that are the model's.
    """

    layers: tuple[int, ...]
    width: int
    tokens: int
    is_beside: bool = False
    normed: bool = False
    bias: bool = False
    masked: bool = False
    norms_residual: bool = False
    maps_tokens: bool = False
    borrows: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only language model, or an encoder.

    Attributes:
        mixer, mlp: one for all layers, or one for each; None for a layer that lacks this half.
        placement: of norms; one for all layers, or one for each.
        max_positions: the longest context that the checkpoint was made for.
        token_types: rows of a table of segments that is added to the embeddings; 0 means none.
        embedding_norm: between the embeddings and the first layer.
        first_norm: whether the first layer has the norm before its mixer, as the others have.
        embedding_scale, residual_scale, logits_scale: multiply embeddings, each half's output, and the logits. `scales_given`:
            the first one also multiplies embeddings that are given in the place of tokens.
        joints: of each layer's mixer and feed-forward, where the residual loses something when they join it.
        logits_soft_cap: logits become cap * tanh(logits / cap); 0 means none.
        final_norm: whether there is a norm before the head. `final_eps`: its epsilon, where it is not the other norms'.
        embedding_width: of embeddings and head, where matrices `project_in` and `project_out` are between them and the
            layers; 0 means hidden.
        normalized_head: each row of the head is divided by its length when it is loaded.
        layer_input: joins the residual behind each layer's halves.
        hyper: streams in the place of the residual.
        layer_scale: behind each layer the residual is multiplied by a number of the checkpoint.
        features: of a head that drafts.
        patches: what it reads in the place of tokens.
        taps: layers behind which the residual is kept for others to read.
        vision: how it sees images. hearing: how it hears sounds that are in the prompt.
        frames: what it reads of sound, in the place of tokens; or of images, in the place of those that stand for one.
        encoder: what reads beside the prompt.
        reads_items: it has no embedding: all its rows are items'.
        borrows_embedding: it has no embedding of its own, but that of the decoder whose encoder it is.
        added_tokens: the last of `vocab` tokens, whose rows the checkpoint does not have.
        bounded: what each matrix of a layer reads and gives is kept within bounds, which the checkpoint has.
    """

    vocab: int
    hidden: int
    layers: int
    mixer: Mixer | tuple[Mixer | SideBySide | None, ...]
    mlp: FeedForward | tuple[FeedForward | None, ...]
    norm: Norm
    weights: WeightNames
    max_positions: int
    placement: Placement | tuple[Placement, ...] = PRE
    learned_positions: LearnedPositions | Sinusoids | None = None
    token_types: int = 0
    embedding_norm: Norm | None = None
    first_norm: bool = True
    final_norm: bool = True
    final_eps: float | None = None
    tied_embeddings: bool = False
    lm_head_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float = 0.0
    embedding_width: int = 0
    normalized_head: bool = False
    joints: tuple[tuple[Joint, Joint], ...] = ()
    layer_input: LayerInput | None = None
    hyper: HyperConnections | None = None
    layer_scale: bool = False
    patches: Patches | None = None
    taps: tuple[int, ...] = ()
    vision: VisionSpec | None = None
    features: Features | None = None
    scales_given: bool = False
    frames: Frames | Chunks | Conformer | BlockConformer | Modules | None = None
    encoder: EncoderSpec | None = None
    borrows_embedding: bool = False
    hearing: EncoderSpec | None = None
    reads_items: bool = False
    added_tokens: int = 0
    bounded: bool = False

    @property
    def towers(self) -> tuple[DecoderSpec, ...]:
        """Encoders in the same checkpoint."""
        parts = (self.vision, self.hearing, self.encoder)
        return tuple(part.trunk for part in parts if part is not None)

    def mixers_of(self, layer: int) -> tuple[Mixer, ...]:
        """The mixers of one layer: one, several side by side, or none."""
        mixer = _each_layer(self.mixer, self.layers, "mixer")[layer]
        if isinstance(mixer, SideBySide):
            return mixer.mixers
        return () if mixer is None else (mixer,)

    def placements(self) -> tuple[Placement, ...]:
        """Where each layer has norms."""
        return _each_layer(self.placement, self.layers, "placement")

    def joints_of(self, layer: int) -> dict[str, Joint]:
        """How a layer's halves join the residual, by place, where that is no plain sum."""
        joints = self.joints[layer] if self.joints else ()
        return {place: joint for place, joint in zip(("after_mixer", "after_mlp"), joints) if joint != Joint()}  # noqa: B905

    def attentions(self) -> tuple[Attention, ...]:
        """One attention a layer.

        Raises:
            TypeError: some layer has another mixer.
        """
        mixers = _each_layer(self.mixer, self.layers, "mixer")
        attentions = tuple(mixer for mixer in mixers if isinstance(mixer, Attention))
        if len(attentions) < len(mixers):
            raise TypeError("not every layer's mixer is attention")
        return attentions

    def mlps(self) -> tuple[FeedForward | None, ...]:
        """One feed-forward a layer."""
        return _each_layer(self.mlp, self.layers, "mlp")

    def map_attention(self, change: Callable[[Attention], Attention]) -> DecoderSpec:
        """A copy in which every attention is changed."""

        def changed(mixer: Mixer | SideBySide | None) -> Mixer | SideBySide | None:
            if isinstance(mixer, SideBySide):
                return SideBySide(tuple(change(each) if isinstance(each, Attention) else each for each in mixer.mixers))
            return change(mixer) if isinstance(mixer, Attention) else mixer

        return dataclasses.replace(self, mixer=tuple(map(changed, _each_layer(self.mixer, self.layers, "mixer"))))

    def with_attention(self, **changes: Any) -> DecoderSpec:
        """A copy in which every attention has these fields."""
        return self.map_attention(lambda attention: dataclasses.replace(attention, **changes))

    def with_patches(self, **changes: Any) -> DecoderSpec:
        """A copy whose patches have these fields; itself where it reads none."""
        if self.patches is None:
            return self
        return dataclasses.replace(self, patches=dataclasses.replace(self.patches, **changes))

    def without_windows(self) -> DecoderSpec:
        """A copy in which every layer sees the whole context."""
        return self.with_attention(window=0, chunk=0)


def _each_layer(value: T | tuple[T, ...], layers: int, name: str) -> tuple[T, ...]:
    each = value if isinstance(value, tuple) else (value,) * layers
    if len(each) != layers:
        raise ValueError(f"DecoderSpec.{name} has {len(each)} entries for {layers} layers")
    return each
