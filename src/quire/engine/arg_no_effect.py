"""Settings of vLLM's that have no meaning here, whatever their value: taken, so that its command lines run, and a line of the log
says so.

Knows names and reasons.
"""

from typing import Any

from quire.errors import ConfigError
from quire.guards import is_dict
from quire.logger import init_logger

logger = init_logger(__name__)

_SHARED: dict[str, str] = {
    "kernels are chosen by what is measured (`quire explain MODEL`)": """
        disable_cascade_attn enable_flashinfer_autotune gdn_prefill_backend ir_op_priority kda_decode_backend
        kda_prefill_backend linear_backend mamba_backend mamba_ssu_algorithm moe_backend monokernel
        sparse_indexer_topk_backend
    """,
    "the sizes of graphs are Quire's own choice": """
        compilation_config compile_sizes cudagraph_capture_sizes max_cudagraph_capture_size max_seq_len_to_capture
    """,
    "weights are read in one streaming pass": """
        pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size
        safetensors_prefetch_num_threads use_tqdm_on_load
    """,
    "an engine can always be put to sleep": "enable_cumem_allocator sleep_mode_backend sleep_mode_offload_cudagraph",
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

SEVERAL = ("cudagraph_capture_sizes", "compile_sizes")
"""Those whose flags take several words."""


def take(name: str, value: Any) -> None:
    """Say that a setting changes nothing. Raises ConfigError: it asks for what another setting does."""
    if name == "compilation_config" and _asks_for_none(value):
        raise ConfigError(f"compilation_config={value!r} records no steps: use enforce_eager", setting="enforce_eager")
    logger.info("%s has no effect: %s", name, NO_EFFECT[name])


def _asks_for_none(value: Any) -> bool:
    if not is_dict(value):
        return _is_zero(value)
    mode = value.get("mode", value.get("level"))
    return _is_zero(mode) or "NONE" in (mode, value.get("cudagraph_mode"))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 0
