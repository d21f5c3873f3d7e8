"""Configs drawn at random within what a family's config class allows: odd sizes, every switch, every scheme of rotation.

Knows fields of Transformers' config classes and what may stand in them; a family that has a field is drawn one for it. What
fields must agree on (a size and its divisors) is drawn together. Not every draw is a model: Transformers says which.
"""

import dataclasses
import functools
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

from tests.models.drawn_latest import OWN as LATEST
from tests.oracles.tiny_models import tiny_values

HEADS = (1, 2, 3, 4, 5, 6, 7, 8, 10)
HEAD_DIMS = (8, 10, 12, 16, 20, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256)
HIDDEN = (36, 48, 56, 60, 64, 72, 100, 128, 130, 144)
WIDTHS = (33, 40, 50, 64, 72, 96, 100, 117, 160)
EPSILONS = (1e-6, 1e-5, 1e-3, 1e-2)
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "gelu_fast")
WINDOWS = (1, 2, 5, 9, 16, 17, 31, 48)
LAYERS = (1, 2, 3, 4, 5)
FACTORS = (0.3, 0.7, 1.0, 1.4, 2.5)

Draw = Callable[[random.Random], Any]


def _one_of(*choices: Any) -> Draw:
    return lambda draw: draw.choice(choices)


_FLAG, _EPSILON, _WIDTH, _FACTOR = _one_of(True, False), _one_of(*EPSILONS), _one_of(*WIDTHS), _one_of(*FACTORS)

