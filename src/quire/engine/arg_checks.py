"""What each engine setting may be, taken by itself: types, ranges, allowed words. One table, one error form.

Knows values. Knows nothing of the model or the device; what depends on those is checked where it is resolved.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from typing import Any

from quire.config import limits
from quire.config.resolve import DTYPE_NAMES
from quire.errors import ConfigError
from quire.guards import is_mapping, is_sequence

Check = Callable[[str, Any], None]


def refuse(name: str, value: object, allowed: str) -> ConfigError:
    """The one form of these errors."""
    return ConfigError(f"{name}={value!r} is not valid: it must be {allowed}", setting=name)


def whole(minimum: int, maximum: int | None = None, *, optional: bool = False) -> Check:
    """A whole number in a range."""
    top = f" to {maximum}" if maximum is not None else " or more"
    allowed = f"a whole number, {minimum}{top}{', or None' if optional else ''}"

    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < minimum
            or (maximum is not None and value > maximum)
        ):
            raise refuse(name, value, allowed)

    return check


def number(minimum: float, maximum: float = math.inf, *, above: bool = False, optional: bool = False) -> Check:
    """A finite number in a range; `above` leaves the minimum out."""
    low = f"above {minimum:g}" if above else f"at least {minimum:g}"
    allowed = f"a number {low}" + (f" and at most {maximum:g}" if math.isfinite(maximum) else "")
    allowed += ", or None" if optional else ""

    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise refuse(name, value, allowed)
        if value < minimum or (above and value == minimum) or value > maximum:
            raise refuse(name, value, allowed)

    return check


def flag(*, optional: bool = False) -> Check:
    """True or False."""
    allowed = "True, False or None" if optional else "True or False"

    def check(name: str, value: Any) -> None:
        if not (isinstance(value, bool) or (value is None and optional)):
            raise refuse(name, value, allowed)

    return check


def text(*, optional: bool = False) -> Check:
    """A string; an empty one only where the setting is optional in that sense."""
    allowed = "a string, or None" if optional else "a string"

    def check(name: str, value: Any) -> None:
        if not (isinstance(value, str) or (value is None and optional)):
            raise refuse(name, value, allowed)

    return check


def one_of(*words: str, optional: bool = False) -> Check:
    """One of some words."""
    allowed = f"one of {', '.join(words)}" + (", or None" if optional else "")

    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if value not in words or not isinstance(value, str):
            near = difflib.get_close_matches(str(value), words, n=1)
            raise refuse(name, value, allowed + (f" (did you mean {near[0]!r}?)" if near else ""))

    return check


def mapping(*, optional: bool = False, function: bool = False) -> Check:
    """A dict with string keys; with `function`, also something to call."""
    allowed = f"a dict with string keys{' or a function' if function else ''}{', or None' if optional else ''}"

    def check(name: str, value: Any) -> None:
        if (value is None and optional) or (function and callable(value)):
            return
        if not is_mapping(value) or not all(isinstance(key, str) for key in value):
            raise refuse(name, value, allowed)

    return check


def class_path(*words: str, optional: bool = True) -> Check:
    """A class, its path (`package.module:Class`), or one of some words."""
    known = f"one of {', '.join(words)}, " if words else ""
    allowed = f"{known}a class, or a class path such as 'package.module:Class'{', or None' if optional else ''}"

    def check(name: str, value: Any) -> None:
        if (value is None and optional) or isinstance(value, type) or value in words:
            return
        if not isinstance(value, str) or not (":" in value or "." in value):
            raise refuse(name, value, allowed)

    return check


def strings(allowed: str, *, or_one: bool = True) -> Check:
    """A list of strings that are not empty, a single one, or None."""

    def check(name: str, value: Any) -> None:
        if value is None or (or_one and isinstance(value, str) and value):
            return
        if not is_sequence(value) or not all(isinstance(item, str) and item for item in value):
            raise refuse(name, value, allowed)

    return check


def processors(name: str, value: Any) -> None:
    """Class paths or classes of logits processors."""
    if value is None:
        return
    if not is_sequence(value) or not all(
        isinstance(item, type) or (isinstance(item, str) and (":" in item or "." in item)) for item in value
    ):
        raise refuse(name, value, "a list of classes or of class paths such as 'package.module:Class', or None")


def dtype_name(name: str, value: Any) -> None:
    """A dtype's name, or torch's own object, whose text is such a name."""
    if str(value).removeprefix("torch.") not in ("auto", *DTYPE_NAMES):
        raise refuse(name, value, f"one of auto, {', '.join(DTYPE_NAMES)}")


def anything(name: str, value: Any) -> None:
    """Whoever uses it checks it."""


CHECKS: dict[str, Check] = {
    "model": text(optional=True),
    "tokenizer": text(optional=True),
    "tokenizer_mode": one_of("auto", "hf", "slow", "mistral"),
    "skip_tokenizer_init": flag(),
    "trust_remote_code": flag(),
    "dtype": dtype_name,
    "seed": whole(0, 2**63 - 1),
    "max_model_len": whole(1, limits.MAX_MODEL_LEN, optional=True),
    "served_model_name": strings("a name, or a list of names"),
    "revision": text(optional=True),
    "code_revision": text(optional=True),
    "tokenizer_revision": text(optional=True),
    "hf_overrides": mapping(function=True),
    "rope_scaling": mapping(optional=True),
    "rope_theta": number(0.0, above=True, optional=True),
    "quantization": text(optional=True),
    "model_impl": one_of("auto", "quire", "vllm", "transformers"),
    "enforce_eager": flag(),
    "deterministic": flag(),
    "max_logprobs": whole(-1),
    "logprobs_mode": one_of("raw_logprobs", "processed_logprobs"),
    "disable_sliding_window": flag(),
    "generation_config": text(),
    "override_generation_config": mapping(),
    "chat_template": text(optional=True),
    "chat_template_content_format": one_of("auto", "string", "openai"),
    "logits_processors": processors,
    "runner": one_of("auto", "generate", "pooling"),
    "convert": one_of("auto", "none", "embed", "classify", "reward"),
    "task": one_of("auto", "generate", "embed", "classify", "score", "reward", optional=True),
    "pooler_config": mapping(optional=True),
    "structured_outputs_config": mapping(optional=True),
    "guided_decoding_backend": text(optional=True),
    "allowed_local_media_path": text(),
    "enable_sleep_mode": flag(),
    "load_format": one_of(
        "auto",
        "hf",
        "safetensors",
        "fastsafetensors",
        "pt",
        "mistral",
        "gguf",
        "bitsandbytes",
        "sharded_state",
        "dummy",
    ),
    "download_dir": text(optional=True),
    "ignore_patterns": strings("a file name pattern, a list of them, or None"),
    "model_loader_extra_config": mapping(),
    "block_size": whole(1, 4096, optional=True),
    "gpu_memory_utilization": number(0.0, 1.0, above=True),
    "kv_cache_memory_bytes": whole(1, optional=True),
    "num_gpu_blocks_override": whole(2, 2**31 - 1, optional=True),
    "swap_space": number(0.0),
    "kv_cache_dtype": one_of("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"),
    "enable_prefix_caching": flag(optional=True),
    "prefix_caching_hash_algo": one_of("blake2b", "sha256"),
    "cpu_offload_gb": number(0.0),
    "kv_events_config": mapping(optional=True),
    "pipeline_parallel_size": whole(1),
    "tensor_parallel_size": whole(1),
    "data_parallel_size": whole(1),
    "enable_expert_parallel": flag(),
    "distributed_executor_backend": class_path("uni", "mp", "ray", "external_launcher"),
    "worker_cls": class_path("auto", optional=False),
    "disable_custom_all_reduce": flag(),
    "max_parallel_loading_workers": whole(1, optional=True),
    "ray_workers_use_nsight": flag(),
    "placement_group": anything,
    "max_num_batched_tokens": whole(1, 2**31 - 1, optional=True),
    "max_num_seqs": whole(1, 2**20, optional=True),
    "scheduling_policy": one_of("fcfs", "priority", "fair"),
    "enable_chunked_prefill": flag(optional=True),
    "preemption_mode": one_of("recompute", "swap", optional=True),
    "num_lookahead_slots": whole(0),
    "delay_factor": number(0.0),
    "async_scheduling": flag(optional=True),
    "scheduler_cls": class_path(),
    "long_prefill_token_threshold": whole(0),
    "max_num_partial_prefills": whole(0),
    "max_step_ms": number(0.0),
    "max_num_waiting": whole(0),
    "max_waiting_tokens": whole(0),
    "stream_interval": whole(1, 2**20),
    "device": text(),
    "cpu_threads": whole(0, 4096),
    "attention_backend": text(optional=True),
    "disable_log_stats": flag(),
    "log_stats_interval": number(0.001, optional=True),
    "record_timelines": flag(),
    "otlp_traces_endpoint": text(optional=True),
    "profiler_config": mapping(optional=True),
    "enable_log_requests": flag(),
    "enable_log_outputs": flag(),
    "log_prompts": flag(),
    "max_log_len": whole(0, optional=True),
}
"""Setting to its check; a test sees to it that every field has one."""


def check(args: Any) -> None:
    """Check every field of an `EngineArgs` by itself.

    Raises:
        ConfigError: the first that is not valid.
    """
    for field in dataclasses.fields(args):
        CHECKS[field.name](field.name, getattr(args, field.name))
