"""The whole engine against Transformers in float32 on configs at the edge of what their classes allow, one at a time, and on
every way of writing a config down: fields left out, null, or as older versions wrote them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.drawn_configs import class_of, draw_config, fields_of
from tests.models.test_drawn_configs import COMMON, NO_MODEL, assert_equal, decoder, make_oracle
from tests.oracles.tiny_models import make_tiny_model, tiny_values
from transformers.activations import ACT2CLS

from quire import LLM
from quire.config import HFConfig
from quire.errors import ConfigError
from quire.kernels.norm import XIELU
from quire.layers.activation import KERNEL_KINDS
from quire.models.encoder_decoder.bart import FAMILIES
from quire.models.registry import ModelRegistry
from quire.models.spec import MoE

__all__ = ["decoder"]

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")
ZERO = ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts", "shared_intermediate_size",
        "moe_shared_expert_intermediate_size")  # fmt: skip
DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
FLAGS = ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "bias", "lm_head_bias", "add_bias_linear", "use_qkv_bias",
         "attention_out_bias", "enable_bias")  # fmt: skip
KINDS = ("sliding_attention", "full_attention", "chunked_attention", "linear_attention", "conv")

Config = dict[str, Any]
Rewrite = Callable[[Config], Config | None]


def edges(architecture: str) -> Iterator[tuple[str, Config]]:
    """Overrides of a tiny model's config, by what they are."""
    fields, layers = fields_of(architecture), tiny_values(architecture)["num_hidden_layers"]

    def known(**values: Any) -> Config:
        return {name: value for name, value in values.items() if name in fields}

    if "moe_layers" in fields:
        yield "no layer with experts", {"moe_layers": []}
    yield "one layer", known(num_hidden_layers=1, n_layer=1, n_layers=1, layer_types=None, layers_block_type=None)
    yield "one head", known(num_attention_heads=1, num_key_value_heads=1, n_head=1, n_heads=1)
    yield "tied", {"tie_word_embeddings": True}
    yield "untied", {"tie_word_embeddings": False}
    yield "an odd vocabulary", {"vocab_size": 301}
    if "num_key_value_heads" in fields:
        yield "one KV head", {"num_key_value_heads": 1}
    if "head_dim" in fields:
        heads = {"num_attention_heads": 5, "num_key_value_heads": 1}
        yield "heads that do not divide the width", {"head_dim": 16, "hidden_size": 36, **heads}
    if fields & {*EXPERTS}:
        for label, count, chosen in (("one expert", 1, 1), ("all experts", 3, 3), ("one of five experts", 5, 1)):
            numbers = dict.fromkeys(EXPERTS, count) | dict.fromkeys(CHOSEN, chosen)
            yield label, known(**numbers, n_group=1, topk_group=1)
        yield "no experts", known(**dict.fromkeys(EXPERTS, 0))
    for name in fields & {*ZERO}:
        yield f"{name}=0", {name: 0}
    for name in fields & {*DENSE}:
        for count in (0, layers, 99):
            yield f"{name}={count}", {name: count}
    for window in (3, 4096) if "sliding_window" in fields else ():
        yield f"a window of {window}", known(sliding_window=window, use_sliding_window=True, max_window_layers=0)
    for kind in KINDS if "layer_types" in fields else ():
        yield f"{kind} alone", known(layer_types=[kind] * layers, use_sliding_window=True, sliding_window=7)
    for name in fields & {*FLAGS}:
        yield f"{name}, tied", {name: True, "tie_word_embeddings": True}
        yield f"{name}=false", {name: False}


def _as_of_old(config: Config, scaling: Config | None = None, **values: Any) -> Config | None:
    """With `rope_theta` and `rope_scaling`; None where the rotation is no single one."""
    rotation = config.pop("rope_parameters", None)
    if not rotation or "rope_theta" not in rotation:
        return None
    config["rope_theta"] = rotation["rope_theta"]
    if "partial_rotary_factor" in rotation:
        config["partial_rotary_factor"] = rotation["partial_rotary_factor"]
    is_plain = rotation["rope_type"] == "default"
    return config | {"rope_scaling": scaling or (None if is_plain else rotation)} | values


