"""Llama 4 (text): chunks of local attention to one layer that sees all and does not rotate; one expert and a shared one."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.mixtures import with_experts
from quire.models.patterns import kinds_of
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE, Temperature

LLAMA4_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        shared_gate_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        shared_down="feed_forward.shared_expert.down_proj",
        experts_gate_up=("feed_forward.experts.{expert}.gate_proj", "feed_forward.experts.{expert}.up_proj"),
        experts_down="feed_forward.experts.{expert}.down_proj",
    ),
    stacked={"experts_gate_up": "feed_forward.experts.gate_up_proj", "experts_down": "feed_forward.experts.down_proj"},
    transposed=("experts_gate_up", "experts_down"),
)


@register("Llama4ForCausalLM")
def llama4(hf: HFConfig) -> DecoderSpec:
    """Scout (16 experts) and Maverick (128, in every other layer)."""
    size = hf.intermediate_size
    dense = llama(HFConfig(hf.to_dict() | {"intermediate_size": hf.get("intermediate_size_mlp", size)}))
    mixture = MoE(
        Routing(hf.num_local_experts, hf.num_experts_per_tok, "sigmoid", renormalize=False),
        size,
        hf.hidden_act,
        scales_input=True,
        shared=GatedMLP(size, hf.hidden_act),
    )
    every = hf.get("interleave_moe_layer_step", 1)
    sparse = hf.get("moe_layers", range(every - 1, dense.layers, every))
    dense = dataclasses.replace(dense, mixer=_attentions(hf, dense))
    return with_experts(dense, mixture, lambda layer: layer in sparse, LLAMA4_NAMES)


def _attentions(hf: HFConfig, dense: DecoderSpec) -> tuple[Attention, ...]:
    (base, *_) = dense.attentions()
    assert base.rope is not None
    every, layers = hf.get("no_rope_layer_interval", 4), range(dense.layers)
    rotates = hf.get("no_rope_layers") or [(layer + 1) % every != 0 for layer in layers]
    own = ["chunked_attention" if turns else "full_attention" for turns in rotates]
    kinds = kinds_of(hf, "chunked_attention", "full_attention") or own
    rope, norm = dataclasses.replace(base.rope, interleaved=True), None
    if hf.get("use_qk_norm", True):
        # The norm has no weight: it may as well come before the rotation, which keeps lengths once its amplitude is gone.
        amplitude = float(rope.table(1)[0, 0])
        norm = RMSNorm(hf.rms_norm_eps / amplitude**2, weight=False)
        if rope.scaling is not None:
            rope = dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, attention_factor=1.0))
    rotated = dataclasses.replace(base, rope=rope, qk_norm=norm)
    temperature = Temperature(float(hf.get("attn_scale", 0.1)), int(hf.get("floor_scale", 8192)), offset=1)
    still = dataclasses.replace(
        base, rope=None, temperature=temperature if hf.get("attn_temperature_tuning", True) else None
    )
    chunk = hf.get("attention_chunk_size", 0)
    return tuple(
        dataclasses.replace(rotated if turns else still, chunk=chunk if kind == "chunked_attention" else 0)
        for turns, kind in zip(rotates, kinds, strict=True)
    )
