"""BART and its kin: mBART, Marian, Pegasus, M2M100 and NLLB, which differ in where their norms are and in their positions; and
those whose encoder sees: Florence-2, Donut and Nougat."""

import dataclasses
from collections.abc import Callable

from quire.config.hf_config import HFConfig
from quire.config.resolve import rows_of_stages
from quire.errors import ConfigError
from quire.models.patterns import with_cross_attention
from quire.models.registry import register
from quire.models.residual import PRE, RESIDUAL_POST, LayerNorm
from quire.models.rope import Sinusoids
from quire.models.sight import Modules, Product
from quire.models.spec import MLP, Attention, DecoderSpec, EncoderSpec, LearnedPositions, WeightNames
from quire.models.vision.gemma4 import without_layers

NORM = LayerNorm(1e-5)
PREFIXES = ("model.", "")


def _names(part: str, before: bool) -> WeightNames:
    """Of one half; norms stand `before` what they belong to, or behind."""
    place = "before" if before else "after"
    return WeightNames(
        prefixes=PREFIXES,
        layer=part + ".layers.{layer}.",
        modules={
            "embedding": "shared",
            "positions": f"{part}.embed_positions",
            "embedding_norm": f"{part}.layernorm_embedding",
            f"{place}_mixer": "{word}_layer_norm",
            "qkv": ("{word}.q_proj", "{word}.k_proj", "{word}.v_proj"),
            "q": "{word}.q_proj",
            "kv": ("{word}.k_proj", "{word}.v_proj"),
            "out": "{word}.out_proj",
            f"{place}_mlp": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
            "final_norm": f"{part}.layer_norm",
            "lm_head_bias": "final_logits_bias",
        },
        row_vectors=("lm_head_bias",),
        sub_words=("self_attn", "encoder_attn") if part == "decoder" else ("self_attn",),
        ignored=("*coder.embed_tokens.weight", "lm_head.weight", "*coder.version", "*embed_positions.weight*"),
    )


@dataclasses.dataclass(frozen=True)
class Kin:
    """One family.

    Attributes:
        pre: norms come before what they belong to, and each half has one at its end. normed: the embeddings have a norm.
        positions: `learned`, with two rows before them; `stored`; or sinusoids, whose frequencies are Marian's or M2M100's.
        act, scaled: where config.json names none; where it does not say whether embeddings are scaled.
        eyes: what makes rows of the image before the encoder's text.
    """

    pre: bool
    normed: bool
    positions: str = "learned"
    act: str = "gelu"
    scaled: bool = False
    has_bias: bool = True
    eyes: Modules | None = None


FAMILIES = {
    "BartForConditionalGeneration": Kin(pre=False, normed=True),
    "MBartForConditionalGeneration": Kin(pre=True, normed=True),
    "Florence2ForConditionalGeneration": Kin(
        pre=False, normed=True, has_bias=False, eyes=Modules("Florence2Model", call="get_image_features")
    ),
    "MarianMTModel": Kin(pre=False, normed=False, positions="marian"),
    "PegasusForConditionalGeneration": Kin(pre=True, normed=False, positions="stored"),
    "M2M100ForConditionalGeneration": Kin(
        pre=True, normed=False, positions="m2m", act="relu", scaled=True, has_bias=False
    ),
}
"""By architecture."""


POSITIONS: dict[str, Callable[[HFConfig, int], LearnedPositions | Sinusoids]] = {
    "learned": lambda hf, count: LearnedPositions(count, offset=2),
    "stored": lambda hf, count: LearnedPositions(count),
    "marian": lambda hf, count: Sinusoids(count),
    "m2m": lambda hf, count: Sinusoids(count, start=hf.get("pad_token_id", 1) + 1, shift=1),
}
"""Of so many tokens, by `Kin.positions`."""


def _half(hf: HFConfig, kin: Kin, part: str) -> DecoderSpec:
    heads, hidden, is_decoder = hf.get(f"{part}_attention_heads", 16), hf.d_model, part == "decoder"
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hidden,
        layers=hf.get(f"{part}_layers", 12),
        mixer=Attention(heads, heads, hidden // heads, causal=is_decoder, qkv_bias=True, out_bias=True),
        mlp=MLP(hf.get(f"{part}_ffn_dim", 4096), act=hf.get("activation_function", kin.act), bias=True),
        norm=NORM,
        weights=_names(part, kin.pre),
        max_positions=hf.get("max_position_embeddings", 1024),
        placement=PRE if kin.pre else RESIDUAL_POST,
        learned_positions=POSITIONS[kin.positions](hf, hf.get("max_position_embeddings", 1024)),
        embedding_norm=NORM if kin.normed else None,
        final_norm=kin.pre,
        tied_embeddings=True,
        lm_head_bias=is_decoder and kin.has_bias,
        embedding_scale=hidden**0.5 if hf.get("scale_embedding", kin.scaled) else 1.0,
        borrows_embedding=not is_decoder,
    )


@register(*FAMILIES)
def bart(hf: HFConfig) -> DecoderSpec:
    """All of them.

    Raises:
        ConfigError: the halves, or the head, have embeddings of their own.
    """
    kin, hf = FAMILIES[hf.architectures[0]], hf.get("text_config", hf)
    for field in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
        if not hf.get(field, True):
            message = f"{field}=False of config.json is not supported: both halves and the head must have one embedding"
            raise ConfigError(message, setting="model")
    encoder = dataclasses.replace(_half(hf, kin, "encoder"), frames=kin.eyes)
    return with_cross_attention(_half(hf, kin, "decoder"), EncoderSpec(encoder, encoder.max_positions))


DONUT = Kin(pre=True, normed=True, has_bias=False)
SWIN_NAMES = WeightNames(
    prefixes=("encoder.",),
    modules={"projection": "projection"},
    aliases={"enc_to_dec_proj.": "encoder.projection."},
)


@register("VisionEncoderDecoderModel")
def donut(hf: HFConfig) -> DecoderSpec:
    """Donut and Nougat: a Swin reads an image, and mBART's decoder writes what stands there."""
    eyes, spec = hf.encoder, _half(hf.decoder, DONUT, "decoder")
    names = spec.weights.but(embedding="decoder.embed_tokens", lm_head="decoder.lm_head")
    spec = dataclasses.replace(
        spec,
        weights=dataclasses.replace(names, prefixes=("decoder.model.",)),
        tied_embeddings=hf.decoder.get("tie_word_embeddings", True),
    )
    seen = eyes.get("embed_dim", 96) * 2 ** (len(eyes.get("depths", (2, 2, 6, 2))) - 1)
    modules = Modules("DonutSwinModel", section="encoder")
    trunk = without_layers(seen, NORM, SWIN_NAMES, reads_items=True, frames=modules)
    projector = () if seen == spec.hidden else (Product("projection", spec.hidden),)
    return with_cross_attention(spec, EncoderSpec(trunk, rows_of_stages(eyes.to_dict()), projector))
