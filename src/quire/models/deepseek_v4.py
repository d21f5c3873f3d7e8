"""DeepSeek-V4: attention to a window and to compressed tokens, several residual streams, experts in every layer; those of the
first layers are looked up by token."""

import dataclasses
from typing import Any, cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.types import ClampedSwiglu, Routing
from quire.models.mixtures import EXPERT_NAMES
from quire.models.patterns import defaults, kinds_of
from quire.models.registry import register
from quire.models.residual import HyperConnections, RMSNorm
from quire.models.rope import Rope
from quire.models.spec import DecoderSpec, GatedMLP, MoE, WeightNames
from quire.models.variants import BlockIndexer, CompressedAttention

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
NAMES = WeightNames(
    modules={
        "embedding": "embed",
        "q_a": "attn.wq_a",
        "q_a_norm": "attn.q_norm",
        "q_b": "attn.wq_b",
        "kv": "attn.wkv",
        "kv_norm": "attn.norm",
        "sinks": "attn.attn_sink",
        "out_a": "attn.wo_a",
        "out": "attn.wo_b",
        "block_kv": "attn.compressor.wkv",
        "block_gate": "attn.compressor.wgate",
        "block_bias": "attn.compressor.ape",
        "block_norm": "attn.compressor.norm",
        "index_kv": "attn.indexer.compressor.wkv",
        "index_gate": "attn.indexer.compressor.wgate",
        "index_bias": "attn.indexer.compressor.ape",
        "index_norm": "attn.indexer.compressor.norm",
        "index_q": "attn.indexer.wq_b",
        "index_weights": "attn.indexer.weights_proj",
        "router": "ffn.gate",
        "router_bias": "ffn.gate.bias",
        "token_experts": "ffn.gate.tid2eid",
        "experts_gate_up": ("ffn.experts.{expert}.w1", "ffn.experts.{expert}.w3"),
        "experts_down": "ffn.experts.{expert}.w2",
        "shared_gate_up": ("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
        "shared_down": "ffn.shared_experts.w2",
        **{f"mixer_hyper{end}": f"hc_attn_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
        **{f"mlp_hyper{end}": f"hc_ffn_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
        **{f"hyper_head{end}": f"hc_head_{end[1:] or 'fn'}" for end in ("", "_base", "_scale")},
        "before_mixer": "attn_norm",
        "before_mlp": "ffn_norm",
        "final_norm": "norm",
        "lm_head": "head",
    },
    prefixes=("", "model."),
    ignored=(*EXPERT_NAMES.ignored, "mtp.*", "*.mtp.*"),
    aliases={"embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", "lm_head.": "head."},
)


LEFT_OUT = {
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
}
"""What config.json need not say."""


@register("DeepseekV4ForCausalLM")
def deepseek_v4(hf: HFConfig) -> DecoderSpec:
    """DeepSeek-V4 Flash and Pro.

    Raises:
        ConfigError: another activation than silu, more than one key a token, or unknown scores.
    """
    hf = defaults(hf, **LEFT_OUT)
    for name, value, allowed in (("hidden_act", hf.hidden_act, "silu"), ("num_key_value_heads", _kv_heads(hf), 1)):
        if value != allowed:
            raise ConfigError(f"{name}={value!r} of config.json must be {allowed!r} in a DeepSeek-V4", setting="model")
    if hf.scoring_func not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise ConfigError(
            f"scoring_func={hf.scoring_func!r} of config.json must be sqrtsoftplus, sigmoid or softmax", setting="model"
        )
    norm, layers = RMSNorm(hf.rms_norm_eps), range(hf.num_hidden_layers)
    kinds = _kinds(hf)
    return DecoderSpec(
        vocab=hf.vocab_size,
        hidden=hf.hidden_size,
        layers=hf.num_hidden_layers,
        mixer=tuple(cast(Any, _attention(hf, kinds[layer], norm)) for layer in layers),
        mlp=tuple(_mixture(hf, is_looked_up) for is_looked_up in _looked_up(hf)),
        norm=norm,
        weights=NAMES,
        max_positions=hf.max_position_embeddings,
        tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
        hyper=HyperConnections(hf.hc_mult, hf.hc_eps, hf.rms_norm_eps, sinkhorn=max(hf.hc_sinkhorn_iters, 1)),
    )


def _kv_heads(hf: HFConfig) -> int:
    return hf.get("num_key_value_heads", 1)


def _kinds(hf: HFConfig) -> list[str]:
    """Each layer's kind of attention, by name or by how many tokens become one."""
    kinds, ratios = kinds_of(hf, WINDOW, SPARSE, HEAVY), hf.get("compress_ratios")
    if kinds is None and ratios:
        known = {0: WINDOW} | {rate: kind for kind, rate in RATES.items()}
        if unknown := sorted({*ratios} - {*known}):
            raise ConfigError(
                f"compress_ratios of config.json has {', '.join(map(str, unknown))}; known: 0, 4, 128", setting="model"
            )
        kinds = [known[ratio] for ratio in ratios]
    if kinds is None:
        kinds = [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(hf.num_hidden_layers)]
    return kinds


def _looked_up(hf: HFConfig) -> list[bool]:
    """For each layer, whether its experts are looked up."""
    kinds, first = hf.get("mlp_layer_types"), hf.get("num_hash_layers", 3)
    return [kinds[layer] == "hash_moe" if kinds else layer < first for layer in range(hf.num_hidden_layers)]


def _attention(hf: HFConfig, kind: str, norm: RMSNorm) -> CompressedAttention:
    own = {SPARSE: hf.get("compress_rate_csa"), HEAVY: hf.get("compress_rate_hca")}
    rates = RATES | dict(hf.to_dict().get("compress_rates") or {}) | {name: rate for name, rate in own.items() if rate}
    is_sparse = kind == SPARSE
    return CompressedAttention(
        heads=hf.num_attention_heads,
        head_dim=hf.head_dim,
        rope=_rotation(hf, "main" if kind == WINDOW else "compress"),
        window=hf.sliding_window,
        norm=norm,
        q_rank=hf.q_lora_rank,
        out_groups=hf.o_groups,
        out_rank=hf.o_lora_rank,
        rate=0 if kind == WINDOW else int(rates[kind]),
        overlaps=is_sparse,
        indexer=BlockIndexer(hf.index_n_heads, hf.index_head_dim, hf.index_topk) if is_sparse else None,
    )


def _rotation(hf: HFConfig, kind: str) -> Rope:
    """Layers that compress have a base of their own, and alone a stretched context, whose scores are not sharpened."""
    share = hf.get("partial_rotary_factor") or hf.get("qk_rope_head_dim", 64) / hf.head_dim
    values, rotary_dim = hf.to_dict(), int(hf.head_dim * share)
    given = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if is_dict(given.get("main")) and is_dict(given.get("compress")):
        parameters = dict(cast("dict[str, Any]", given[kind]))
    elif kind == "main":
        parameters = {"rope_type": "default", "rope_theta": hf.get("rope_theta", 10000.0)}
    else:
        parameters = given | {"rope_theta": hf.get("compress_rope_theta", 160000.0)}
    if parameters.get("rope_type", parameters.get("type")) == "yarn":
        parameters.setdefault("attention_factor", 1.0)
    kept = {name: value for name, value in values.items() if name not in ("rope_scaling", "rope_theta")}
    rope = Rope.from_hf(HFConfig(kept | {"rope_parameters": parameters | {"partial_rotary_factor": 1.0}}), rotary_dim)
    return dataclasses.replace(rope, rotary_dim=rotary_dim, interleaved=True)


def _mixture(hf: HFConfig, is_looked_up: bool) -> MoE:
    size, limit = hf.moe_intermediate_size, float(hf.swiglu_limit)
    routing = Routing(
        hf.n_routed_experts, hf.num_experts_per_tok, scoring=hf.scoring_func, scale=float(hf.routed_scaling_factor)
    )
    return MoE(
        routing,
        size,
        hf.hidden_act,
        bias_correction=not is_looked_up,
        by_token=is_looked_up,
        clamp=ClampedSwiglu(1.0, limit, offset=0),
        shared=GatedMLP(size, hf.hidden_act, bias=bool(hf.get("mlp_bias", False)), limit=limit),
    )
