"""EXAONE 4: norms after each half only, norms on query and key heads, full layers without positions."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import sliding_layers
from quire.models.registry import register
from quire.models.spec import POST, DecoderSpec, RMSNorm

EXAONE4_NAMES = LLAMA_NAMES.but(
    drop=("before_mixer", "before_mlp"), after_mixer="post_attention_layernorm", after_mlp="post_feedforward_layernorm"
)


@register("Exaone4ForCausalLM")
def exaone4(hf: HFConfig) -> DecoderSpec:
    """EXAONE 4.0; the small one has no windows, and then every layer rotates."""
    spec = llama(hf)
    qk_norm = RMSNorm(hf.rms_norm_eps)
    has_windows = bool(hf.get("sliding_window"))
    mixers = (
        dataclasses.replace(
            mixer,
            qk_norm=qk_norm,
            window=mixer.window if sliding else 0,
            rope=mixer.rope if sliding or not has_windows else None,
        )
        for mixer, sliding in zip(spec.attentions(), sliding_layers(hf, every=4), strict=True)
    )
    return dataclasses.replace(spec, mixer=tuple(mixers), placement=POST, weights=EXAONE4_NAMES)
