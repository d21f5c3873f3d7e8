"""Numbers that no model can have, refused with their field of config.json before anything is built of them.

Knows what the fields of a spec are called in config.json. What a kernel or a backend cannot do is refused by these.
"""

import dataclasses
import numbers
from collections.abc import Iterator
from typing import Any, cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_dict
from quire.kernels.types import Routing
from quire.models.spec import Attention, DecoderSpec, DeltaNet, Mamba2, MoE, RgLru, WeightNames
from quire.models.variants import CompressedAttention

NAMES = {
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate": (
        "intermediate_size",
        "moe_intermediate_size",
        "ffn_dim",
        "n_inner",
        "ffn_hidden_size",
        "hidden_dim",
    ),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "moe_k", "moe_topk"),
    "groups": ("n_group",),
    "top_groups": ("topk_group",),
    "max_positions": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "count": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
    "window": ("sliding_window", "local_attention"),
    "kv_rank": ("kv_lora_rank",),
    "value_dim": ("v_head_dim",),
    "state": ("state_size", "ssm_state_size", "mamba_d_state"),
    "conv": (
        "conv_kernel",
        "mamba_d_conv",
        "conv_L_cache",
        "linear_conv_kernel_dim",
        "short_conv_kernel_size",
        "conv1d_width",
    ),
    "channels": ("lru_width",),
    "out_groups": ("o_groups",),
}
"""A spec's field: what it is called in config.json, by one family or another."""
STATE_SPACE = {
    "heads": ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads", "linear_num_value_heads"),
    "groups": ("mamba_n_groups", "n_groups", "mamba_ngroups"),
    "head_dim": ("mamba_d_head", "mamba_head_dim", "head_dim", "linear_value_head_dim"),
    "key_heads": ("linear_num_key_heads",),
    "key_dim": ("linear_key_head_dim",),
}
POSITIVE = {*NAMES, *STATE_SPACE, "channels", "dt_rank", "norm_groups", "adapter_rank"} - {"eps", "window"}
SHARED: dict[type, tuple[str, str]] = {
    Attention: ("heads", "kv_heads"),
    CompressedAttention: ("heads", "out_groups"),
    Mamba2: ("heads", "groups"),
    DeltaNet: ("heads", "key_heads"),
    RgLru: ("channels", "heads"),
}
"""By kind of part: a number, and the one that must divide it."""
TYPES = {
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "bool": (bool, "true or false"),
}


def check_spec(spec: DecoderSpec, hf: HFConfig) -> None:
    """Every number has its type, counts are at least 1, and what must divide something does.

    Raises:
        ConfigError: names the field, its value and what it may be.
    """
    for part in _parts(spec):
        for field in dataclasses.fields(part):
            _check_number(part, field, hf)
        for kind, (many, few) in SHARED.items():
            if isinstance(part, kind):
                _check_shared(part, many, few, hf)
        if isinstance(part, MoE) and part.routing.num_experts == part.zero_experts:
            raise _refusal(part.routing, "num_experts", hf, "is 0, and must be a whole number of at least 1")
        if isinstance(part, Routing):
            _check_routing(part, hf)


def _parts(value: Any) -> Iterator[Any]:
    """A spec and whatever it is made of."""
    if isinstance(value, tuple):
        for each in cast("tuple[Any, ...]", value):
            yield from _parts(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, WeightNames):
        yield value
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))


def _check_number(part: Any, field: "dataclasses.Field[Any]", hf: HFConfig) -> None:
    value: Any = getattr(part, field.name)
    annotation = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    wanted, _, otherwise = annotation.partition(" | ")
    if wanted not in TYPES or (value is None and otherwise == "None"):
        return
    kind, words = TYPES[wanted]
    is_spec = isinstance(part, DecoderSpec)
    may_be_none = field.name == "layers" and is_spec and (part.reads_items or part.patches is not None)
    least = " of at least 1" if wanted == "int" and field.name in POSITIVE and not may_be_none else ""
    is_right = isinstance(value, kind) and isinstance(value, bool) == (wanted == "bool")
    if not is_right or (least and cast(int, value) < 1):
        raise _refusal(part, field.name, hf, f"is {value!r}, and must be {words}{least}")


def _check_shared(part: Any, many: str, few: str, hf: HFConfig) -> None:
    heads, groups = getattr(part, many), getattr(part, few)
    if heads % groups:
        raise _refusal(part, few, hf, f"is {groups}, and must divide {_name(part, many, hf)}={heads}")


def _check_routing(routing: Routing, hf: HFConfig) -> None:
    count, groups = routing.num_experts, routing.groups
    if count % groups:
        raise _refusal(
            routing, "groups", hf, f"is {groups}, and must divide {_name(routing, 'num_experts', hf)}={count}"
        )
    if routing.top_groups > groups:
        most = f"{_name(routing, 'groups', hf)}={groups}"
        raise _refusal(routing, "top_groups", hf, f"is {routing.top_groups}, and must be at most {most}")
    reachable = count // groups * routing.top_groups
    if routing.top_k > reachable:
        most = f"{reachable}, the experts that a token can reach"
        raise _refusal(routing, "top_k", hf, f"is {routing.top_k}, and must be from 1 to {most}")


def _name(part: Any, field: str, hf: HFConfig) -> str:
    """What this config calls a spec's field; the spec's own word where it has none of the names known."""
    values, text = hf.to_dict(), hf.to_dict().get("text_config")
    values |= text if is_dict(text) else {}
    names = (STATE_SPACE if isinstance(part, Mamba2 | DeltaNet) else {}).get(field) or NAMES.get(field, ())
    there = [name for name in names if name in values]
    there = [name for name in there if values[name] == getattr(part, field)] or there or list(names)
    return there[0] if there else f"{type(part).__name__}.{field}"


def _refusal(part: Any, field: str, hf: HFConfig, what: str) -> ConfigError:
    return ConfigError(f"{_name(part, field, hf)} of config.json {what}", setting="model")
