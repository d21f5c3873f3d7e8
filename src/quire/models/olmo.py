"""OLMo 1 to 3: norms without weights (1), norms after each half and of all heads at once (2), windows (3)."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.exaone4 import POST_NAMES
from quire.models.llama import llama
from quire.models.patterns import defaults, full_where_not_sliding
from quire.models.registry import register
from quire.models.residual import POST, LayerNorm, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec


@register("OlmoForCausalLM")
def olmo(hf: HFConfig) -> DecoderSpec:
    """OLMo: layer norms with neither weight nor bias; queries, keys and values may be clipped."""
    spec = llama(hf).with_attention(clip_qkv=float(hf.get("clip_qkv", 0.0)))
    return dataclasses.replace(spec, norm=LayerNorm(1e-5, bias=False, weight=False))


@register("Olmo2ForCausalLM")
def olmo2(hf: HFConfig) -> DecoderSpec:
    """OLMo 2."""
    spec = llama(hf).with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), qk_norm_span="all")
    return dataclasses.replace(spec, placement=POST, weights=POST_NAMES)


@register("Olmo3ForCausalLM")
def olmo3(hf: HFConfig) -> DecoderSpec:
    """OLMo 3: three layers with a window, then one that sees all; only this one's rotation is stretched."""
    hf = defaults(hf, sliding_window=4096)
    spec = olmo2(hf)
    head_dim = spec.attentions()[0].head_dim
    full, sliding = (Rope.from_hf(hf, head_dim, kind, theta=5e5) for kind in ("full_attention", "sliding_attention"))
    if hf.get("rope_scaling") is not None:
        sliding = dataclasses.replace(sliding, scaling=None)
    return full_where_not_sliding(spec.with_attention(rope=sliding), hf, every=4, rope=full)
