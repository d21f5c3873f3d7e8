"""Whisper: an encoder of log-mel frames, and a decoder that writes what was said."""

from quire.config.hf_config import HFConfig
from quire.models.patterns import with_cross_attention
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.sound import Frames
from quire.models.spec import MLP, Attention, DecoderSpec, EncoderSpec, LearnedPositions, WeightNames

PREFIXES = ("model.", "")
UNBIASED = ("k_proj",)
NAMES: dict[str, str | tuple[str, ...]] = {
    "before_mlp": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def encoder_names(part: str = "encoder.") -> WeightNames:
    """The names of an encoder's matrices, in a part of this name."""
    return WeightNames(
        prefixes=PREFIXES,
        layer=part + "layers.{layer}.",
        modules=NAMES
        | {
            "conv1": part + "conv1",
            "conv2": part + "conv2",
            "positions": part + "embed_positions",
            "before_mixer": "self_attn_layer_norm",
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": "self_attn.out_proj",
            "final_norm": part + "layer_norm",
        },
        unbiased=UNBIASED,
    )


DECODER_NAMES = WeightNames(
    prefixes=PREFIXES,
    layer="decoder.layers.{layer}.",
    modules=NAMES
    | {
        "embedding": "decoder.embed_tokens",
        "positions": "decoder.embed_positions",
        "before_mixer": "{word}_layer_norm",
        "qkv": ("{word}.q_proj", "{word}.k_proj", "{word}.v_proj"),
        "q": "{word}.q_proj",
        "kv": ("{word}.k_proj", "{word}.v_proj"),
        "out": "{word}.out_proj",
        "final_norm": "decoder.layer_norm",
    },
    unbiased=UNBIASED,
    sub_words=("self_attn", "encoder_attn"),
    ignored=("proj_out.weight",),
)
NO_TOKENS = 1
"""The vocabulary of an encoder that reads no tokens."""


def _attention(hidden: int, heads: int, *, causal: bool) -> Attention:
    return Attention(heads, heads, hidden // heads, causal=causal, qkv_bias=True, out_bias=True)


def whisper_trunk(hf: HFConfig, names: WeightNames) -> DecoderSpec:
    """The encoder that a config of Whisper's kind describes."""
    length = hf.get("max_source_positions", 1500)
    act = hf.get("activation_function", "gelu")
    return DecoderSpec(
        vocab=NO_TOKENS,
        hidden=hf.d_model,
        layers=hf.encoder_layers,
        mixer=_attention(hf.d_model, hf.encoder_attention_heads, causal=False),
        mlp=MLP(hf.encoder_ffn_dim, act=act, bias=True),
        norm=LayerNorm(1e-5),
        weights=names,
        max_positions=length,
        learned_positions=LearnedPositions(length),
        tied_embeddings=True,
        frames=Frames(hf.get("num_mel_bins", 80)),
    )


@register("WhisperForConditionalGeneration")
def whisper(hf: HFConfig) -> DecoderSpec:
    """Whisper of every size, and what was distilled of it."""
    hidden, positions = hf.d_model, hf.get("max_target_positions", 448)
    spec = DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hidden,
        layers=hf.decoder_layers,
        mixer=_attention(hidden, hf.decoder_attention_heads, causal=True),
        mlp=MLP(hf.decoder_ffn_dim, act=hf.get("activation_function", "gelu"), bias=True),
        norm=LayerNorm(1e-5),
        weights=DECODER_NAMES,
        max_positions=positions,
        learned_positions=LearnedPositions(positions),
        tied_embeddings=True,
        embedding_scale=hidden**0.5 if hf.get("scale_embedding", False) else 1.0,
    )
    return with_cross_attention(
        spec, EncoderSpec(whisper_trunk(hf, encoder_names()), hf.get("max_source_positions", 1500))
    )
