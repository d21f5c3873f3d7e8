"""What the drawn configs of families with fields of their own have besides: more of `drawn_configs.py`, by architecture."""

import random
from collections.abc import Callable
from typing import Any

from quire.models.encoder_decoder.bart import FAMILIES


def _gemma4(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    kinds = [draw.choice(("sliding_attention", "full_attention")) for _ in range(layers - 1)] + ["full_attention"]
    owners = [count for count in range(layers) if count == 0 or {*kinds} == {*kinds[: layers - count]}]
    share = draw.choice((0.25, 0.5, 1.0))
    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": draw.choice((1e4, 1e6))}
    drawn: dict[str, Any] = {
        "layer_types": kinds,
        "global_head_dim": draw.choice((8, 20, 32, 48)),
        "attention_k_eq_v": draw.random() < 0.5,
        "num_global_key_value_heads": draw.choice([None, *(n for n in range(1, heads + 1) if heads % n == 0)]),
        "num_kv_shared_layers": draw.choice(owners),
        "use_double_wide_mlp": draw.random() < 0.5,
        "rope_parameters": {
            "full_attention": full | draw.choice(({}, {"factor": 2.0})),
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "hidden_size_per_layer_input": draw.choice((6, 16, 21)),
        "vocab_size_per_layer_input": values["vocab_size"] + draw.choice((0, 5)),
    }
    if draw.random() < 0.5:
        experts = draw.choice((2, 3, 6))
        drawn |= {"enable_moe_block": True, "num_experts": experts, "top_k_experts": draw.randint(1, experts)}
        drawn["moe_intermediate_size"] = draw.choice((17, 24, 40))
    if not drawn["num_kv_shared_layers"] and draw.random() < 0.3:  # Transformers needs them where layers share
        drawn["hidden_size_per_layer_input"] = 0
    return drawn


def _gemma4_unified(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    others = (
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "enable_moe_block",
        "num_experts",
        "top_k_experts",
    )
    drawn = _gemma4(draw, values)
    return {name: value for name, value in drawn.items() if name not in (*others, "moe_intermediate_size")}


def _sparse(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Of many heads: where all are below zero, tokens are equal, and Transformers takes any of them."""
    layers = values["num_hidden_layers"]
    kinds = ["full", *(draw.choice(("full", "shared")) for _ in range(layers - 1))]
    return {
        "index_topk": draw.choice((1, 3, 9, 20, 70, 300)),
        "index_head_dim": values["qk_rope_head_dim"] + draw.choice((0, 3, 8)),
        "index_n_heads": draw.choice((14, 20)),
        "q_lora_rank": draw.choice((5, 28)),
        "indexer_types": draw.choice((None, kinds)),
        "index_topk_freq": draw.choice((1, 2, 3)),
        "layer_types": None,
    }


def _longcat(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    experts, zero = draw.choice((2, 3, 5)), draw.choice((0, 1, 4))
    layers = draw.choice((1, 2))
    return {
        "num_layers": layers,
        "num_hidden_layers": 2 * layers,
        "n_routed_experts": experts,
        "zero_expert_num": zero,
        "moe_topk": draw.randint(1, experts + zero),
        "expert_ffn_hidden_size": draw.choice((17, 24)),
        "ffn_hidden_size": draw.choice((33, 64)),
        "q_lora_rank": draw.choice((5, 28)),
        "head_dim": values["qk_rope_head_dim"],
        "qk_head_dim": None,
        "num_key_value_heads": values["num_attention_heads"],
        "routed_scaling_factor": draw.choice((1.0, 2.5)),
    }


def _jetmoe(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    experts = draw.choice((2, 3, 5))
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "num_key_value_heads": draw.choice((1, 2, 3)),
        "kv_channels": draw.choice((8, 12, 20, 32)),
    }


def _diffllama(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    kv_heads = draw.choice((2, 4))
    return {"num_attention_heads": kv_heads * draw.choice((1, 2, 3)), "num_key_value_heads": kv_heads}


def _hy_v4(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    drawn = {name: value for name, value in _sparse(draw, values).items() if name != "index_topk_freq"}
    streams = {
        "hc_mult": draw.choice((1, 2, 4)),
        "hc_magnitude": draw.choice((1.0, 2.0)),
        "hc_eps": draw.choice((1e-6, 0.1)),
    }
    return drawn | streams | {"swiglu_limit": draw.choice((0.5, 10.0)), "n_group": 1, "topk_group": 1}


def _deepseek_v4(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    groups, layers = draw.choice((1, 2, 3)), values["num_hidden_layers"]
    kinds = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    pairs = draw.choice((2, 4))
    size = 4 * pairs * draw.choice((1, 2))
    main = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2 * pairs / size}
    stretched = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "attention_factor": 1.0}
    compress = draw.choice(({}, stretched)) | {"rope_theta": 1e5}
    return {
        "num_attention_heads": groups * draw.choice((1, 2)),
        "num_key_value_heads": 1,
        "head_dim": size,
        "partial_rotary_factor": 2 * pairs / size,
        "rope_parameters": {"main": main, "compress": {"rope_type": "default"} | main | compress},
        "layer_types": [draw.choice(kinds) for _ in range(layers)],
        "compress_rates": {kinds[1]: draw.choice((2, 4, 5)), kinds[2]: draw.choice((3, 8, 20))},
        "mlp_layer_types": [draw.choice(("hash_moe", "moe")) for _ in range(layers)],
        "scoring_func": draw.choice(("sqrtsoftplus", "sigmoid")),
        "q_lora_rank": draw.choice((5, 28)),
        "o_groups": groups,
        "o_lora_rank": draw.choice((5, 12)),
        "index_n_heads": draw.choice((14, 20)),
        "index_head_dim": 2 * pairs + draw.choice((0, 3)),
        "index_topk": draw.choice((1, 3, 8, 100)),
        "hc_mult": draw.choice((1, 2, 4)),
        "hc_sinkhorn_iters": draw.choice((1, 4, 20)),
        "hc_eps": draw.choice((1e-6, 0.01)),
        "swiglu_limit": draw.choice((0.5, 10.0)),
        "intermediate_size": values["moe_intermediate_size"],
    }


def _by_kind(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Rotations of layers with a window and of the others."""
    share = draw.choice((0.5, 1.0))
    kinds = ("full_attention", "sliding_attention")
    each = {kind: {"rope_type": "default", "rope_theta": draw.choice((100.0, 1e5))} for kind in kinds}
    return {"rope_parameters": {kind: own | {"partial_rotary_factor": share} for kind, own in each.items()}}


def _mimo(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    kv_heads, size = draw.choice((1, 2)), draw.choice((8, 16, 24))
    heads = {"num_attention_heads": 2 * kv_heads * draw.choice((1, 2)), "num_key_value_heads": kv_heads}
    scale = {"attention_value_scale": draw.choice((None, 0.5))}
    return heads | scale | {"head_dim": size, "v_head_dim": draw.choice((5, size))} | _by_kind(draw, values)


def _laguna(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    kv_heads = draw.choice((1, 2))
    heads = [kv_heads * draw.choice((1, 2, 3)) for _ in range(values["num_hidden_layers"])]
    gates = {"gating": draw.choice((True, "per-head", "per-element")), "head_dim": draw.choice((8, 16, 24))}
    caps = {
        "moe_router_logit_softcapping": draw.choice((0.0, 1.5)),
        "moe_routed_scaling_factor": draw.choice((1.0, 2.5)),
    }
    counts = {"num_key_value_heads": kv_heads, "num_attention_heads": heads[0], "num_attention_heads_per_layer": heads}
    return gates | caps | counts | _by_kind(draw, values)


def _halves(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """An encoder and a decoder of one width, with one embedding."""
    heads = [count for count in (1, 2, 3, 4, 5, 6, 8) if values["hidden_size"] % count == 0]
    return {
        "decoder_attention_heads": draw.choice(heads), "decoder_layers": draw.choice((1, 2, 4)),
        "decoder_ffn_dim": draw.choice((33, 72, 117)), "encoder_ffn_dim": draw.choice((40, 96)), "tie_word_embeddings": True,
        "scale_embedding": draw.random() < 0.5, "decoder_vocab_size": values["vocab_size"],
    }  # fmt: skip


def _t5(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Buckets of every number, both kinds of feed-forward, a head that is the embedding, with and without its scale."""
    return {
        "d_model": values["hidden_size"], "num_heads": draw.choice((1, 3, 4)), "d_kv": draw.choice((8, 12, 20)),
        "d_ff": draw.choice((33, 72)), "num_layers": draw.choice((1, 2)), "num_decoder_layers": draw.choice((1, 3)),
        "relative_attention_num_buckets": draw.choice((4, 12, 32)), "relative_attention_max_distance": draw.choice((17, 128)),
        "feed_forward_proj": draw.choice(("relu", "gated-gelu", "gated-silu")), "n_positions": 256,
        "tie_word_embeddings": draw.random() < 0.5,
    }  # fmt: skip


OWN: dict[str, Callable[[random.Random, dict[str, Any]], dict[str, Any]]] = {
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4UnifiedForCausalLM": _gemma4_unified,
    "DeepseekV32ForCausalLM": lambda draw, values: {
        name: value for name, value in _sparse(draw, values).items() if name not in ("indexer_types", "index_topk_freq")
    },
    "GlmMoeDsaForCausalLM": _sparse,
    "HYV4ForCausalLM": _hy_v4,
    "MiMoV2FlashForCausalLM": _mimo,
    "LagunaForCausalLM": _laguna,
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "LongcatFlashForCausalLM": _longcat,
    "JetMoeForCausalLM": _jetmoe,
    "DiffLlamaForCausalLM": _diffllama,
    **dict.fromkeys(FAMILIES, _halves),
    **dict.fromkeys(("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"), _t5),
}