def _rotated(config: Config, rotation: Config | None) -> Config | None:
    if "rope_theta" not in (config.get("rope_parameters") or {}):
        return None
    kept = config["rope_parameters"] if rotation and "partial_rotary_factor" in rotation else {}
    return config | {"rope_parameters": rotation if rotation is None else kept | rotation}


WAYS: dict[str, Rewrite] = {
    "rope_theta": _as_of_old,
    "rope_scaling of no kind": lambda config: _as_of_old(config, {"rope_type": "default"}),
    "rope_scaling of no type": lambda config: _as_of_old(config, {"type": "default"}),
    "rope_scaling: linear": lambda config: _as_of_old(config, {"type": "linear", "factor": 3.0}),
    "rope_scaling: dynamic": lambda config: _as_of_old(config, {"type": "dynamic", "factor": 2.0}),
    "rope_scaling: yarn": lambda config: _as_of_old(
        config, {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    ),
    "half of each head, as of old": lambda config: _as_of_old(config, partial_rotary_factor=0.5),
    "a quarter of each head": lambda config: _rotated(config, {"partial_rotary_factor": 0.25}),
    "whole heads": lambda config: _rotated(config, {"partial_rotary_factor": 1.0}),
    "rope_parameters without a base": lambda config: _rotated(config, {"rope_type": "default"}),
    "rope_parameters without a type": lambda config: _rotated(config, {"rope_theta": 500.0}),
    "rope_parameters null": lambda config: _rotated(config, None),
    "no rope_parameters": lambda config: {name: value for name, value in config.items() if name != "rope_parameters"},
    "a window that its class does not know": lambda config: (
        None
        if "sliding_window" in fields_of(config["architectures"][0])
        else config | {"sliding_window": 7, "use_sliding_window": True}
    ),
    "several ends": lambda config: config | {"eos_token_id": [1, 5]},
}
"""From a config.json to the same, or nearly the same, written otherwise; None where that makes no sense."""
BASES: dict[str, Config] = {
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "n_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
"""Where an architecture's tiny model lacks something, one that has it."""
UNLIKE = {
    ("Cohere2MoeForCausalLM", "rope_scaling: linear"): "Transformers' class reads no rope_scaling",
    ("Cohere2MoeForCausalLM", "rope_scaling: yarn"): "Transformers' class reads no rope_scaling",
    ("GPTNeoXForCausalLM", "half of each head, as of old"): "Transformers' class reads rotary_pct alone",
    ("GPTNeoXJapaneseForCausalLM", "half of each head, as of old"): "Transformers' class reads rotary_pct alone",
    ("LongcatFlashForCausalLM", "no experts"): "refused: experts that compute nothing are left",
    ("DeepseekV4ForCausalLM", "one head"): "refused: o_groups is 2",
    ("DeepseekV4ForCausalLM", "heads that do not divide the width"): "refused: o_groups is 2",
    ("Glm4MoeLiteForCausalLM", "a quarter of each head"): "latent attention rotates all of qk_rope_head_dim",
    **{
        ("InklingForCausalLM", f"{kind} alone"): "refused: Transformers masks and computes it as two kinds"
        for kind in KINDS
    },
    **{(name, "untied"): "refused: both halves and the head have one embedding" for name in FAMILIES},
}
SAMPLE = (
    ("HYV3ForCausalLM", "num_shared_experts=0"), ("DeepseekV3ForCausalLM", "n_shared_experts=0"),
    ("GraniteMoeSWAForCausalLM", "one layer"), ("LlamaForCausalLM", "a quarter of each head"),
    ("CohereForCausalLM", "rope_parameters without a base"), ("CwmForCausalLM", "rope_parameters null"),
    ("Mistral4ForCausalLM", "no rope_parameters"), ("Qwen3MoeForCausalLM", "one expert"),
    ("LlamaForCausalLM", "a window that its class does not know"), ("Qwen3NextForCausalLM", "no experts"),
    ("Qwen3NextForCausalLM", "a window that its class does not know"),
    ("M2M100ForConditionalGeneration", "one layer"),
    ("Llama4ForCausalLM", "no layer with experts"), ("NemotronHForCausalLM", "moe_shared_expert_intermediate_size=0"),
)  # fmt: skip


def check(architecture: str, overrides: Config, rewrite: Rewrite | None, path: Path) -> bool:
    """Whether that is a model for Transformers; raises AssertionError where it gives something else."""
    try:
        make_tiny_model(architecture, path, tokenizer=False, seed=1, **(BASES.get(architecture, {}) | overrides))
    except NO_MODEL:
        return False
    if rewrite is not None:
        config = rewrite(json.loads((path / "config.json").read_text()))
        if config is None:
            return False
        (path / "config.json").write_text(json.dumps(config))
    if (oracle := make_oracle(path)) is None:
        return False
    assert_equal(oracle, path, turns=1, max_num_seqs=4, max_num_batched_tokens=48)
    return True


def cases(architecture: str) -> dict[str, tuple[Config, Rewrite | None]]:
    found: dict[str, tuple[Config, Rewrite | None]] = {label: (values, None) for label, values in edges(architecture)}
    return found | {label: ({}, rewrite) for label, rewrite in WAYS.items()}


@pytest.mark.parametrize(("architecture", "label"), SAMPLE)
def test_a_config_at_the_edge_gives_transformers_tokens_and_logprobs(architecture, label, tmp_path):
    assert check(architecture, *cases(architecture)[label], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("decoder", COMMON, indirect=True)
def test_every_config_at_the_edge_gives_transformers_tokens_and_logprobs(decoder, tmp_path):
    for number, (label, case) in enumerate(cases(decoder).items()):
        if (decoder, label) not in UNLIKE:
            check(decoder, *case, tmp_path / str(number))


@pytest.mark.parametrize(
    ("architecture", "label", "message"),
    [
        ("LongcatFlashForCausalLM", "no experts", "n_routed_experts of config.json is 0, and must be"),
        ("DeepseekV4ForCausalLM", "one head", "o_groups of config.json is 2, and must divide num_attention_heads=1"),
        ("InklingForCausalLM", "sliding_attention alone", "has 'sliding_attention'; known: hybrid_sliding, hybrid"),
        ("BartForConditionalGeneration", "untied", "tie_word_embeddings=False of config.json is not supported"),
    ],
)
def test_what_no_layer_can_be_is_refused_by_its_field(architecture, label, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(architecture, *cases(architecture)[label], tmp_path)


@pytest.mark.parametrize("activation", sorted({*KERNEL_KINDS} & {*ACT2CLS} - {XIELU}))
@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("LlamaForCausalLM", "hidden_act"),
        ("OPTForCausalLM", "activation_function"),
        ("Qwen3MoeForCausalLM", "hidden_act"),
    ],
)
def test_activations_by_any_of_their_names_give_transformers_results(architecture, field, activation, tmp_path):
    assert check(architecture, {field: activation, "num_hidden_layers": 1}, None, tmp_path)


def test_convolutions_over_one_token_keep_nothing_and_have_their_pages(tmp_path):
    for number, kinds in enumerate((["conv"] * 4, ["conv", "full_attention", "conv", "conv"])):
        assert check("Lfm2ForCausalLM", {"conv_L_cache": 1, "layer_types": kinds}, None, tmp_path / str(number))


def test_an_activation_that_is_not_known_is_refused_with_those_that_are(tmp_path):
    make_tiny_model("LlamaForCausalLM", tmp_path, tokenizer=False, hidden_act="prelu")
    with pytest.raises(
        ConfigError, match=r"activation 'prelu' of config\.json is not known; known: silu, .*quick_gelu"
    ):
        LLM(str(tmp_path), skip_tokenizer_init=True)


NULLS = ("LlamaForCausalLM", "Gemma3ForCausalLM", "SeedOssForCausalLM", "Qwen3MoeForCausalLM", "MambaForCausalLM")


@pytest.mark.parametrize(
    "decoder",
    [name if name in NULLS else pytest.param(name, marks=pytest.mark.exhaustive) for name in COMMON],
    indirect=True,
)
def test_a_null_is_what_transformers_takes_it_for(decoder):
    config_class, entry = class_of(decoder).config_class, ModelRegistry.resolve(decoder)

    def written(config: Any) -> Config:
        return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [decoder]}

    for seed in range(3):
        try:
            whole = written(config_class(**(tiny_values(decoder) | draw_config(decoder, seed))))
        except NO_MODEL:
            continue
        for name in whole.keys() - {"architectures", "attention_multiplier", "layers_block_type"}:
            given = whole | {name: None}
            try:
                meant = entry.make_spec(HFConfig(written(config_class.from_dict(dict(given)))))
            except (*NO_MODEL, ConfigError):
                continue
            assert entry.make_spec(HFConfig(given)) == meant, name


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForCausalLM", "Llama4ForCausalLM", "Lfm2ForCausalLM", "CwmForCausalLM"]
)
def test_lists_of_layers_end_with_the_last_layer_and_may_not_end_before_it(architecture):
    config = class_of(architecture).config_class(**tiny_values(architecture)).to_dict() | {
        "architectures": [architecture]
    }
    entry = ModelRegistry.resolve(architecture)
    whole = entry.make_spec(HFConfig(config))
    for count in range(1, whole.layers):
        cut = entry.make_spec(HFConfig(config | {"num_hidden_layers": count}))
        assert [cut.mixers_of(layer) for layer in range(count)] == [whole.mixers_of(layer) for layer in range(count)]
    with pytest.raises(ConfigError, match=r"num_hidden_layers=99, but layer\w+ of config\.json names"):
        entry.make_spec(HFConfig(config | {"num_hidden_layers": 99}))


