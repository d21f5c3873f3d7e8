"""gpt-oss: every other layer sees a window, each head has a sink, and all matrices have biases."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.llama import LLAMA_NAMES, llama
from quire.models.patterns import defaults, full_where_not_sliding
from quire.models.registry import register
from quire.models.spec import DecoderSpec, MoE

GPT_OSS_NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        sinks="self_attn.sinks",
        router="mlp.router",
        experts_gate_up_bias="mlp.experts.gate_up_proj_bias",
        experts_down_bias="mlp.experts.down_proj_bias",
    ),
    stacked={"experts_gate_up": "mlp.experts.gate_up_proj", "experts_down": "mlp.experts.down_proj"},
    transposed=("experts_gate_up", "experts_down"),
    interleaved=("experts_gate_up", "experts_gate_up_bias"),
)

BY_EXPERT = dataclasses.replace(
    GPT_OSS_NAMES.but(
        experts_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
        experts_down="mlp.experts.{expert}.down_proj",
    ),
    stacked={},
    transposed=(),
    interleaved=("experts_gate_up_bias",),
)
"""As GGUF files have them."""


@register("GptOssForCausalLM")
def gpt_oss(hf: HFConfig) -> DecoderSpec:
    """gpt-oss-20b and gpt-oss-120b."""
    types = [("sliding_attention", "full_attention")[layer % 2] for layer in range(hf.num_hidden_layers)]
    hf = defaults(hf, attention_bias=True, layer_types=types)
    stored = hf.quantization_config.get("quant_method") if "quantization_config" in hf else None
    return dataclasses.replace(
        full_where_not_sliding(llama(hf).with_attention(sinks=True), hf),
        mlp=MoE(
            Routing(hf.num_local_experts, hf.num_experts_per_tok),
            hf.intermediate_size,
            hf.hidden_act,
            router_bias=True,
            experts_bias=True,
            clamp=ClampedSwiglu(float(hf.get("swiglu_alpha", 1.702)), float(hf.get("swiglu_limit", 7.0))),
        ),
        weights=BY_EXPERT if stored == "gguf" else GPT_OSS_NAMES,
    )
