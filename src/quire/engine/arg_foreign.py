"""Settings that only vLLM's own parts understand: accepted at their defaults so that existing scripts run, else refused.

Knows names and defaults. Settings that Quire is going to have stand in `arg_unavailable`.
"""

from typing import Any

OFF = (None, False)
NOTHING: tuple[Any, ...] = (None, {}, [], "")
"""Values that mean that a setting is not used."""

_EMPTY = """
    aux_output_config cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cpu_offload_params
    custom_histogram_buckets data_parallel_start_rank dcp_comm_backend dcp_q_replicate device_ids
    disable_nccl_for_dp_synchronization distributed_timeout_seconds ec_manager_config elastic_ep_max_dp_size
    engram_config eplb_config fault_tolerance_config logging_config lora_target_modules
    max_lora_cls_labels media_io_kwargs mm_encoder_attn_backend mm_encoder_attn_dtype
    mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path numa_bind_cpus numa_bind_nodes reasoning_parser
    sleep_preserve_parameter_names video_pruning_rate watchdog_config
"""

_SWITCHED_OFF = """
    allow_deprecated_quantization data_parallel_multi_port_external_lb
    enable_ep_weight_filter enable_hc_sp enable_logging_iteration_details enable_mamba_cache_stochastic_rounding
    enable_mamba_shared_prefix_checkpoint enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds
    enable_moe_shared_loras enable_nccl_comm_suspend enable_shm_tensor_arena enable_tower_connector_lora
    fail_on_environ_validation interleave_mm_strings skip_mm_profiling
    specialize_active_lora
"""

FOREIGN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_EMPTY.split(), NOTHING),
    **dict.fromkeys(_SWITCHED_OFF.split(), OFF),
    "dbo_decode_token_threshold": (32,),
    "dbo_prefill_token_threshold": (512,),
    "dcp_kv_cache_interleave_size": (1,),
    "dp_sync_interval": (16,),
    "kv_cache_metrics_sample": (0.01,),
    "mamba_cache_philox_rounds": (0,),
    "master_addr": ("127.0.0.1",),
    "master_port": (29501,),
    "mm_device_do_normalize": (True,),
    "mm_encoder_fp8_scale_save_margin": (1.5,),
    "mm_encoder_tp_mode": ("weights",),
    "mm_hasher_algorithm": ("blake3",),
    "mm_ipc_gpu_memory_gb": (0,),
    "mm_processor_cache_gb": (4,),
    "mm_processor_cache_type": ("lru",),
    "mm_processor_device": ("auto",),
    "mm_shm_cache_max_object_size_mb": (128,),
    "mm_tensor_ipc": ("direct_rpc",),
    "offload_backend": ("auto",),
    "per_request_spec_decode_metrics": ("none",),
    "prefix_cache_retention_interval": (0,),
    "replayssm_buffer_len": (16,),
    "swa_bounded_replay": (True,),
    "ubatch_size": (0,),
    "video_pruning_method": ("evs",),
}
"""Setting to the values that are accepted."""

SHORT_FOREIGN: dict[str, tuple[str, ...]] = {
    "api_server_count": ("-asc",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "decode_context_parallel_size": ("-dcp",),
    "prefill_context_parallel_size": ("-pcp",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_start_rank": ("-dpr",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_backend": ("-dpb",),
    "data_parallel_hybrid_lb": ("-dph",),
    "data_parallel_external_lb": ("-dpe",),
    "data_parallel_multi_port_external_lb": ("-dpm",),
    "speculative_config": ("-sc",),
    "diffusion_config": ("-dc",),
    "compilation_config": ("-cc",),
    "attention_config": ("-ac",),
}
"""Short flags of settings that are not there."""
