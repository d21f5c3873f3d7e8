"""Settings that users of vLLM know and Quire does not have yet, other spellings of those it has, and the wrapper that
turns an unknown keyword into an error that helps.

A setting in a table is accepted at its default, so that existing scripts run; any other value is refused, never
silently ignored.
"""

import dataclasses
import difflib
import functools
from typing import Any, TypeVar

from quire.engine.arg_foreign import FOREIGN, NOTHING, OFF
from quire.engine.arg_no_effect import NO_EFFECT, take
from quire.errors import ConfigError

T = TypeVar("T")

ALIASES = {
    "policy": "scheduling_policy",
    "cache_dtype": "kv_cache_dtype",
    "scheduler_delay_factor": "delay_factor",
    "max_num_queued_reqs": "max_num_waiting",
    "max_num_queued_tokens": "max_waiting_tokens",
    "device_memory_utilization": "gpu_memory_utilization",
}
"""Another spelling to the field's own name."""

_EMPTY = """
    additional_config allowed_media_domains attention_config kernel_config default_mm_loras ec_transfer_config
    io_processor_plugin kv_transfer_config limit_mm_per_prompt lora_modules mm_processor_kwargs model_class_overrides
    quantization_config reasoning_config spec_method spec_model spec_tokens speculative_config weight_transfer_config
    kv_cache_dtype_skip_layers worker_extension_cls collect_detailed_traces hf_config_path hf_token
    fully_sharded_loras max_cpu_loras kv_offloading_size data_parallel_rank data_parallel_address
    data_parallel_rpc_port data_parallel_size_local max_num_active_seqs max_num_scheduled_tokens mamba_block_size
    prefix_match_unit watermark_config diffusion_config
"""
_SWITCHED_OFF = """
    enable_lora enable_prompt_embeds enable_return_routed_experts return_sampling_mask enable_eplb enable_dbo
    enable_fault_tolerance enable_elastic_ep numa_bind kv_sharing_fast_prefill use_fp64_gumbel enable_trace_replay
    enable_layerwise_nvtx_tracing kv_cache_metrics cudagraph_metrics data_parallel_hybrid_lb data_parallel_external_lb
    enable_batch_sharded_sampling disable_chunked_mm_input long_prefill_token_threshold_adaptive language_model_only
    mm_encoder_only use_replayssm
"""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    **FOREIGN,
    **dict.fromkeys(_EMPTY.split(), NOTHING),
    **dict.fromkeys(_SWITCHED_OFF.split(), OFF),
    "config_format": ("auto", "hf", "mistral"),
    "all2all_backend": ("allgather_reducescatter", None),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "nnodes": (1,),
    "node_rank": (0,),
    "data_parallel_backend": ("mp",),
    "expert_placement_strategy": ("linear",),
    "max_loras": (1, None),
    "max_lora_rank": (16, None),
    "lora_dtype": ("auto",),
    "kv_offloading_backend": ("native",),
    "mamba_cache_dtype": ("auto",),
    "mamba_ssm_cache_dtype": ("auto",),
    "mamba_cache_mode": (None, "none"),
    "offload_group_size": (0,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "offload_params": NOTHING,
    "optimization_level": (None, 1, 2, 3),
    "performance_mode": ("balanced", None),
    "shutdown_timeout": (0, None),
    "watermark": (0.0, 0),
    "scheduler_reserve_full_isl": (True, None),
    "prefill_schedule_interval": (1,),
    "async_engine": OFF,
    "disable_async_output_proc": OFF,
    "use_v2_block_manager": (True, False, None),
}
"""Setting to the values that mean "off" or "as ever"."""

NOT_YET_AT_OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "cpu_offload_gb": (0,),
    "ray_workers_use_nsight": (False,),
    "max_parallel_loading_workers": (None,),
    "num_lookahead_slots": (0,),
}
"""Fields of `EngineArgs` whose other values wait for the room that they belong to."""

_INSTEAD = {"hf_token": "set the HF_TOKEN environment variable, or log in with `hf auth login`"}


def refuse_unknown(cls: type[T]) -> type[T]:
    """Class decorator for a dataclass: keywords that are not fields are checked, with a message that helps."""
    generated: Any = cls.__init__
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(generated)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name not in names]:
            value = kwargs.pop(name)
            if name in ALIASES:
                _use_alias(kwargs, name, value)
            else:
                check_unavailable(name, value, names)
        generated(self, *args, **kwargs)

    cls.__init__ = __init__
    return cls


def _use_alias(kwargs: dict[str, Any], name: str, value: Any) -> None:
    field = ALIASES[name]
    if field in kwargs and kwargs[field] != value:
        raise ConfigError(
            f"{name}={value!r} and {field}={kwargs[field]!r} are one setting: give only {field}", setting=field
        )
    kwargs[field] = value


def _is_among(value: Any, defaults: tuple[Any, ...]) -> bool:
    return any(isinstance(value, bool) == isinstance(default, bool) and value == default for default in defaults)


def check_unavailable(name: str, value: Any, known: set[str], table: dict[str, tuple[Any, ...]] = UNAVAILABLE) -> None:
    """Accept a setting that Quire does not have where it is at its default.

    Args:
        known: names that exist, for a hint.
        table: setting to its accepted values.

    Raises:
        ConfigError: another value, or a name that nobody knows.

    One that has no meaning here (`arg_no_effect`) is accepted whatever its value.
    """
    if name in NO_EFFECT and name not in table:
        take(name, value)
        return
    if name not in table:
        near = difflib.get_close_matches(name, [*known, *ALIASES, *UNAVAILABLE], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name!r} is not an engine setting{hint}", setting=name)
    if not _is_among(value, table[name]):
        instead = _INSTEAD.get(name, f"leave it out (accepted: {', '.join(map(repr, table[name]))})")
        shown = "" if name == "hf_token" else f"={value!r}"
        raise ConfigError(f"{name}{shown} is not available yet in Quire; {instead}", setting=name)


def check_not_yet(args: Any) -> None:
    """Refuse values of real fields that nothing would act on. Raises ConfigError: such a value."""
    for name, allowed in NOT_YET_AT_OTHER_VALUES.items():
        value = getattr(args, name)
        if not _is_among(value, allowed):
            raise ConfigError(
                f"{name}={value!r} is not available yet in Quire; allowed: {', '.join(map(repr, allowed))}",
                setting=name,
            )
