"""Flags of vLLM's `serve` that belong to parts which Quire's server does not have: accepted at their defaults, else refused.

A flag that the server has itself is not looked up here.
"""

from typing import Any

_OFF = (None, False)
_NOTHING: tuple[Any, ...] = (None, {}, [], "")

FOREIGN_SERVER_FLAGS: dict[str, tuple[Any, ...]] = {
    "headless": _OFF,
    "grpc": _OFF,
    "grpc_port": _NOTHING,
    "trust_request_mm_kwargs": _OFF,
    "tool_server": _NOTHING,
    "lora_modules": _NOTHING,
    "enable_log_deltas": (None, False, True),
    "enable_server_load_tracking": (None, False, True),
    "enable_tokenizer_info_endpoint": (None, False, True),
    "tokens_only": _OFF,
    "enable_scale_out": _OFF,
    "enable_offline_docs": _OFF,
    "enable_flash_late_interaction": (None, False, True),
    "cohere_is_reasoning_model": (None, True),
    "cohere_format": (None, "cmd4"),
    "anthropic_disabled_thinking_effort": (None, "auto"),
    "data_parallel_supervisor_port": (None, 9256),
    "dp_supervisor_probe_interval_s": (None, 5.0, 5),
    "dp_supervisor_probe_timeout_s": (None, 5.0, 5),
    "dp_supervisor_probe_failure_threshold": (None, 3),
    # Of older versions, in many scripts.
    "disable_log_requests": (None, False, True),
    "disable_frontend_multiprocessing": (None, False, True),
    "enable_reasoning": (None, False, True),
    "num_scheduler_steps": (None, 1),
    "multi_step_stream_outputs": (None, False, True),
    "worker_use_ray": _OFF,
}
"""Setting to the values that are accepted: those that change nothing here."""
