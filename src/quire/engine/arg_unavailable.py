"""Settings that users of vLLM know and Quire does not have yet, other spellings of those it has, and the wrapper that
turns an unknown keyword into an error that helps.

A setting in a table is accepted at its default, so that existing scripts run; any other value is refused, never
silently ignored. What has no meaning here, whatever its value, is taken, and a line of the log says so.
"""

import dataclasses
import functools
from typing import Any, TypeVar

from quire.engine.arg_objects import KERNEL_KEYS, as_plain, check_keys
from quire.errors import ConfigError, did_you_mean
from quire.guards import is_dict
from quire.logger import init_logger

OFF = (None, False)
NOTHING: tuple[Any, ...] = (None, {}, [], "")
"""Values that mean that a setting is not used."""


SHORT_FOREIGN: dict[str, tuple[str, ...]] = {
    "api_server_count": ("-asc",), "nnodes": ("-n",), "node_rank": ("-r",), "decode_context_parallel_size": ("-dcp",),
    "prefill_context_parallel_size": ("-pcp",), "data_parallel_rank": ("-dpn",), "data_parallel_start_rank": ("-dpr",),
    "data_parallel_size_local": ("-dpl",), "data_parallel_address": ("-dpa",), "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_backend": ("-dpb",), "data_parallel_hybrid_lb": ("-dph",), "data_parallel_external_lb": ("-dpe",),
    "data_parallel_multi_port_external_lb": ("-dpm",), "speculative_config": ("-sc",), "diffusion_config": ("-dc",),
    "compilation_config": ("-cc",),
}  # fmt: skip
"""Short flags of settings that are not there."""


logger = init_logger(__name__)

_SHARED: dict[str, str] = {
    "kernels are chosen by what is measured (`quire explain MODEL`)": """
        disable_cascade_attn enable_flashinfer_autotune gdn_prefill_backend ir_op_priority kda_decode_backend
        kda_prefill_backend kernel_config linear_backend mamba_backend mamba_ssu_algorithm moe_backend monokernel
        sparse_indexer_topk_backend
    """,
    "the sizes of graphs are Quire's own choice": """
        compilation_config compile_sizes cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture
    """,
    "no model reads media yet: requests with media are refused": """
        allowed_local_media_path allowed_media_domains disable_chunked_mm_input interleave_mm_strings language_model_only
        limit_mm_per_prompt media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode
        mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method
        video_pruning_rate
    """,
    "weights are read in one streaming pass": """
        pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
        safetensors_prefetch_num_threads use_tqdm_on_load
    """,
    "an engine can always be put to sleep": """
        enable_cumem_allocator enable_sleep_mode sleep_mode_backend sleep_mode_offload_cudagraph
    """,
    "code of a checkpoint is never run": "code_revision trust_remote_code",
    "nothing is compiled while requests run": "jit_monitor_mode jit_monitor_verbose",
}
"""A reason to the settings that it is for."""

NO_EFFECT: dict[str, str] = {
    **{name: reason for reason, names in _SHARED.items() for name in names.split()},
    "aggregate_engine_logging": "there is one engine, which logs for itself",
    "disable_hybrid_kv_cache_manager": "layers of different kinds always share one pool of pages",
    "renderer_num_workers": "long prompts are tokenized beside the event loop",
    "show_hidden_metrics_for_version": "no metric is hidden",
}
"""Setting to the reason."""

SEVERAL = ("cudagraph_capture_sizes", "compile_sizes", "allowed_media_domains")
"""Those whose flags take several words."""


def take(name: str, value: Any) -> None:
    """Say that a setting changes nothing. Raises ConfigError: it asks for what another setting does."""
    if name == "compilation_config" and _asks_for_none(value):
        raise ConfigError(f"compilation_config={value!r} records no steps: use enforce_eager", setting="enforce_eager")
    if name == "kernel_config" and is_dict(value):
        check_keys(name, value, KERNEL_KEYS)
    logger.info("%s has no effect: %s", name, NO_EFFECT[name])


def _asks_for_none(value: Any) -> bool:
    if not is_dict(value):
        return _is_zero(value)
    mode = value.get("mode", value.get("level"))
    return _is_zero(mode) or "NONE" in (mode, value.get("cudagraph_mode"))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 0


T = TypeVar("T")

ALIASES = {
    "policy": "scheduling_policy", "cache_dtype": "kv_cache_dtype", "scheduler_delay_factor": "delay_factor",
    "max_num_queued_reqs": "max_num_waiting", "max_num_queued_tokens": "max_waiting_tokens",
    "device_memory_utilization": "gpu_memory_utilization",
}  # fmt: skip
"""Another spelling to the field's own name."""

