"""Donut and Nougat: a Swin reads an image, and mBART's decoder writes what stands there."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.config.resolve import rows_of_stages
from quire.errors import ConfigError
from quire.models.encoder_decoder.bart import FAMILIES, half
from quire.models.encoder_decoder.layers import with_cross_attention
from quire.models.registry import register
from quire.models.residual import LayerNorm
from quire.models.sight import Modules, Product
from quire.models.spec import MLP, Attention, DecoderSpec, EncoderSpec, WeightNames
from quire.models.vision.gemma4 import without_layers

EYES = Modules("DonutSwinModel", section="encoder")
EYES_NAMES = WeightNames(
    prefixes=("encoder.",),
    modules={"projection": "projection"},
    aliases={"enc_to_dec_proj.": "encoder.projection."},
)
KINDS = {"encoder": "donut-swin", "decoder": "mbart"}
"""By the section of config.json: the `model_type` that is known."""


@register("VisionEncoderDecoderModel")
def donut(hf: HFConfig) -> DecoderSpec:
    """Both.

    Raises:
        ConfigError: a half is another model.
    """
    for section, kind in KINDS.items():
        if (found := hf.get(section, HFConfig({})).get("model_type")) != kind:
            message = f"{section}.model_type={found!r} of config.json is not supported; known: {kind!r}"
            raise ConfigError(message, setting="model")
    eyes, text, length = hf.encoder, hf.decoder, rows_of_stages(hf.encoder.to_dict())
    spec = half(text, FAMILIES["MBartForConditionalGeneration"], "decoder")
    seen, attention, mlp = eyes.get("embed_dim", 96) * 2 ** (len(eyes.depths) - 1), spec.mixer, spec.mlp
    assert isinstance(attention, Attention) and isinstance(mlp, MLP)
    is_projected = seen != spec.hidden and text.get("cross_attention_hidden_size") is None
    trunk = without_layers(seen, LayerNorm(1e-5), EYES_NAMES, reads_items=True, frames=EYES)
    projector = (Product("projection", spec.hidden),) if is_projected else ()
    names = spec.weights.but(embedding="decoder.embed_tokens", lm_head="decoder.lm_head")
    spec = dataclasses.replace(
        spec,
        lm_head_bias=False,
        weights=dataclasses.replace(names, prefixes=("decoder.model.",)),
        tied_embeddings=text.get("tie_word_embeddings", True),
        encoder=EncoderSpec(trunk, length, projector),
    )
    return with_cross_attention(spec, attention, mlp, length, spec.hidden)
