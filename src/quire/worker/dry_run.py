"""What a worker would choose, without reading or allocating a weight: for `quire explain`.

The model is built on torch's meta device, which has shapes and no memory. Knows nothing of how the answer is printed.
"""

from typing import Any

import torch

from quire.attention.selector import Selection
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheSpec, describe_memory
from quire.core.kv_planner import plan_kv_cache
from quire.errors import ConfigError
from quire.kernels import ops
from quire.layers.decoder import Decoder
from quire.layers.interface import CausalLM
from quire.lora.placement import Places
from quire.model_loader.loader import build_model, check_fit
from quire.platforms.interface import DeviceRuntime, Platform
from quire.worker.kv_budget import compute_kv_bytes


def explain_without_weights(config: EngineConfig, platform: Platform) -> dict[str, Any]:
    """Kernels, attention backend, the model in numbers and the split of memory.

    Raises:
        ConfigError: no spec for the architecture, or no backend or format for its layers.
    """
    runtime = platform.runtime(config)
    model, selection = _built(config, platform)
    numbers = model.describe()
    if config.lora is not None and isinstance(model, Decoder):
        count, rank = config.lora.expected(config.scheduler.max_num_seqs)
        places = Places(model.spec, model.sources, model.plan, lambda module: None)
        numbers["adapter_bytes"] = count * places.num_bytes(rank, model.dtype)
    return {
        "kernels": ops.explain(),
        "attention_backend": {"chosen": model.attention_backend.name, "reasons": dict(selection.reasons)},
        "model": numbers,
        "memory": _memory(config, platform, runtime, numbers, model.kv_cache_specs()),
    }


def _built(config: EngineConfig, platform: Platform) -> tuple[CausalLM, Selection]:
    """The model without memory, on the kernels that would be chosen."""
    platform.select_kernels(deterministic=config.model.deterministic)
    tokens, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    return build_model(config, platform, torch.device("meta"), tokens, rows)


def describe_without_weights(config: EngineConfig, platform: Platform) -> tuple[dict[str, Any], list[KVCacheSpec]]:
    """The model in numbers (`parameters`, `weight_bytes`, `workspace_bytes` …), and what each layer keeps in pages.
    Raises ConfigError: no spec for the architecture, or no backend or format for its layers."""
    model, _ = _built(config, platform)
    return model.describe(), model.kv_cache_specs()


def check_without_weights(config: EngineConfig, platform: Platform) -> None:
    """Refuse what could not run, before its weights are fetched.

    Raises:
        ConfigError: no spec for the architecture, no backend or format for its layers, or more weights than the device has
            memory.
    """
    model, _ = _built(config, platform)
    memory = platform.memory_bytes()
    if memory is not None:
        check_fit(model, memory, "are all that the device has")


def _memory(
    config: EngineConfig, platform: Platform, runtime: DeviceRuntime, numbers: dict[str, Any], specs: list[KVCacheSpec]
) -> dict[str, Any]:
    """An estimate from shapes; the engine measures when the weights are there."""
    free, total = runtime.memory_info()
    weights, workspace = int(numbers["weight_bytes"]), int(numbers.get("workspace_bytes", 0))
    adapters = int(numbers.get("adapter_bytes", 0))
    available = compute_kv_bytes(config, free - weights, workspace + adapters, specs, runtime.kv_cache_cap())
    split: dict[str, Any] = {
        "total": total,
        "free": free,
        "weights": weights,
        "workspace": workspace,
        **({"adapters": adapters} if adapters else {}),
        "available_for_kv_cache": available,
    }
    try:
        plan = plan_kv_cache(specs, available, config.cache, config.scheduler, group=platform.kv_groups)
    except ConfigError as error:
        return {**split, "refused": str(error)}
    per_token = int(describe_memory(specs)["kv_bytes_per_token"])
    kv_tokens = plan.num_blocks * (plan.page_bytes // per_token if per_token else plan.block_size // len(plan.groups))
    return {**split, "kv_blocks": plan.num_blocks, "kv_host_blocks": plan.num_host_blocks, "kv_tokens": kv_tokens}
