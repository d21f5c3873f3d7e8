"""EXAONE 4: norms after each half only, norms on query and key heads, full layers without positions."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import full_where_not_sliding
from quire.models.registry import register
from quire.models.residual import POST, RMSNorm
from quire.models.spec import DecoderSpec

POST_NAMES = LLAMA_NAMES.but(
    drop=("before_mixer", "before_mlp"), after_mixer="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)


@register("Exaone4ForCausalLM")
def exaone4(hf: HFConfig) -> DecoderSpec:
    """EXAONE 4.0; the small one has no windows, and then every layer rotates."""
    spec = llama(hf)
    qk_norm = RMSNorm(hf.rms_norm_eps)
    full = {"rope": None} if hf.get("sliding_window") else {}
    spec = full_where_not_sliding(spec.with_attention(qk_norm=qk_norm), hf, every=4, **full)
    return dataclasses.replace(spec, placement=POST, weights=POST_NAMES)
