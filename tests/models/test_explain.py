"""`quire explain` for each family of models: groups of layers, bytes of keys and values, kernels, formats and limits."""

import dataclasses

import pytest

from quire.engine.arg_utils import EngineArgs
from quire.entrypoints.cli.explain import as_text, build_report
from quire.platforms import current_platform

CACHE_BYTES = 1 << 24
HEADS, KV_HEADS, HEAD = 4, 2, 16
ONE_LAYER = 2 * KV_HEADS * HEAD * 4
"""Bytes of a token's keys and values in a layer, in float32."""
LATENT = (32 + 8) * 4


@dataclasses.dataclass(frozen=True)
class Family:
    """A tiny model and what must be told of it.

    Attributes:
        groups: kind, window and layers of each group.
        per_token: bytes in layers that keep every token.
        ops: kernels that it needs.
        bounded: pages a long request keeps in the other groups.
    """

    architecture: str
    groups: list[tuple[str, int, list[int]]]
    per_token: int
    ops: set[str]
    bounded: int = 0
    settings: dict[str, str] = dataclasses.field(default_factory=dict)


FULL = [("full", 0, [0, 1, 2])]
ATTENTION = {"linear", "rms_norm", "rope_and_cache", "paged_attention"}
FAMILIES = {
    "dense": Family("LlamaForCausalLM", FULL, 3 * ONE_LAYER, ATTENTION),
    # Of each window: what it sees of 8 tokens, what it writes, and the page border before.
    "windowed": Family(
        "Gemma3ForCausalLM", [("sliding_window", 8, [0]), ("sliding_window", 8, [2]), ("full", 0, [1])], ONE_LAYER,
        ATTENTION, bounded=2 * 3,
    ),
    "latent": Family("DeepseekV3ForCausalLM", [("mla", 0, [0, 1, 2])], 3 * LATENT, {"latent_and_cache", "head_linear"}),
    "mixture": Family("MixtralForCausalLM", FULL, 3 * ONE_LAYER, ATTENTION | {"moe_route", "moe_experts"}),
    # Of each group with a state: the last border's, and its own.
    "recurrent": Family(
        "MambaForCausalLM", [("recurrent", 0, [0, 1, 2])], 0, {"selective_scan", "causal_conv"}, bounded=2 * 1
    ),
    "hybrid": Family(
        "BambaForCausalLM", [("recurrent", 0, [0]), ("recurrent", 0, [2]), ("full", 0, [1])], ONE_LAYER,
        ATTENTION | {"ssd_scan", "causal_conv"}, bounded=2 * 2,
    ),
    "encoder": Family("BertModel", FULL, 3 * ONE_LAYER * HEADS // KV_HEADS, {"layer_norm", "paged_attention"}),
    "quantized": Family(
        "Qwen3ForCausalLM", FULL, 2 * 3 * ONE_LAYER, ATTENTION | {"int8_linear"}, settings={"quantization": "int8"}
    ),
}  # fmt: skip


def explain(path, **settings):
    args = EngineArgs(model=str(path), dtype="float32", kv_cache_memory_bytes=CACHE_BYTES, **settings)
    return build_report(args.create_engine_config(), current_platform())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_told_by_groups_bytes_kernels_and_limits(name, tiny):
    family = FAMILIES[name]
    report = explain(tiny(family.architecture), **family.settings)
    model, memory = report["model"], report["memory"]
    assert [(group["kind"], group["window"], group["layers"]) for group in model["kv_groups"]] == family.groups
    assert (model["kv_dtype"], model["kv_bytes_per_token"]) == ("float32", family.per_token)
    # A group's page is as large as any other's: that of a layer with attention, or of the states of all recurrent layers.
    page_bytes = CACHE_BYTES // memory["kv_blocks"]
    assert model.get("kv_bytes_per_request", 0) == pytest.approx(family.bounded * page_bytes, rel=0.01)
    if "recurrent" in [kind for kind, *_ in family.groups]:
        assert "state" in model["block_size_reason"]
    else:
        per_page = family.per_token // sum(kind in ("full", "mla") for kind, *_ in family.groups) * model["block_size"]
        assert memory["kv_blocks"] == CACHE_BYTES // per_page
        assert memory["kv_tokens"] == CACHE_BYTES // per_page * (per_page // family.per_token)
    missing = family.ops - set(report["kernels"])
    assert not missing and all(report["kernels"][op]["function"] for op in family.ops)
    assert report["attention_backend"]["chosen"] in report["attention_backend"]["reasons"]
    assert report["config"]["model"]["max_model_len"]["value"] == model["max_positions"] == 256
    assert all(report["limits"][limit] > 0 for limit in ("MAX_MODEL_LEN", "MAX_TOKENS", "MAX_PROMPTS"))
    text = as_text(report)
    assert f"kv_bytes_per_token {' ' * (len(max(model, key=len)) - 17)}{family.per_token}\n" in text
    assert all(f"\n  {op} " in text for op in family.ops)


def test_a_mixture_tells_what_a_token_uses_and_a_quantized_model_its_formats(tiny):
    mixture, plain = (explain(tiny(f"{name}ForCausalLM"))["model"] for name in ("Mixtral", "Qwen3"))
    experts = 3 * 3 * 64 * 96  # three layers of three matrices, and of five experts two are used
    assert mixture["parameters"] - mixture["active_parameters"] == 3 * experts
    assert "active_parameters" not in plain and "matrices" not in plain
    small = explain(tiny("Qwen3ForCausalLM"), quantization="int8")["model"]
    assert small["quantization"] == "int8" and small["parameters"] == plain["parameters"]
    assert sum(small["matrices"].values()) > 1 and small["weight_bytes"] < plain["weight_bytes"] / 2
