"""JetMoE: experts make queries and bring attention's outputs back; experts in every feed-forward."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import LLAMA_NAMES
from quire.models.patterns import defaults
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec, MoE
from quire.models.variants import ExpertAttention

NAMES = dataclasses.replace(
    LLAMA_NAMES.but(
        drop=("qkv", "out", "q_norm", "k_norm", "gate_up", "down"),
        kv="self_attention.kv_proj",
        q_router="self_attention.experts.router.layer",
        out_bias="self_attention.experts.bias",
        router="mlp.router.layer",
        experts_bias="mlp.bias",
    ),
    stacked={
        "q_experts": "self_attention.experts.input_linear.weight",
        "out_experts": "self_attention.experts.output_linear.weight",
        "experts_gate_up": "mlp.input_linear.weight",
        "experts_down": "mlp.output_linear.weight",
    },
)


@register("JetMoeForCausalLM")
def jetmoe(hf: HFConfig) -> DecoderSpec:
    """JetMoE-8B. The config's epsilon is the last norm's; those of layers have one that no config tells."""
    hf = defaults(
        hf, vocab_size=32000, hidden_size=2048, num_hidden_layers=12, num_key_value_heads=16, kv_channels=128,
        intermediate_size=5632, max_position_embeddings=4096, activation_function="silu", num_local_experts=8,
        num_experts_per_tok=2, tie_word_embeddings=True, rms_norm_eps=1e-6,
    )  # fmt: skip
    routing = Routing(hf.num_local_experts, hf.num_experts_per_tok)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=ExpertAttention(
            heads=hf.num_key_value_heads * hf.num_experts_per_tok,
            kv_heads=hf.num_key_value_heads,
            head_dim=hf.kv_channels,
            rope=Rope.from_hf(hf, hf.kv_channels),
            routing=routing,
        ),
        mlp=MoE(routing, hf.intermediate_size, hf.activation_function, out_bias=True),
        norm=RMSNorm(1e-6),
        final_eps=hf.rms_norm_eps,
        weights=NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.tie_word_embeddings),
    )