_EMPTY = """
    aux_output_config cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_params
    custom_histogram_buckets data_parallel_start_rank dcp_comm_backend dcp_q_replicate device_ids
    disable_nccl_for_dp_synchronization distributed_timeout_seconds ec_manager_config elastic_ep_max_dp_size
    engram_config eplb_config fault_tolerance_config lora_target_modules
    max_lora_cls_labels numa_bind_cpus numa_bind_nodes reasoning_parser
    sleep_preserve_parameter_names watchdog_config
    additional_config default_mm_loras ec_transfer_config
    io_processor_plugin kv_transfer_config lora_modules model_class_overrides
    quantization_config spec_method spec_model spec_tokens speculative_config weight_transfer_config
    kv_cache_dtype_skip_layers worker_extension_cls collect_detailed_traces hf_config_path
    fully_sharded_loras max_cpu_loras kv_offloading_size data_parallel_rank data_parallel_address
    data_parallel_rpc_port data_parallel_size_local max_num_active_seqs max_num_scheduled_tokens mamba_block_size
    prefix_match_unit watermark_config diffusion_config max_parallel_loading_workers placement_group
"""
_SWITCHED_OFF = """
    allow_deprecated_quantization data_parallel_multi_port_external_lb
    enable_ep_weight_filter enable_hc_sp enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_moe_shared_loras enable_nccl_comm_suspend enable_shm_tensor_arena enable_tower_connector_lora
    fail_on_environ_validation specialize_active_lora
    enable_lora enable_prompt_embeds enable_return_routed_experts return_sampling_mask enable_eplb enable_dbo
    enable_fault_tolerance enable_elastic_ep numa_bind kv_sharing_fast_prefill use_fp64_gumbel enable_trace_replay
    enable_layerwise_nvtx_tracing kv_cache_metrics cudagraph_metrics data_parallel_hybrid_lb data_parallel_external_lb
    enable_batch_sharded_sampling long_prefill_token_threshold_adaptive mm_encoder_only use_replayssm ray_workers_use_nsight
"""

UNAVAILABLE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_EMPTY.split(), NOTHING), **dict.fromkeys(_SWITCHED_OFF.split(), OFF),
    "dbo_decode_token_threshold": (32,), "dbo_prefill_token_threshold": (512,), "dcp_kv_cache_interleave_size": (1,),
    "dp_sync_interval": (16,), "kv_cache_metrics_sample": (0.01,), "mamba_cache_philox_rounds": (0,),
    "master_addr": ("127.0.0.1",), "master_port": (29501,), "offload_backend": ("auto",),
    "per_request_spec_decode_metrics": ("none",), "prefix_cache_retention_interval": (0,),
    "replayssm_buffer_len": (16,), "swa_bounded_replay": (True,), "ubatch_size": (0,),
    "config_format": ("auto", "hf", "mistral"), "all2all_backend": ("allgather_reducescatter", None),
    "decode_context_parallel_size": (1,), "prefill_context_parallel_size": (1,), "nnodes": (1,), "node_rank": (0,),
    "data_parallel_backend": ("mp",), "expert_placement_strategy": ("linear",), "max_loras": (1, None),
    "max_lora_rank": (16, None), "lora_dtype": ("auto",), "kv_offloading_backend": ("native",),
    "mamba_cache_dtype": ("auto",), "mamba_ssm_cache_dtype": ("auto",), "mamba_cache_mode": (None, "none"),
    "offload_group_size": (0,), "offload_num_in_group": (1,), "offload_prefetch_step": (1,), "offload_params": NOTHING,
    "optimization_level": (None, 1, 2, 3), "performance_mode": ("balanced", None), "shutdown_timeout": (0, None),
    "watermark": (0.0, 0), "scheduler_reserve_full_isl": (True, None), "prefill_schedule_interval": (1,),
    "cpu_offload_gb": (0, 0.0), "num_lookahead_slots": (0,), "kv_events_config": (*NOTHING, {"enable_kv_cache_events": False}),
    "async_engine": OFF, "disable_async_output_proc": OFF, "use_v2_block_manager": (True, False, None),
}  # fmt: skip
"""Setting to the values that mean "off" or "as ever"."""


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
        message = f"{name}={value!r} and {field}={kwargs[field]!r} are one setting: give only {field}"
        raise ConfigError(message, setting=field)
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

    One that has no meaning here (`NO_EFFECT`) is accepted whatever its value.
    """
    value = as_plain(value)
    if name in NO_EFFECT and name not in table:
        take(name, value)
        return
    if name not in table:
        others = [*known, *ALIASES, *UNAVAILABLE]
        raise ConfigError(f"{name!r} is not an engine setting{did_you_mean(name, others, '; {}')}", setting=name)
    if not _is_among(value, table[name]):
        instead = f"leave it out (accepted: {', '.join(map(repr, table[name]))})"
        raise ConfigError(f"{name}={value!r} is not available yet in Quire; {instead}", setting=name)
