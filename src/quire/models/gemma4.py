"""Gemma 4 (text): layers with a window have other heads than the rest, which rotate a quarter of each; norms of queries, keys and
values; the last layers may read earlier ones' keys and values; vectors of each token for each layer; experts beside a dense
feed-forward."""

import dataclasses
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.types import Routing
from quire.models.gemma import SANDWICH_NAMES
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.residual import SANDWICH, LayerInput, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import Attention, DecoderSpec, GatedMLP, MoE, WeightNames
from quire.models.variants import SharedKV

GEMMA4_NAMES = dataclasses.replace(
    SANDWICH_NAMES.but(
        q="self_attn.q_proj",
        qk=("self_attn.q_proj", "self_attn.k_proj"),
        input_embedding="embed_tokens_per_layer",
        input_projection="per_layer_model_projection",
        input_norm="per_layer_projection_norm",
        input_gate="per_layer_input_gate",
        input_out="per_layer_projection",
        after_input="post_per_layer_input_norm",
        layer_scale="layer_scalar",
        router="router.proj",
        router_scale="router.scale",
        expert_scales="router.per_expert_scale",
        shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
        shared_down="mlp.down_proj",
        shared_after="post_feedforward_layernorm_1",
        experts_before="pre_feedforward_layernorm_2",
        experts_after="post_feedforward_layernorm_2",
    ),
    stacked={"experts_gate_up": "experts.gate_up_proj", "experts_down": "experts.down_proj"},
)
SLIDING, FULL = "sliding_attention", "full_attention"
ROTATIONS = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


@register("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM")
def gemma4(hf: HFConfig) -> DecoderSpec:
    """Gemma 4 E2B, E4B, 12B (unified), 26B-A4B and 31B."""
    is_unified = hf.get("model_type") == "gemma4_unified_text"
    hf = defaults(
        hf, vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
        max_position_embeddings=262144 if is_unified else 131072, sliding_window=1024 if is_unified else 512,
        tie_word_embeddings=True, rope_parameters=ROTATIONS,
    )  # fmt: skip
    kinds = kinds_of(hf, SLIDING, FULL) or [SLIDING if (n + 1) % 6 else FULL for n in range(hf.num_hidden_layers)]
    kinds = [*kinds[:-1], FULL]
    first_shared = hf.num_hidden_layers - hf.get("num_kv_shared_layers", 0)
    norm = RMSNorm(hf.rms_norm_eps)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(_attention(hf, layer, kinds, first_shared) for layer in range(hf.num_hidden_layers)),
        mlp=tuple(_feed_forward(hf, layer >= first_shared) for layer in range(hf.num_hidden_layers)),
        norm=norm,
        weights=_names(hf, first_shared),
        max_positions=hf.max_position_embeddings,
        placement=SANDWICH,
        embedding_scale=hf.hidden_size**0.5,
        tied_embeddings=bool(hf.tie_word_embeddings),
        logits_soft_cap=hf.get("final_logit_softcapping") or 0.0,
        layer_input=None if is_unified else _layer_input(hf, norm),
        layer_scale=True,
    )


def _attention(hf: HFConfig, layer: int, kinds: list[str], first_shared: int) -> Attention:
    kind, own = kinds[layer], _own_values(hf, layer, kinds[layer])
    head_dim, bias = int(own.get("head_dim", hf.head_dim)), bool(hf.get("attention_bias", False))
    norm, is_full = RMSNorm(hf.rms_norm_eps), kind == FULL
    attention = Attention(
        heads=hf.num_attention_heads,
        kv_heads=own.get("num_key_value_heads", hf.num_key_value_heads),
        head_dim=head_dim,
        rope=_rotation(hf, head_dim, kind),
        window=0 if is_full else hf.sliding_window,
        causal=hf.get("use_bidirectional_attention") != "all",
        qk_norm=norm,
        qkv_bias=bias,
        out_bias=bias,
        scale=1.0,
        v_norm=dataclasses.replace(norm, weight=False),
        k_is_v=is_full and bool(hf.get("attention_k_eq_v", False)),
    )
    if layer < first_shared:
        return attention
    owners = [owner for owner in range(first_shared) if kinds[owner] == kind]
    if not owners:
        raise ConfigError(
            f"num_kv_shared_layers={hf.num_kv_shared_layers} of config.json: layer {layer} ({kind}) shares keys and values, but "
            "no earlier layer of its kind has any",
            setting="model",
        )
    fields = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
    return SharedKV(**fields | {"v_norm": None, "k_is_v": False}, kv_layer=owners[-1])


def _rotation(hf: HFConfig, head_dim: int, kind: str) -> Rope:
    rope = Rope.from_hf(hf, head_dim, kind)
    return rope if rope.scaling is not None else dataclasses.replace(rope, rotary_dim=head_dim)


def _own_values(hf: HFConfig, layer: int, kind: str) -> dict[str, Any]:
    """What a layer has otherwise than the rest: by its number, or for all layers without a window."""
    by_layer = hf.to_dict().get("per_layer_config")
    if is_dict(by_layer):  # Transformers fills numbers with zeros: "05"
        return dict({int(number): values for number, values in by_layer.items()}.get(layer) or {})
    if kind != FULL:
        return {}
    values = {"head_dim": hf.get("global_head_dim", 512)}
    if hf.get("attention_k_eq_v", False) and hf.get("num_global_key_value_heads"):
        values["num_key_value_heads"] = hf.num_global_key_value_heads
    return values


def _feed_forward(hf: HFConfig, is_shared: bool) -> GatedMLP | MoE:
    wider = 2 if is_shared and hf.get("use_double_wide_mlp", False) else 1
    dense = GatedMLP(hf.intermediate_size * wider, hf.hidden_activation)
    if not hf.get("enable_moe_block", False):
        return dense
    return MoE(
        Routing(hf.num_experts, hf.top_k_experts),
        hf.moe_intermediate_size,
        hf.hidden_activation,
        shared=dense,
        own_norms=RMSNorm(hf.rms_norm_eps),
        expert_scales=True,
    )


def _layer_input(hf: HFConfig, norm: RMSNorm) -> LayerInput | None:
    hf = defaults(hf, hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144)
    if not hf.hidden_size_per_layer_input:
        return None
    if hf.vocab_size_per_layer_input < hf.vocab_size:
        raise ConfigError(
            f"vocab_size_per_layer_input={hf.vocab_size_per_layer_input} of config.json must be at least "
            f"vocab_size={hf.vocab_size}: every token has a vector for each layer",
            setting="model",
        )
    return LayerInput(hf.hidden_size_per_layer_input, hf.vocab_size_per_layer_input, hf.hidden_activation, norm)


def _names(hf: HFConfig, first_shared: int) -> WeightNames:
    """Layers that read others' keys and values may carry matrices for their own, which nothing uses."""
    unused = [
        f"*layers.{layer}.self_attn.{name}.*"
        for layer in range(first_shared, hf.num_hidden_layers)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    return dataclasses.replace(GEMMA4_NAMES, ignored=(*GEMMA4_NAMES.ignored, *unused))
