"""A decoder in numbers, for `quire explain`: parameters, bytes, pages, layers. Reads shapes only."""

from collections import Counter
from typing import Any

import torch

from quire.config.kv_spec import KVCacheSpec, describe_memory, group_layers
from quire.layers.linear import PLAIN, LinearMethod, UnquantizedLinear
from quire.layers.modules import Module
from quire.layers.parallel import ParallelPlan
from quire.models.spec import DecoderSpec, MoE


def describe_weights(
    modules: list[Module], plan: ParallelPlan, dtype: torch.dtype, method: LinearMethod, spec: DecoderSpec
) -> dict[str, Any]:
    """Parameters and bytes on this rank; for mixtures of experts also the parameters that one token uses."""
    parameters = weight_bytes = idle = 0
    for module in modules:
        rows, columns = module.local_shape(plan)
        bias = rows if module.has_bias_on(plan) else 0
        parameters += rows * max(columns, 1) + bias
        if module.kind == "experts":
            idle += rows * max(columns, 1) * (module.experts - _active_experts(spec, module)) // module.experts
        is_head = module.name == "lm_head" and method.stored(*module.sources) is not PLAIN and not module.added_rows
        keeps_experts = module.kind == "experts" and bool(columns) and not module.plain
        keeps_experts &= all(method.keeps_experts(source, columns, dtype) for source in module.sources)
        if module.is_quantizable or is_head or keeps_experts:
            weight_bytes += method.weight_bytes(module.sources, rows, columns, dtype)
        else:
            weight_bytes += (
                rows * max(columns, 1) * (dtype.itemsize if module.columns and module.kind != "table" else 4)
            )
        weight_bytes += 4 * bias
    return {
        "parameters": parameters,
        **({"active_parameters": parameters - idle} if idle else {}),
        "weight_bytes": weight_bytes,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": method.name,
        **({} if isinstance(method, UnquantizedLinear) else {"matrices": _formats(modules, plan, dtype, method)}),
    }


def _formats(modules: list[Module], plan: ParallelPlan, dtype: torch.dtype, method: LinearMethod) -> dict[str, int]:
    """How many matrices are stored in each way; a tensor of all experts is one."""
    names: list[str] = []
    for module in modules:
        is_head = module.name == "lm_head"
        if module.kind == "experts" and module.columns:
            columns = module.local_shape(plan)[1]
            names += (f"experts: {method.describe_experts(source, columns, dtype)}" for source in module.sources)
        elif module.is_quantizable or is_head:
            names += (
                "plain"
                if is_head and (module.added_rows or method.stored(source) is PLAIN)
                else method.describe(source)
                for source in module.sources
            )
    return dict(Counter(names))


def _active_experts(spec: DecoderSpec, module: Module) -> int:
    """How many of a mixture's experts one token takes."""
    mlp = spec.mlps()[int(module.name.split(".")[1])]
    return mlp.routing.top_k if isinstance(mlp, MoE) else module.experts


def describe_pages(kv_specs: list[KVCacheSpec]) -> dict[str, Any]:
    """Bytes of keys and values a token, and which layers share a page table."""
    return {
        "kv_dtype": kv_specs[0].dtype,
        **describe_memory(kv_specs),
        "kv_groups": [
            {"kind": str(group.spec.kind), "window": group.spec.window, "layers": list(group.layers)}
            for group in group_layers(kv_specs)
        ],
    }
