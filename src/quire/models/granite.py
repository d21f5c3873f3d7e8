"""Granite (dense): Llama's plan with a multiplier on embeddings, scores, residuals and logits."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import llama
from quire.models.registry import register
from quire.models.spec import DecoderSpec


@register("GraniteForCausalLM")
def granite(hf: HFConfig) -> DecoderSpec:
    """Granite 3 (dense)."""
    spec = llama(hf)
    scale = float(hf.get("attention_multiplier", 1.0))
    return dataclasses.replace(
        spec,
        mixer=tuple(dataclasses.replace(mixer, scale=scale) for mixer in spec.attentions()),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        logits_scale=1.0 / float(hf.get("logits_scaling", 1.0)),
    )
