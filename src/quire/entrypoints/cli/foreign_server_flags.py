"""Flags of vLLM's `serve` that belong to parts which Quire's server does not have: accepted at their defaults, else refused.

A flag that the server has itself is not looked up here.
"""

from typing import Any

from quire.engine.arg_foreign import NOTHING, OFF

_UNREAD = (None, False, True)
"""Values of a switch that changes nothing."""

FOREIGN_SERVER_FLAGS: dict[str, tuple[Any, ...]] = {
    "headless": OFF,
    "grpc": OFF,
    "grpc_port": NOTHING,
    "trust_request_mm_kwargs": OFF,
    "tool_server": NOTHING,
    "lora_modules": NOTHING,
    "enable_log_deltas": _UNREAD,
    "enable_server_load_tracking": _UNREAD,
    "enable_tokenizer_info_endpoint": _UNREAD,
    "tokens_only": OFF,
    "enable_scale_out": OFF,
    "enable_offline_docs": OFF,
    "enable_flash_late_interaction": _UNREAD,
    "cohere_is_reasoning_model": (None, True),
    "cohere_format": (None, "cmd4"),
    "anthropic_disabled_thinking_effort": (None, "auto"),
    "data_parallel_supervisor_port": (None, 9256),
    "dp_supervisor_probe_interval_s": (None, 5.0, 5),
    "dp_supervisor_probe_timeout_s": (None, 5.0, 5),
    "dp_supervisor_probe_failure_threshold": (None, 3),
    # Of older versions, in many scripts.
    "disable_log_requests": _UNREAD,
    "disable_frontend_multiprocessing": _UNREAD,
    "enable_reasoning": _UNREAD,
    "num_scheduler_steps": (None, 1),
    "multi_step_stream_outputs": _UNREAD,
    "worker_use_ray": OFF,
}
"""Setting to the values that are accepted: those that change nothing here."""
