"""What is measured, logged, traced and profiled; and the settings of structured outputs."""

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Literal

from quire.config.checks import FLAG, TEXT, accept_aliases, aliases_of, check_keys, one_of, read_object, setting, whole
from quire.errors import ConfigError, refusing
from quire.extras import install_command
from quire.guards import is_sequence
from quire.logger import init_logger

logger = init_logger(__name__)

_IGNORED = ("ignore_frontend", "torch_profiler_dump_cuda_time_total")
"""vLLM's keys that have no meaning here: there is no profile of the frontend, and no summary."""


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """The value of `--logging-config`.

    Attributes:
        log_level: the lowest level in the log. formatter: `text` or `json`.
        configure_logging: False leaves Python's logging alone.
        pylogging_config_file: JSON for `logging.config.dictConfig`.
    """

    log_level: str | None = setting(None, one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL", "NOTSET"))
    formatter: str | None = setting(None, one_of("text", "json"))
    configure_logging: bool = setting(True, FLAG)
    pylogging_config_file: str | None = setting(None, TEXT)


@accept_aliases
@dataclasses.dataclass(frozen=True)
class ProfilerConfig:
    """How profiles are taken on demand (`start_profile`). vLLM's names (`torch_profiler_dir` …) are accepted, too.

    Attributes:
        profiler: `torch` writes a Chrome trace a worker into `dir`; `device` marks steps for the device vendor's own profiler,
            which runs around the engine (NVTX ranges for Nsight).
        with_stack, record_shapes, with_memory, with_flops: what a trace holds besides times.
        use_gzip: compress traces.
        delay_iterations: steps after the start that are left out.
        max_iterations: steps after which it ends by itself; 0 means no limit.
    """

    profiler: Literal["torch", "device"] = setting("torch", one_of("torch", "device"))
    dir: str = setting("", TEXT, aliases=("torch_profiler_dir",))
    with_stack: bool = setting(True, FLAG, aliases=("torch_profiler_with_stack",))
    record_shapes: bool = setting(False, FLAG, aliases=("torch_profiler_record_shapes",))
    with_memory: bool = setting(False, FLAG, aliases=("torch_profiler_with_memory",))
    with_flops: bool = setting(False, FLAG, aliases=("torch_profiler_with_flops",))
    use_gzip: bool = setting(True, FLAG, aliases=("torch_profiler_use_gzip",))
    delay_iterations: int = setting(0, whole(0))
    max_iterations: int = setting(0, whole(0))


@dataclasses.dataclass(frozen=True)
class ObservabilityConfig:
    """What is measured and logged.

    Attributes:
        enable_log_requests: a line for each request that comes; enable_log_outputs: one for each answer.
        log_prompts: these lines hold texts; otherwise they hold their lengths.
        max_log_len: characters of a text in the log; None means all.
        otlp_traces_endpoint: where spans of requests go; None means nowhere.
        profiler: how profiles are taken; None means that they cannot be.
        custom_histogram_buckets: bounds of histograms, by the name of a family of them.
    """

    disable_log_stats: bool = False
    log_stats_interval_s: float = 10.0
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    log_prompts: bool = False
    max_log_len: int | None = None
    otlp_traces_endpoint: str | None = None
    profiler: ProfilerConfig | None = None
    custom_histogram_buckets: dict[str, tuple[float, ...]] = dataclasses.field(
        default_factory=dict[str, tuple[float, ...]]
    )


HISTOGRAMS = [
    "request_latency",
    "time_to_first_token",
    "inter_token_latency",
    "iteration_tokens",
    "request_params_n",
    "request_num_preemptions",
    "request_tokens",
    "kv_cache_residency",
]
"""vLLM's families of histograms; of the last Quire has none."""


def read_histogram_buckets(given: Mapping[str, Any] | None) -> dict[str, tuple[float, ...]]:
    """Read `--custom-histogram-buckets`. Raises ConfigError for an unknown family, or bounds that do not ascend above 0."""
    setting = "custom_histogram_buckets"
    check_keys(setting, given or {}, HISTOGRAMS)
    for family, bounds in (given or {}).items():
        numbers = is_sequence(bounds) and all(isinstance(each, int | float) and 0 < each < math.inf for each in bounds)
        if not numbers or not bounds or list(bounds) != sorted({float(each) for each in bounds}):
            message = f"{family}={bounds!r} is not valid: it must be a list of numbers above 0 that ascend"
            raise ConfigError.of(setting, message)
    return {family: tuple(map(float, bounds)) for family, bounds in (given or {}).items()}


def resolve_profiler(given: Mapping[str, Any] | None) -> ProfilerConfig | None:
    """Read `--profiler-config`, whose keys may be vLLM's.
    Raises ConfigError for an unknown key, a value of the wrong kind, or a torch profiler without a folder."""
    if not given:
        return None
    known = {*aliases_of(ProfilerConfig), *(field.name for field in dataclasses.fields(ProfilerConfig))}
    asked = {key: value for key, value in given.items() if key in known or value not in (None, 0, False, "")}
    values = {key: value for key, value in asked.items() if key not in _IGNORED}
    if values.get("profiler") == "cuda":
        values["profiler"] = "device"
    config = read_object(ProfilerConfig, "profiler_config", values)
    if config.profiler == "torch" and not config.dir:
        message = "profiler_config needs torch_profiler_dir, the folder that traces are written to"
        raise ConfigError(message, setting="profiler_config")
    return config


def profile_overrides(
    delay_iterations: int | None = None, max_iterations: int | None = None, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of `ProfilerConfig` that one profile changes; the keys of `others` may be vLLM's names.
    Raises RequestError for a field that is not known, or a value of the wrong kind."""
    asked = {"delay_iterations": delay_iterations, "max_iterations": max_iterations, **(others or {})}
    aliases = aliases_of(ProfilerConfig)
    given: dict[str, Any] = {aliases.get(name, name): value for name, value in asked.items() if value is not None}
    fields = {field.name for field in dataclasses.fields(ProfilerConfig)} - {"profiler", "dir"}
    with refusing(ConfigError, param="profiler_kwargs"):
        check_keys("profiler_kwargs", given, fields)
        read_object(ProfilerConfig, "profiler_kwargs", given)
    return given


BACKENDS = ("auto", "xgrammar", "guidance")
_OTHERS = ("outlines", "lm-format-enforcer")
"""vLLM's other backends, whose grammars `auto` takes."""
_PACKAGES = {"xgrammar": ("xgrammar", "xgrammar"), "guidance": ("llguidance", "structured")}


@dataclasses.dataclass(frozen=True)
class StructuredOutputsConfig:
    """Structured output, for all requests; the names are vLLM's, except the last.

    Attributes:
        backend: the library that compiles grammars; `auto` is llguidance.
        disable_any_whitespace, disable_additional_properties: the value for requests that do not set it.
        enable_in_reasoning: the grammar constrains the reasoning, too.
        disable_jump_forward: tokens that the grammar determines are sampled one a step, like others; None means so only where a
            device works beside the host.
        reasoning_parser: name of the format of a model's reasoning, if no other setting names it.
    """

    backend: str = setting("auto", one_of(*BACKENDS))
    disable_any_whitespace: bool = setting(False, FLAG)
    disable_additional_properties: bool = setting(False, FLAG)
    enable_in_reasoning: bool = setting(False, FLAG)
    disable_jump_forward: bool | None = setting(None, FLAG)
    reasoning_parser: str = setting("", TEXT)


def read_structured_outputs_config(
    given: Mapping[str, Any] | None, old_backend: str | None = None
) -> StructuredOutputsConfig:
    """Read `--structured-outputs-config`; `old_backend` is the value of `--guided-decoding-backend`.
    Raises ConfigError for an unknown key or value, or a backend whose package is not installed."""
    setting, values = "structured_outputs_config", dict(given or {})
    if old_backend is not None and "backend" not in values:
        setting, values["backend"] = "guided_decoding_backend", old_backend
        one_of(*BACKENDS, *_OTHERS)(setting, old_backend)
    if values.get("backend") in _OTHERS:
        logger.info("%s: backend=%r is read as 'auto', which takes the same grammars", setting, values["backend"])
        values["backend"] = "auto"
    config = read_object(StructuredOutputsConfig, "structured_outputs_config", values)
    if config.backend != "auto":
        package, extra = _PACKAGES[config.backend]
        if importlib.util.find_spec(package) is None:
            raise ConfigError.of(
                setting,
                f"backend={config.backend!r} needs the package {package}, which is not installed: "
                f"{install_command(extra)}",
            )
    return config