FIELDS: dict[str, Draw] = {
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "use_bias", "use_conv_bias", "mamba_proj_bias", "mamba_conv_bias", "conv_bias",
         "qkv_bias", "add_bias_linear", "enable_bias", "lm_head_bias", "attention_out_bias", "use_qkv_bias", "bias",
         "projectors_bias", "tie_word_embeddings", "qk_layernorm", "use_qk_norm", "use_parallel_residual", "parallel_attn",
         "new_decoder_architecture", "multi_query", "alibi", "do_layer_norm_before", "layer_norm_elementwise_affine",
         "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "norm_topk_prob", "mup_enabled", "rope_interleave",
         "use_expert_bias", "use_sandwich_norm",
         "use_attention_gate", "mamba_rms_norm", "mamba_norm_before_gate", "use_mem_rope", "use_shared_attention_adapter",
         "attn_temperature_tuning", "use_sliding_window", "use_post_norm", "block_auto_adjust_ff_dim", "norm_bias",
         "attention_softmax_in_fp32", "apply_residual_connection_post_layernorm"),
        _FLAG,
    ),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "mixer_rms_eps"), _EPSILON
    ),
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"), _one_of(*ACTIVATIONS)
    ),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "intermediate_size_mlp", "prefix_dense_intermediate_size", "moe_shared_expert_intermediate_size", "ffn_dim",
         "ffn_hidden_size", "n_inner"),
        _WIDTH,
    ),
    **dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "lm_head_multiplier",
         "key_multiplier", "attention_out_multiplier", "attention_in_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
         "full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor", "linear_attn_beta_factor",
         "mlp_alpha_factor", "mlp_beta_factor", "route_scale", "routed_scaling_factor", "router_scaling_factor", "scale_depth",
         "scale_emb"),
        _FACTOR,
    ),
    "attention_multiplier": _one_of(0.05, 0.2, 0.4),
    "num_hidden_layers": _one_of(*LAYERS),
    "vocab_size": _one_of(384, 301, 387, 513, 1000),
    "sliding_window": _one_of(*WINDOWS),
    "local_attention": _one_of(2, 6, 8, 16, 30),
    "max_window_layers": _one_of(0, 1, 2, 9),
    "sliding_window_pattern": _one_of(1, 2, 3, 4),
    "global_attn_every_n_layers": _one_of(1, 2, 3, 4),
    "prefix_dense_sliding_window_pattern": _one_of(1, 2),
    "shared_expert_combination_strategy": _one_of("average", "sum"),
    "expert_selection_fn": _one_of("softmax", "sigmoid"),
    "no_rope_layer_interval": _one_of(1, 2, 3, 4),
    "attention_chunk_size": _one_of(3, 12, 16, 24),
    "floor_scale": _one_of(4, 8, 64, 8192),
    "attn_scale": _one_of(0.1, 0.5),
    "query_pre_attn_scalar": _one_of(5, 16, 20, 100),
    "final_logit_softcapping": _one_of(None, 3.0, 30.0),
    "attn_logit_softcapping": _one_of(None, 2.0, 50.0),
    "clip_qkv": _one_of(None, 0.5, 2.0),
    "num_ln_in_parallel_attn": _one_of(None, 1, 2),
    "router_jitter_noise": _one_of(0.01, 0.1, 0.4),
    "decoder_sparse_step": _one_of(1, 2, 3),
    "interleave_moe_layer_step": _one_of(1, 2, 3),
    "first_k_dense_replace": _one_of(0, 1, 2),
    "num_dense_layers": _one_of(0, 1, 2),
    "moe_layer_start_index": _one_of(0, 1, 2),
    "moe_layer_end_index": _one_of(-1, 1, 2),
    "moe_layer_interval": _one_of(1, 2),
    "num_shared_experts": _one_of(0, 1, 2),
    "n_shared_experts": _one_of(1, 2, 3),
    "moe_num_shared_experts": _one_of(0, 1, 2),
    "topk_method": _one_of("greedy", "group_limited_greedy"),
    "expert_layer_period": _one_of(1, 2, 3),
    "attn_layer_period": _one_of(1, 2, 3),
    "swiglu_limit": _one_of(0.5, 7.0),
    "swiglu_alpha": _one_of(1.0, 1.702),
    "dim_model_base": _one_of(20, 64),
    "expansion_ratio": _one_of(2, 4),
    "state_size": _one_of(3, 8, 16, 20),
    "ssm_state_size": _one_of(3, 8, 16, 20),
    "mamba_d_state": _one_of(3, 8, 16, 20),
    "time_step_rank": _one_of("auto", 1, 5, 9),
    "mamba_dt_rank": _one_of("auto", 1, 5, 9),
    "conv_kernel": _one_of(2, 3, 4),
    "mamba_d_conv": _one_of(2, 3, 4),
    "conv_L_cache": _one_of(2, 3, 4),
    "linear_conv_kernel_dim": _one_of(2, 3, 4),
    "chunk_size": _one_of(4, 16, 256),
    "mamba_chunk_size": _one_of(4, 16, 256),
    "time_step_limit": _one_of([0.0, float("inf")], [0.2, 0.8]),
    "time_step_min": _one_of(0.001, 0.3),
    "mlp_multipliers": _one_of(None, [0.6, 1.5]),
    "ssm_multipliers": _one_of(None, [0.9, 1.1, 0.8, 1.2, 0.7]),
    "position_embedding_type": _one_of(None, "rope"),
    "adapter_rank": _one_of(1, 6, 17),
    "num_mem_blocks": _one_of(1, 2),
    "block_multiple_of": _one_of(16, 24),
    "block_ffn_dim_multiplier": _one_of(1.0, 1.3),
    "linear_head_dim": _one_of(5, 8, 16, 24),
    "block_size": _one_of(4, 16, 256),
    "attention_window_size": _one_of(*WINDOWS),
    "conv1d_width": _one_of(2, 3, 4),
    "logits_soft_cap": _one_of(3.0, 30.0),
    "attention_hidden_size": _one_of(33, 48, 100),
    "rescale_every": _one_of(-1, 0, 1, 2, 3),
    "short_conv_kernel_size": _one_of(2, 3, 4),
    "kda_safe_gate": _FLAG,
    "kda_lower_bound": _one_of(-5.0, -1.0, -0.2),
    "layer_group_size": _one_of(1, 2, 3, 9),
    "linear_num_heads": _one_of(1, 2, 3, 4),
    "linear_key_head_dim": _one_of(5, 8, 16, 24),
    "linear_value_head_dim": _one_of(7, 8, 16, 20),
    "kv_lora_rank": _one_of(7, 16, 32, 40),
    "q_lora_rank": _one_of(None, 5, 28),
    "qk_nope_head_dim": _one_of(6, 16, 24),
    "qk_rope_head_dim": _one_of(4, 8, 10, 16),
    "v_head_dim": _one_of(5, 16, 20, 40),
    "type_vocab_size": _one_of(1, 2, 3),
}  # fmt: skip

