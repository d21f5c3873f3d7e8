"""From a pooling model's configuration to the layers that it runs and the head on top of them.

The layers are those of a generating model, without its matrix of logits. Knows names and shapes; reads no file.
"""

import dataclasses

from quire.config import HFConfig, ModelConfig, PoolingConfig
from quire.config.pooling import ENCODERS, IMAGES_ALONE, POSITIONS_AFTER_PADDING, RETRIEVERS
from quire.layers.pooling.head import HeadLayer
from quire.models.spec import DecoderSpec

HEAD_NAMES = (
    *("lm_head.*", "score.*", "v_head.*", "classifier.*", "pooler.*", "*.pooler.*", "head.*", "cls.*", "decoder.*"),
    *("embedding_proj_layer.*", "dense.*", "qa_outputs.*", "linear.*", "pre_classifier.*", "vocab_*"),
)
"""Names of a checkpoint that are no layer's: what of them is needed is read as the head."""
SCORE = ("score", "model.score", "classifier")
_POOLERS = ("pooler.dense", *(f"{prefix}.pooler.dense" for prefix in ("bert", "nomic_bert", "new", "gte")))
CLASSIFIERS: dict[str, tuple[tuple[str, ...], str, str]] = {
    **dict.fromkeys(ENCODERS, (_POOLERS, "tanh", "classifier")),
    **dict.fromkeys(POSITIONS_AFTER_PADDING, (("classifier.dense",), "tanh", "classifier.out_proj")),
    **dict.fromkeys(IMAGES_ALONE, ((), "", "classifier")),
    "DistilBert": (("pre_classifier",), "relu", "classifier"),
}
"""Encoders that classify: the names of the first matrix (none: there is no such), what follows it, and the last one's name."""
REWARD_HEADS: dict[str, tuple[str, ...]] = {"InternLM2": ("v_head",)}
"""Families whose reward models have one matrix without a bias, under a name of their own."""


def trunk_architectures(config: ModelConfig) -> list[str]:
    """The architectures whose layers a checkpoint has, its own first: the generating model of the family, or the bare one."""
    if config.pooling is None:
        return [config.architecture]
    family = config.pooling.family
    also_sees = ("ForConditionalGeneration",) if "text_config" in config.hf_config else ()
    return [config.architecture, *(family + suffix for suffix in (*also_sees, "ForCausalLM", "LMHeadModel", "Model"))]


def as_trunk(spec: DecoderSpec, config: ModelConfig) -> DecoderSpec:
    """A model without its matrix of logits, in which a token sees what the checkpoint was trained to see."""
    if not _pooling(config).is_causal:
        spec = spec.with_attention(causal=False)
    own = spec.weights.modules.get("lm_head")
    names = [f"{name}.*" for name in ((own,) if isinstance(own, str) else own or ())]
    weights = dataclasses.replace(spec.weights, ignored=(*spec.weights.ignored, *HEAD_NAMES, *names))
    # A head that is tied to the embeddings has no tensor of its own: the checkpoint's is neither expected nor missed.
    return dataclasses.replace(spec, weights=weights, tied_embeddings=True, lm_head_bias=False)


def pooling_head(config: ModelConfig, hidden: int) -> tuple[HeadLayer, ...]:
    """The layers between pooled hidden states and the model's numbers."""
    pooling = _pooling(config)
    if pooling.family == "CLIP":
        return (HeadLayer(("text_projection",), hidden, config.hf_config.get("projection_dim", 512), bias=False),)
    if pooling.family == "Siglip":
        size = config.hf_config.get("text_config", HFConfig({})).get("projection_size") or hidden
        return (HeadLayer(("text_model.head",), hidden, size),)
    if pooling.family in RETRIEVERS:
        return (HeadLayer(("embedding_proj_layer",), hidden, config.hf_config.get("embedding_dim", 128)),)
    if pooling.embeds:
        return tuple(
            HeadLayer(("linear",), dense.inputs, dense.outputs, dense.bias, dense.activation, dense.folder)
            for dense in pooling.dense
        )
    labels, is_classifier = pooling.num_labels, pooling.convert == "classify"
    if pooling.label_tokens:
        names = ("lm_head", "model.embed_tokens", "embed_tokens")
        return (HeadLayer(names, hidden, labels, bias=False, token_ids=pooling.label_tokens),)
    if config.architecture.endswith("RewardModel"):
        return _reward_head(pooling, hidden)
    if pooling.family == "ModernBert":
        return _modernbert_head(config.hf_config, hidden, labels)
    if is_classifier and pooling.family in CLASSIFIERS:
        dense, activation, last = CLASSIFIERS[pooling.family]
        first = [HeadLayer(dense, hidden, hidden, activation=activation)] if dense else []
        return (*first, HeadLayer((last,), hidden, labels))
    return (HeadLayer(SCORE, hidden, labels, bias=not is_classifier),)


def _reward_head(pooling: PoolingConfig, hidden: int) -> tuple[HeadLayer, ...]:
    """Two matrices with a ReLU between, unless the family has its own."""
    if pooling.family in REWARD_HEADS:
        return (HeadLayer(REWARD_HEADS[pooling.family], hidden, 1, bias=False),)
    first = HeadLayer(("score.0",), hidden, hidden, activation="relu")
    return (first, HeadLayer(("score.2",), hidden, pooling.num_labels))


def _modernbert_head(hf: HFConfig, hidden: int, labels: int) -> tuple[HeadLayer, ...]:
    dense = HeadLayer(
        ("head.dense",),
        hidden,
        hidden,
        bias=bool(hf.get("classifier_bias", False)),
        activation=hf.get("classifier_activation", "gelu"),
        norm=("head.norm",),
        norm_eps=hf.get("norm_eps", 1e-5),
    )
    return (dense, HeadLayer(("classifier",), hidden, labels))


def _pooling(config: ModelConfig) -> PoolingConfig:
    if config.pooling is None:
        raise ValueError(f"{config.architecture} does not pool")
    return config.pooling
