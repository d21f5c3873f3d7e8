"""Granite 4: Mamba-2 layers with some of attention among them, mostly without positions; experts beside a shared feed-forward, or
that alone."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.models.granite import granite
from quire.models.granite_moe import GRANITE_MOE_NAMES, granite_mixture
from quire.models.mamba import mamba2_of, ssm_names
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.spec import DecoderSpec, GatedMLP

GRANITE_HYBRID_NAMES = GRANITE_MOE_NAMES.but(
    (), **ssm_names("mamba."), gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"
)


@register("GraniteMoeHybridForCausalLM")
def granite_hybrid(hf: HFConfig) -> DecoderSpec:
    """Granite 4 (Tiny, Small, Micro)."""
    spec, mamba = granite(hf), mamba2_of(hf, norm_groups=hf.get("mamba_n_groups", 1))
    (attention, *_) = spec.attentions()
    if hf.get("position_embedding_type") != "rope":
        attention = dataclasses.replace(attention, rope=None)
    hf = defaults(hf, layer_types=hf.get("layers_block_type", ["mamba"] * spec.layers))
    kinds = kinds_of(hf, "mamba", "attention", "linear_attention", "full_attention") or ()
    has_experts = hf.get("num_local_experts", 0) > 0
    return dataclasses.replace(
        spec,
        mixer=tuple(attention if kind in ("attention", "full_attention") else mamba for kind in kinds),
        mlp=granite_mixture(hf) if has_experts else GatedMLP(hf.shared_intermediate_size, hf.hidden_act),
        weights=GRANITE_HYBRID_NAMES,
    )