FIXED = {"hidden_act": "silu", "mlp_hidden_act": "relu2"}
SILU_ONLY = (
    "Mamba", "FalconMamba", "Jamba", "Bamba", "FalconH1", "GraniteMoeHybrid", "Qwen3Next", "Qwen3_5", "GptOss", "Apertus",
    "OlmoHybrid", "KimiLinear", "BailingHybrid", "MiniMaxF", "HYV4", "DeepseekV4",
)  # fmt: skip
"""Families whose activation is a part of the layer (or of none of its own): others there are refused, and told so."""
HEAD_DIM_IS_OTHER = ("Mamba2", "Helium", "Zamba2")
UNGROUPED = (
    "MLA",
    "Deepseek",
    "MiniCPM3",
    "Youtu",
    "Mistral4",
    "Glm4MoeLite",
    "GlmMoeDsa",
    "HYV4",
    "GPTNeoX",
    "Persimmon",
    "Bloom",
    "KimiLinear",
    "BailingH",
)
"""Families whose attention has one key a query, or which name the number otherwise."""


@functools.cache
def class_of(architecture: str) -> Any:
    """Transformers' class."""
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, architecture)


def fields_of(architecture: str) -> set[str]:
    """Fields of its config class, and further names for them."""
    config_class = class_of(architecture).config_class
    return {field.name for field in dataclasses.fields(config_class)} | {*getattr(config_class, "attribute_map", {})}


def _source(architecture: str) -> str:
    return inspect.getsource(sys.modules[class_of(architecture).__module__])


def draw_config(architecture: str, seed: int) -> dict[str, Any]:
    """Overrides of a tiny model's config."""
    draw, config_class = random.Random(f"{architecture} {seed}"), class_of(architecture).config_class
    fields = {field.name for field in dataclasses.fields(config_class)}
    values = {name: make(draw) for name, make in FIELDS.items() if name in fields and draw.random() < 0.6}
    if architecture.startswith(SILU_ONLY):
        values = {name: value for name, value in values.items() if name not in ("hidden_act", "hidden_activation")}
    values |= _drawn_sizes(architecture, draw, fields)
    layers = values.setdefault("num_hidden_layers", draw.choice(LAYERS))
    values |= _drawn_mixture(architecture, draw, fields)
    values |= _drawn_layers(architecture, draw, fields, layers)
    if "use_sliding_window" in fields and not values.get("use_sliding_window"):
        values.pop("layer_types", None)
    values |= _drawn_rotation(architecture, draw, values, layers)
    values |= OWN.get(architecture, lambda draw, values: {})(draw, tiny_values(architecture) | values)
    names = getattr(config_class, "attribute_map", {})
    for common, own in names.items():
        if common in values and own not in values:
            values[own] = values[common]
    return values


