"""Flint: layers with a window rotate and the rest know no positions; sinks, norms of heads, experts by sigmoid scores."""

from quire.config.hf_config import HFConfig
from quire.kernels.types import Routing
from quire.models.llama import llama
from quire.models.mixtures import EXPERT_NAMES, with_experts
from quire.models.patterns import defaults, full_where_not_sliding
from quire.models.registry import register
from quire.models.residual import RMSNorm
from quire.models.spec import DecoderSpec, GatedMLP, MoE

NAMES = EXPERT_NAMES.but(
    sinks="self_attn.softmax_offset",
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
)


@register("FlintForCausalLM")
def flint(hf: HFConfig) -> DecoderSpec:
    """Flint."""
    layers = range(hf.num_hidden_layers)
    full = [layer < 2 or layer % 4 == 1 or layer == hf.num_hidden_layers - 1 for layer in layers]
    hf = defaults(
        hf, head_dim=128, sliding_window=513, moe_intermediate_size=512, shared_expert_intermediate_size=1024,
        hidden_act="silu", rms_norm_eps=1e-6, mlp_only_layers=[0, 1], decoder_sparse_step=1,
        layer_types=["full_attention" if is_full else "sliding_attention" for is_full in full],
    )  # fmt: skip
    spec = llama(HFConfig(hf.to_dict() | {"mlp_bias": False}))
    spec = spec.with_attention(qk_norm=RMSNorm(hf.rms_norm_eps), sinks=True)
    spec = full_where_not_sliding(spec, hf, rope=None)
    routing = Routing(
        hf.num_experts,
        hf.num_experts_per_tok,
        scoring="sigmoid",
        renormalize=bool(hf.get("norm_topk_prob", True)),
    )
    shared = GatedMLP(hf.shared_expert_intermediate_size, hf.hidden_act)
    mixture = MoE(routing, hf.moe_intermediate_size, hf.hidden_act, shared=shared)

    def has_experts(layer: int) -> bool:
        return layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0

    return with_experts(spec, mixture, has_experts, NAMES)