@pytest.mark.parametrize(
    ("architecture", "listed"),
    [
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2, 3, 1], "num_experts": 6}),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": 2, "num_experts": [6, 5, 4, 3]}),
    ],
)
def test_numbers_listed_by_layer_end_with_the_last_layer_too(architecture, listed):
    values = class_of(architecture).config_class(**tiny_values(architecture)).to_dict() | listed
    entry, hf = ModelRegistry.resolve(architecture), values | {"architectures": [architecture]}
    assert len(entry.make_spec(HFConfig(hf | {"num_hidden_layers": 4})).mlps()) == 4
    cut = entry.make_spec(HFConfig(hf | {"num_hidden_layers": 2})).mlps()
    numbers = [(mlp.routing.num_experts, mlp.routing.top_k) for mlp in cut if isinstance(mlp, MoE)]
    assert numbers in ([(6, 1), (6, 2)], [(6, 2), (5, 2)])
    with pytest.raises(ConfigError, match=r"num_hidden_layers=5, but \w+ of config\.json names 4"):
        entry.make_spec(HFConfig(hf | {"num_hidden_layers": 5}))


@pytest.mark.parametrize(
    ("architecture", "window", "windows"),
    [
        ("Qwen2ForCausalLM", {"max_window_layers": 2}, [0, 0, 4096]),
        ("Qwen2ForCausalLM", {"sliding_window": 9}, [0, 0, 0]),
        ("Qwen3ForCausalLM", {"max_window_layers": 1, "sliding_window": None}, [0, 0, 0]),
        ("Qwen3MoeForCausalLM", {"max_window_layers": 2, "sliding_window": 9}, [9, 9, 9]),
    ],
)
def test_windows_are_those_of_the_class_where_a_config_leaves_out_what_they_need(architecture, window, windows):
    values = {**tiny_values(architecture), "use_sliding_window": True, **window, "architectures": [architecture]}
    hf = HFConfig({"hidden_act": "silu", "rms_norm_eps": 1e-6, **values})
    assert [mixer.window for mixer in ModelRegistry.resolve(architecture).make_spec(hf).attentions()] == windows


def test_the_first_llamas_call_their_length_otherwise():
    values = {**tiny_values("LlamaForCausalLM"), "architectures": ["LLaMAForCausalLM"], "max_sequence_length": 77}
    entry = ModelRegistry.resolve("LLaMAForCausalLM")
    assert entry.make_spec(HFConfig(values)).max_positions == values.pop("max_position_embeddings")
    assert entry.make_spec(HFConfig(values)).max_positions == 77


@pytest.mark.parametrize("kinds", [["mlp", "mlp"], ["moe"]])
def test_a_model_without_attention_or_states_is_refused_with_the_field(kinds, tmp_path):
    path = make_tiny_model("NemotronHForCausalLM", tmp_path, layers_block_type=kinds, num_hidden_layers=len(kinds))
    hf = HFConfig(json.loads((path / "config.json").read_text()))
    with pytest.raises(ConfigError, match=r"none of which is attention.*layers_block_type"):
        ModelRegistry.resolve("NemotronHForCausalLM").make_spec(hf)