def _drawn_sizes(architecture: str, draw: random.Random, fields: set[str]) -> dict[str, Any]:
    """Heads, their size and the model's width."""
    heads, head_dim = draw.choice(HEADS), draw.choice(HEAD_DIMS)
    kv_heads = draw.choice([count for count in range(1, heads + 1) if heads % count == 0])
    if architecture.startswith(UNGROUPED):
        kv_heads = heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if "head_dim" in fields and not architecture.startswith(HEAD_DIM_IS_OTHER):
        while heads * head_dim > 512:
            head_dim = draw.choice(HEAD_DIMS)
        hidden = draw.choice(HIDDEN)
        return sizes | {
            "head_dim": head_dim,
            "hidden_size": hidden if draw.random() < 0.1 else -(-hidden // heads) * heads,
        }
    while not 24 <= heads * head_dim <= 320:
        head_dim = draw.choice(HEAD_DIMS)
    return sizes | {"hidden_size": heads * head_dim}


def _drawn_mixture(architecture: str, draw: random.Random, fields: set[str]) -> dict[str, Any]:
    """Experts, how many a token has, and groups of them."""
    groups = draw.choice((1, 1, 2, 3)) if "n_group" in fields else 1
    experts, chosen_groups = groups * draw.choice((2, 3, 4, 5)), draw.randint(1, groups)
    top = draw.randint(1, min(chosen_groups * (experts // groups), 4))
    values: dict[str, Any] = {"n_group": groups, "topk_group": chosen_groups}
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        values[name] = experts
    for name in ("num_experts_per_tok", "moe_k", "moe_topk"):
        values[name] = top
    return {name: value for name, value in values.items() if name in fields}


def _drawn_layers(architecture: str, draw: random.Random, fields: set[str], layers: int) -> dict[str, Any]:
    """Kinds of layers, one by one."""
    values: dict[str, Any] = {}
    kinds = KINDS.get(architecture)
    if kinds is None and "layer_types" in fields:
        kinds = ("sliding_attention", "full_attention")
    if kinds is not None:
        name = "layer_types" if "layer_types" in fields else "layers_block_type"
        values[name] = [kinds[0], *(draw.choice(kinds) for _ in range(layers - 1))]
        draw.shuffle(values[name])
    if "mlp_layer_types" in fields:
        kinds = [draw.choice(("dense", "sparse")) for _ in range(layers)]
        values["mlp_layer_types"] = kinds if draw.random() < 0.6 else None
    if "mlp_only_layers" in fields:
        values["mlp_only_layers"] = [layer for layer in range(layers) if draw.random() < 0.3]
    return values


KINDS = {
    "Qwen3NextForCausalLM": ("linear_attention", "full_attention"),
    "Qwen3_5ForCausalLM": ("linear_attention", "full_attention"),
    "Qwen3_5MoeForCausalLM": ("linear_attention", "full_attention"),
    "OlmoHybridForCausalLM": ("linear_attention", "full_attention"),
    "KimiLinearForCausalLM": ("linear_attention", "full_attention"),
    "MiniMaxForCausalLM": ("linear_attention", "full_attention"),
    "BailingHybridForCausalLM": ("linear_attention", "full_attention"),
    "Lfm2ForCausalLM": ("conv", "full_attention"),
    "Lfm3ForCausalLM": ("conv", "sliding_attention", "full_attention"),
    "Lfm2MoeForCausalLM": ("conv", "full_attention"),
    "GraniteMoeHybridForCausalLM": ("linear_attention", "full_attention"),
    "NemotronHForCausalLM": ("linear_attention", "full_attention", "mlp", "moe"),
    "Zamba2ForCausalLM": ("linear_attention", "hybrid"),
    "Llama4ForCausalLM": ("chunked_attention", "full_attention"),
    "InklingForCausalLM": ("hybrid_sliding", "hybrid"),
}
BY_KIND = ("Gemma3", "Olmo3", "Mellum", "ModernBert", "Lfm3")
"""Families that rotate layers with a window otherwise than the rest."""


def _drawn_rotation(architecture: str, draw: random.Random, values: dict[str, Any], layers: int) -> dict[str, Any]:
    """`rope_parameters` of any scheme, beyond whose original length prompts go."""
    source = _source(architecture)
    if "ROPE_INIT_FUNCTIONS" not in source:
        return {}
    given = tiny_values(architecture) | values
    heads = given["num_attention_heads"]
    size = given.get("head_dim") or given["hidden_size"] // heads
    size = given.get("qk_rope_head_dim", size)
    shares = [share for share in (0.25, 0.4, 0.5, 0.75, 1.0) if int(size * share) >= 4 and int(size * share) % 2 == 0]
    is_partial = (
        "partial_rotary_factor" in source
        and not architecture.startswith(WHOLE_ROTATION)
        and "qk_rope_head_dim" not in given
        and bool(shares)
    )
    share = draw.choice(shares) if is_partial else 1.0

    def scheme() -> dict[str, Any]:
        rotation = _drawn_scheme(
            draw,
            int(size * share) // 2,
            next((each for name, each in SCHEMES_OF.items() if architecture.startswith(name)), SCHEMES),
        )
        return rotation | ({"partial_rotary_factor": share} if is_partial else {})

    if architecture.startswith(BY_KIND):
        each = {kind: scheme() for kind in ("full_attention", "sliding_attention")}
        for rotation in each.values():
            rotation.pop("truncate", None)  # Transformers looks for it beside the kinds
        return {"rope_parameters": each}
    return {"rope_parameters": scheme()}


def _drawn_scheme(draw: random.Random, pairs: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    kind = draw.choice(kinds)
    rotation: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice((100.0, 10000.0, 1e6))}
    if kind != "default":
        rotation["factor"] = draw.choice((1.5, 4.0, 8.0))
    if kind == "llama3":
        rotation |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice((2.0, 4.0))}
    if kind == "llama3":
        rotation["original_max_position_embeddings"] = draw.choice((16, 32))
    if kind == "yarn":
        rotation |= draw.choice(({"factor": 8.0, "original_max_position_embeddings": 32},
                                 {"factor": 16.0, "original_max_position_embeddings": 16}))  # fmt: skip
        extra = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2, "truncate": False}
        rotation |= {name: value for name, value in extra.items() if draw.random() < 0.3}
        if draw.random() < 0.4:
            rotation |= {"mscale": draw.choice((0.7, 1.0)), "mscale_all_dim": draw.choice((0.7, 1.0))}
    if kind == "longrope":
        # Transformers chooses by each prompt's length: all are beyond it, or none; and Phi-MoE's long list is never used.
        original = draw.choice((SHORTEST - 1, 256)) if "default" in kinds else 256
        rotation |= {
            "original_max_position_embeddings": original,
            "short_factor": [1.0 + 0.1 * draw.random() * i for i in range(pairs)],
            "long_factor": [2.0 + 0.5 * i for i in range(pairs)],
        }
        if draw.random() < 0.5:
            rotation["attention_factor"] = 1.3
        if "default" not in kinds:
            rotation |= {"short_mscale": 1.2, "long_mscale": 1.4}
    return rotation


SCHEMES = ("default", "default", "linear", "dynamic", "llama3", "yarn", "longrope")
SCHEMES_OF = {
    "Phi3": ("default", "longrope"),
    "Phimo": ("longrope",),
    "NomicB": SCHEMES,
    "Lfm3": (*SCHEMES, "proportional"),
}
WHOLE_ROTATION = ("SolarOpen", "Mellum", "Mistral4")
"""Families whose modules cannot rotate a part of a head, whatever their sources mention."""
SHORTEST = 5
"""Tokens of the shortest prompt."""


def _mamba2(
    heads: str, size: str, groups: str, inner: Callable[[dict[str, Any]], int]
) -> Callable[..., dict[str, Any]]:
    def drawn(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
        width = inner(values)
        counts = [count for count in (1, 2, 3, 4, 6, 8, 12) if width % count == 0]
        count = draw.choice(counts)
        shared = draw.choice([group for group in range(1, count + 1) if count % group == 0])
        return {heads: count, groups: shared} | ({size: width // count} if size else {})

    return drawn


def _delta(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    keys = draw.choice((1, 2, 3))
    return {"linear_num_key_heads": keys, "linear_num_value_heads": keys * draw.choice((1, 2, 3))}


def _olmo_hybrid(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Transformers saves convolutions of queries, keys and values in three equal parts, whatever their sizes are."""
    heads, size = _delta(draw, values), draw.choice((5, 8, 16))
    each = heads["linear_num_value_heads"] // heads["linear_num_key_heads"]
    base = {"rope_parameters": {"rope_theta": None}} if draw.random() < 0.3 else {}
    return heads | base | {
        "linear_key_head_dim": each * size, "linear_value_head_dim": size, "linear_allow_neg_eigval": draw.random() < 0.5
    }  # fmt: skip


def _recurrent_gemma(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    kinds = [draw.choice(("recurrent", "recurrent", "attention")) for _ in range(draw.choice((1, 2, 3)))]
    return {"lru_width": values["num_attention_heads"] * draw.choice((3, 8, 20)), "block_types": kinds}


def _falcon(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Transformers rounds Falcon's slopes to bfloat16, which is exact for powers of two alone."""
    heads = values["num_attention_heads"]
    is_exact = heads & (heads - 1) == 0
    return {"num_kv_heads": values["num_key_value_heads"], **({} if is_exact else {"alibi": False})}


def _mpt(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    options = {"clip_qkv": draw.choice((None, 0.8)), "softmax_scale": draw.choice((None, 0.3)),
               "alibi_bias_max": draw.choice((4, 8)), "alibi": draw.choice((True, False))}  # fmt: skip
    return {"attn_config": options}


def _gptj(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    size = values["hidden_size"] // values["num_attention_heads"]
    return {"rotary_dim": draw.choice([2 * half for half in range(1, size // 2 + 1)])}


def _codegen(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    """Its class splits heads over four devices."""
    heads, size = draw.choice((4, 8)), draw.choice((8, 10, 16, 24))
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * size}
    return sizes | {"rotary_dim": draw.choice((2, 6, 8)), "n_ctx": 256}


def _gpt_neo(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    kinds = [draw.choice(("global", "local")) for _ in range(values["num_hidden_layers"])]
    return {"attention_types": [[kinds, 1]], "window_size": draw.choice(WINDOWS)}


def _nemotron_h(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    heads = draw.choice((2, 3, 4, 6))
    groups = draw.choice([count for count in range(1, heads + 1) if heads % count == 0])
    return {
        "moe_latent_size": draw.choice((None, 20, 33)),
        "mamba_num_heads": heads,
        "n_groups": groups,
        "mamba_head_dim": draw.choice((4, 10, 16)),
    }


def _helium(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    return {"head_dim": values["hidden_size"] // values["num_attention_heads"], "num_hidden_layers": 2}


def _mistral4(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    share = values["qk_rope_head_dim"] / (values["qk_nope_head_dim"] + values["qk_rope_head_dim"])
    rope = {"llama_4_scaling_beta": 0.2, "original_max_position_embeddings": 16} | values["rope_parameters"]
    return {"rope_parameters": rope | {"partial_rotary_factor": share}, "n_group": 1, "topk_group": 1}


def _jamba(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{half}_layer_offset": values[f"{half}_layer_period"] - 1 for half in ("attn", "expert")}


def _zamba2(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    heads = draw.choice([count for count in (1, 2, 4, 8) if 2 * values["hidden_size"] % count == 0])
    groups = draw.choice([count for count in range(1, heads + 1) if heads % count == 0])
    attention = values["num_attention_heads"]
    return {"n_mamba_heads": heads, "mamba_ngroups": groups, "attention_head_dim": 2 * values["hidden_size"] // attention,
            "num_key_value_heads": attention}  # fmt: skip


def _opt(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    return {"word_embed_proj_dim": draw.choice((values["hidden_size"], 40, 33))}


def _granite_swa(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    return {"layer_rope_theta": [draw.choice((0, 500.0, 1e4)) for _ in range(values["num_hidden_layers"])]}


def _hunyuan_moe(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {}
    return {"moe_topk": [draw.randint(1, values["num_experts"]) for _ in range(values["num_hidden_layers"])]}


def _llama4(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    layers = range(values["num_hidden_layers"])
    rotates = [int(draw.random() < 0.6) for _ in layers]
    return {"no_rope_layers": draw.choice((None, rotates)), "layer_types": draw.choice((None, values["layer_types"]))}


def _smollm3(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    layers = range(values["num_hidden_layers"])
    return {"no_rope_layers": draw.choice((None, [int(draw.random() < 0.6) for _ in layers])), "layer_types": None}


def _bamba(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    inner = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", lambda values: 2 * values["hidden_size"])
    chosen = [layer for layer in range(values["num_hidden_layers"]) if draw.random() < 0.5]
    return inner(draw, values) | {"attn_layer_indices": chosen, "mamba_expand": 2}


def _ministral3(draw: random.Random, values: dict[str, Any]) -> dict[str, Any]:
    rope = dict(values["rope_parameters"])
    rope = {"original_max_position_embeddings": 16, "llama_4_scaling_beta": draw.choice((0.1, 0.3))} | rope
    return {"rope_parameters": rope, "sliding_window": draw.choice((None, 9))}


OWN: dict[str, Callable[[random.Random, dict[str, Any]], dict[str, Any]]] = {
    "Mamba2ForCausalLM": _mamba2("num_heads", "head_dim", "n_groups", lambda values: 2 * values["hidden_size"]),
    "BambaForCausalLM": _bamba,
    "GraniteMoeHybridForCausalLM": lambda draw, values: (
        {"mamba_expand": 2}
        | _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", lambda values: 2 * values["hidden_size"])(
            draw, values
        )
    ),
    "FalconH1ForCausalLM": lambda draw, values: (
        {"mamba_d_ssm": 96, "mamba_expand": 2}
        | _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", lambda values: 96)(draw, values)
    ),
    "Qwen3NextForCausalLM": _delta,
    "Qwen3_5ForCausalLM": _delta,
    "Qwen3_5MoeForCausalLM": _delta,
    "OlmoHybridForCausalLM": _olmo_hybrid,
    "RecurrentGemmaForCausalLM": _recurrent_gemma,
    "FalconForCausalLM": _falcon,
    "MptForCausalLM": _mpt,
    "GPTJForCausalLM": _gptj,
    "CodeGenForCausalLM": _codegen,
    "GPTNeoForCausalLM": _gpt_neo,
    "GPTNeoXJapaneseForCausalLM": lambda draw, values: {"intermediate_multiple_size": draw.choice((1, 2, 3))},
    "OpenAIGPTLMHeadModel": lambda draw, values: {"afn": draw.choice(("gelu", "relu", "silu", "swish"))},
    "NemotronHForCausalLM": _nemotron_h,
    "Zamba2ForCausalLM": _zamba2,
    "HeliumForCausalLM": _helium,
    "Mistral4ForCausalLM": _mistral4,
    "JambaForCausalLM": _jamba,
    "Dots1ForCausalLM": lambda draw, values: {"sliding_window": draw.choice(WINDOWS)},
    "HYV3ForCausalLM": lambda draw, values: {"num_shared_experts": draw.choice((1, 2))},
    "OPTForCausalLM": _opt,
    "GraniteSWAForCausalLM": _granite_swa,
    "GraniteMoeSWAForCausalLM": _granite_swa,
    "HunYuanMoEV1ForCausalLM": _hunyuan_moe,
    "Llama4ForCausalLM": _llama4,
    "SmolLM3ForCausalLM": _smollm3,
    "Ministral3ForCausalLM": _ministral3,
    **LATEST,
}
