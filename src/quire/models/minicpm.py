"""MiniCPM3: latent attention, with scaled embeddings, residuals and logits."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.deepseek import latent_decoder
from quire.models.registry import register
from quire.models.spec import DecoderSpec


@register("MiniCPM3ForCausalLM")
def minicpm3(hf: HFConfig) -> DecoderSpec:
    """MiniCPM3-4B."""
    depth, base = hf.get("scale_depth", 0), hf.get("dim_model_base", 0)
    return dataclasses.replace(
        latent_decoder(hf, interleaved=False),
        embedding_scale=float(hf.get("scale_emb", 1)),
        residual_scale=depth / hf.num_hidden_layers**0.5 if depth else 1.0,
        logits_scale=base / hf.hidden_size if base else 1.0,
        tied_embeddings=bool(hf.get("tie_word_embeddings", True)),
    )
