"""T5, mT5 and UMT5: positions are numbers on attention's scores, one a head and a bucket of distances."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.patterns import with_cross_attention
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import MLP, DecoderSpec, EncoderSpec, GatedMLP, WeightNames
from quire.models.variants import BucketAttention


def _names(part: str, ends: int, is_gated: bool) -> WeightNames:
    """Of one half, whose layers have so many parts."""
    mlp, inner = f"layer.{ends - 1}", f"layer.{ends - 1}.DenseReluDense."
    qkv = tuple("layer.{sub}.{word}." + part for part in "qkv")
    return WeightNames(
        prefixes=("",),
        layer=part + ".block.{layer}.",
        modules={
            "embedding": "shared",
            "before_mixer": "layer.{sub}.layer_norm",
            "qkv": qkv,
            "q": qkv[0],
            "kv": qkv[1:],
            "out": "layer.{sub}.{word}.o",
            "buckets": "layer.0.SelfAttention.relative_attention_bias.weight",
            "before_mlp": mlp + ".layer_norm",
            "down": inner + "wo",
            "final_norm": part + ".final_layer_norm",
            "lm_head": "lm_head",
            **({"gate_up": (inner + "wi_0", inner + "wi_1")} if is_gated else {"up": inner + "wi"}),
        },
        sub_words=("SelfAttention", "EncDecAttention") if part == "decoder" else ("SelfAttention",),
        ignored=("*coder.embed_tokens.weight", "decoder.*.EncDecAttention.relative_attention_bias.weight"),
    )


def _half(hf: HFConfig, part: str, kind: str, *, own_tables: bool) -> DecoderSpec:
    is_decoder, is_first = part == "decoder", hf.architectures[0].startswith("T5")
    heads, layers = hf.get("num_heads", 8 if is_first else 6), hf.get("num_layers", 6 if is_first else 8)
    layers = hf.get("num_decoder_layers", layers) if is_decoder else layers
    first = BucketAttention(
        heads,
        heads,
        hf.get("d_kv", 64),
        causal=is_decoder,
        scale=1.0,
        buckets=hf.get("relative_attention_num_buckets", 32),
        furthest=hf.get("relative_attention_max_distance", 128),
    )
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.get("d_model", 512),
        layers=layers,
        mixer=(first, *[first if own_tables else dataclasses.replace(first, table_layer=0)] * (layers - 1)),
        mlp=(GatedMLP if kind.startswith("gated-") else MLP)(
            hf.get("d_ff", 2048 if is_first else 1024),
            act="gelu_new" if kind == "gated-gelu" else kind.rpartition("-")[2],
        ),
        norm=RMSNorm(hf.get("layer_norm_epsilon", 1e-6)),
        weights=_names(part, 2 + is_decoder, kind.startswith("gated-")),
        max_positions=hf.get("n_positions", 512),
        tied_embeddings=True,
        borrows_embedding=not is_decoder,
    )


@register("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration")
def t5(hf: HFConfig) -> DecoderSpec:
    """T5, with a head of its own since 1.1; mT5; UMT5, whose layers have a table each. Where the head is the embedding, what it
    reads is scaled."""
    architecture, is_tied = hf.architectures[0], hf.get("tie_word_embeddings", True)
    kind = hf.get("feed_forward_proj", "relu" if architecture.startswith("T5") else "gated-gelu")
    own_tables = architecture.startswith("U")
    encoder, decoder = (_half(hf, part, kind, own_tables=own_tables) for part in ("encoder", "decoder"))
    is_scaled = hf.get("scale_decoder_outputs", is_tied and not architecture.startswith("MT5"))
    return dataclasses.replace(
        with_cross_attention(decoder, EncoderSpec(encoder, encoder.max_positions)),
        tied_embeddings=is_tied,
        logits_scale=decoder.hidden**-0.5 if is_scaled else 1.0,
    )
