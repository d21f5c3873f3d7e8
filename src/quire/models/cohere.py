"""Command R and R7B: both halves in parallel, LayerNorm without bias, interleaved rotation, scaled logits."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, interleaved, llama
from quire.models.patterns import defaults, full_where_not_sliding
from quire.models.registry import register
from quire.models.residual import PARALLEL, LayerNorm
from quire.models.spec import DecoderSpec


@register("CohereForCausalLM")
def cohere(hf: HFConfig) -> DecoderSpec:
    """Command R."""
    norm = LayerNorm(hf.layer_norm_eps, bias=False)
    qk_norm = norm if hf.get("use_qk_norm", False) else None
    spec = interleaved(llama(defaults(hf, tie_word_embeddings=True)))
    return dataclasses.replace(
        spec.with_attention(qk_norm=qk_norm, qk_norm_span="heads"),
        norm=norm,
        placement=PARALLEL,
        weights=LLAMA_NAMES.but(drop=("before_mlp",)),
        logits_scale=float(hf.get("logit_scale", 1.0)),
    )


@register("Cohere2ForCausalLM")
def cohere2(hf: HFConfig) -> DecoderSpec:
    """Command R7B: windowed layers rotate; full ones know no positions."""
    return full_where_not_sliding(cohere(hf).with_attention(qk_norm=None), hf, every=4, rope=None)
