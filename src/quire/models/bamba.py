"""Bamba: Mamba-2 layers with some of attention among them, and a gated feed-forward in each."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.mamba import mamba2_of, ssm_names
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.spec import DecoderSpec

BAMBA_NAMES = LLAMA_NAMES.but(
    (),
    **ssm_names("mamba."),
    before_mlp="pre_ff_layernorm",
    final_norm="final_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


@register("BambaForCausalLM")
def bamba(hf: HFConfig) -> DecoderSpec:
    """Bamba; half of each head is rotated, unless the config says otherwise."""
    spec = llama(defaults(hf, partial_rotary_factor=0.5))
    (attention, *_), mamba = spec.attentions(), mamba2_of(hf, norm_groups=hf.get("mamba_n_groups", 1))
    chosen = hf.get("attn_layer_indices") or ()
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if layer in chosen else mamba for layer in range(spec.layers)),
        weights=BAMBA_NAMES,
    )
