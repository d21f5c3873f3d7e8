"""The kernels that a model of a shape that no list has will probably launch, from the lists of models like it.

Products choose from a few block shapes whatever the model is: what any list has of them may be needed. Attention has the
model's heads and pages in its constants, which are put in place here. A guess that is wrong costs compile time beside the
start; one that is missing is found by the rehearsal. Knows lists and configuration; imports neither torch nor Triton.
"""

import re
from collections.abc import Mapping
from typing import Any

from quire.config import EngineConfig
from quire.kernels.triton.runtime import places
from quire.kernels.triton.runtime.places import Variant

_HERE = "quire.kernels.triton."
_DECODE, _ROPE = f"{_HERE}attention.decode_kernel:decode_kernel", f"{_HERE}attention.rope:_rope_and_cache"
_PREFILL = f"{_HERE}attention.prefill:_prefill_kernel"
_HOPPER = f"{_HERE}attention.hopper_kernel:prefill_kernel"
_OF_FEATURES = tuple(f"{_HERE}sampling.{part}" for part in ("filters", "logprobs", "penalties", "heads"))
_QUERY_ROWS, _PANEL = 64, 64
_MOST_ACCUMULATED = 4096
"""Values of partial results that a program of decode attention keeps."""


def guess(config: EngineConfig, capability: int) -> list[Variant]:
    """Variants to compile for a model without a list, those of the likest model first."""
    shape = _shape_of(config)
    prefix = f"-{config.model.dtype}-sm{capability}-"
    files = sorted({file.name for folder in places.list_folders() for file in folder.glob(f"*{prefix}*.json")})
    architecture = config.model.architecture
    files.sort(key=lambda name: not name.startswith(f"{architecture}-"))
    found: list[Variant] = []
    for name in files:
        if shape is not None:
            found += [_translated(variant, shape) for variant in places.find_list(name.removesuffix(".json"))]
    unlike = tuple(_HERE + part for part in _unlike(config))
    likely = [variant for variant in places.merge(found) if not variant["kernel"].startswith(unlike or "-")]
    return sorted(likely, key=is_of_feature)


def is_of_feature(variant: Variant) -> bool:
    """Whether no step launches this kernel by itself: a request's feature does."""
    return variant["kernel"].startswith(_OF_FEATURES)


def _unlike(config: EngineConfig) -> list[str]:
    """Beginnings of modules whose kernels this model launches none of."""
    hf_config = config.model.hf_config
    has_experts = any(hf_config.get(field) for field in ("num_experts", "num_local_experts", "n_routed_experts"))
    is_plain = config.model.quantization is None
    return [*(() if has_experts else ("experts.",)), *(("fp8.", "packed.") if is_plain else ())]


def _shape_of(config: EngineConfig) -> dict[str, int] | None:
    """Heads and pages; None where the configuration does not say them under the usual names."""
    hf_config, ranks = config.model.hf_config, config.parallel.tensor_parallel_size
    heads = hf_config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < ranks or config.cache.block_size is None:
        return None
    kv_heads = hf_config.get("num_key_value_heads") or heads
    head_dim = hf_config.get("head_dim") or hf_config.get("hidden_size", 0) // heads
    kv_heads = max(kv_heads // ranks, 1)
    return {"heads": heads // ranks, "kv_heads": kv_heads, "head_dim": head_dim, "page": config.cache.block_size}


def _power_of_2(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _translated(variant: Variant, shape: Mapping[str, int]) -> Variant:
    """An attention kernel's variant with this shape's constants; others as they are."""
    kernel, old = variant["kernel"], variant["constants"]
    if kernel not in (_DECODE, _ROPE, _PREFILL, _HOPPER):
        return variant
    heads, kv_heads, head_dim, page = shape["heads"], shape["kv_heads"], shape["head_dim"], shape["page"]
    group, padded = heads // kv_heads, _power_of_2(head_dim)
    new: dict[str, Any] = {"PAGE": page}
    if kernel in (_DECODE, _ROPE):
        new |= {"K": kv_heads, "H": head_dim, "H_PAD": padded, "ROTARY_DIM": head_dim if old["ROTARY_DIM"] else 0}
    if kernel == _ROPE:
        new["N"] = heads
    elif kernel == _DECODE:
        group_pad = _power_of_2(group)
        tokens = max(1, _QUERY_ROWS // group_pad) if old.get("SHORT") else 1
        parts = max(1, _MOST_ACCUMULATED // (tokens * group_pad * padded))
        new |= {"G": group, "G_PAD": group_pad, "TOKENS": tokens, "PARTS": parts}
    else:
        pack = min(group, _QUERY_ROWS)
        new |= {"NUM_KV_HEADS": kv_heads, "GROUP": group, "PACK": pack, "HEAD_DIM": head_dim}
        if kernel == _PREFILL:
            new["BLOCK_D"] = padded
    constants = {name: new.get(name, value) for name, value in old.items()}
    types = variant["types"]
    if kernel == _HOPPER and "q_desc" in types:
        piece = f"[{min(page, old['TILE_S'])}, {_PANEL}]"
        query = f"[{_QUERY_ROWS // constants['PACK']}, {constants['PACK']}, {_PANEL}]"
        types = {
            **types,
            "kv_desc": re.sub(r"\[\d+, \d+\]", piece, types["kv_desc"], count=1),
            "q_desc": re.sub(r"\[\d+, \d+, \d+\]", query, types["q_desc"], count=1),
        }
    return {**variant, "types": types, "constants": constants}
