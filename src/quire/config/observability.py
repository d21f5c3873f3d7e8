"""What is measured, logged, traced and profiled; and the settings of structured outputs."""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, Literal

from quire.errors import ConfigError, RequestError, did_you_mean
from quire.extras import install_command

_PREFIX = "torch_profiler_"
_IGNORED = ("ignore_frontend", "torch_profiler_dump_cuda_time_total")
"""Keys of vLLM's that mean nothing here: there is no profile of the frontend, and no summary."""


@dataclasses.dataclass(frozen=True)
class ProfilerConfig:
    """How profiles are taken on demand (`start_profile`).

    Attributes:
        profiler: `torch` writes a Chrome trace a worker into `dir`; `device` marks steps for the device vendor's own profiler,
            which runs around the engine (NVTX ranges for Nsight).
        with_stack, record_shapes, with_memory, with_flops: what a trace holds besides times.
        use_gzip: compress traces.
        delay_iterations: steps after the start that are left out.
        max_iterations: steps after which it ends by itself; 0 means no limit.
        torch_profiler_…: vLLM's names of the same.
    """

    profiler: Literal["torch", "device"] = "torch"
    dir: str = ""
    with_stack: bool = True
    record_shapes: bool = False
    with_memory: bool = False
    with_flops: bool = False
    use_gzip: bool = True
    delay_iterations: int = 0
    max_iterations: int = 0
    torch_profiler_dir: dataclasses.InitVar[str | None] = None
    torch_profiler_with_stack: dataclasses.InitVar[bool | None] = None
    torch_profiler_record_shapes: dataclasses.InitVar[bool | None] = None
    torch_profiler_with_memory: dataclasses.InitVar[bool | None] = None
    torch_profiler_with_flops: dataclasses.InitVar[bool | None] = None
    torch_profiler_use_gzip: dataclasses.InitVar[bool | None] = None

    def __post_init__(self, *given: Any) -> None:
        """Take what vLLM's names say."""
        names = ("dir", "with_stack", "record_shapes", "with_memory", "with_flops", "use_gzip")
        for name, value in zip(names, given, strict=True):
            if value is not None:
                object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True)
class ObservabilityConfig:
    """What is measured and logged.

    Attributes:
        enable_log_requests: a line for each request that comes; enable_log_outputs: one for each answer.
        log_prompts: these lines hold texts; otherwise they hold their lengths.
        max_log_len: characters of a text in the log; None means all.
        otlp_traces_endpoint: where spans of requests go; None means nowhere.
        profiler: how profiles are taken; None means that they cannot be.
    """

    disable_log_stats: bool = False
    log_stats_interval_s: float = 10.0
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    log_prompts: bool = False
    max_log_len: int | None = None
    otlp_traces_endpoint: str | None = None
    profiler: ProfilerConfig | None = None


def resolve_profiler(given: dict[str, Any] | None) -> ProfilerConfig | None:
    """The profiler's settings from a user's object, whose keys may be vLLM's.
    Raises ConfigError: an unknown key, a value of the wrong kind, or a torch profiler without a folder."""
    if not given:
        return None
    fields = {field.name: field for field in dataclasses.fields(ProfilerConfig)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix(_PREFIX)
        if key in _IGNORED or (name not in fields and value in (None, 0, False, "")):
            continue
        if name not in fields:
            hint = did_you_mean(name, fields, "; {}", f"; known: {', '.join(fields)}")
            raise ConfigError(f"profiler_config has {key!r}, which is not known{hint}", setting="profiler_config")
        values[name] = value
    if values.get("profiler") == "cuda":
        values["profiler"] = "device"
    config = ProfilerConfig(**values)
    _check_profiler(config)
    return config


def profile_overrides(
    delay_iterations: int | None = None, max_iterations: int | None = None, others: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What one profile takes another value for; `others` has fields of `ProfilerConfig`, whose names may be vLLM's.
    Raises RequestError: a field that is not known, or a value of the wrong kind."""
    asked = {"delay_iterations": delay_iterations, "max_iterations": max_iterations, **(others or {})}
    given: dict[str, Any] = {name.removeprefix(_PREFIX): value for name, value in asked.items() if value is not None}
    fields = {field.name for field in dataclasses.fields(ProfilerConfig)} - {"profiler", "dir"}
    if unknown := sorted(given.keys() - fields):
        message = f"a profile's {unknown[0]!r} cannot be chosen; these can: {', '.join(sorted(fields))}"
        raise RequestError(message, param="profiler_kwargs")
    try:
        _check_profiler(ProfilerConfig(dir="x", **given))
    except ConfigError as error:
        raise RequestError(str(error), param="profiler_kwargs") from None
    return given


def _check_profiler(config: ProfilerConfig) -> None:
    for field in dataclasses.fields(ProfilerConfig):
        value, default = getattr(config, field.name), field.default
        if type(value) is not type(default) or (isinstance(value, int) and value < 0):
            raise ConfigError(
                f"profiler_config's {field.name} is {value!r}; it must be a {type(default).__name__} like {default!r}",
                setting="profiler_config",
            )
    if config.profiler not in ("torch", "device"):
        message = f"profiler_config's profiler is {config.profiler!r}; it may be 'torch' or 'device' (as 'cuda')"
        raise ConfigError(message, setting="profiler_config")
    if config.profiler == "torch" and not config.dir:
        message = "profiler_config needs torch_profiler_dir, the folder that traces are written to"
        raise ConfigError(message, setting="profiler_config")


BACKENDS = ("auto", "xgrammar", "guidance")
_PACKAGES = {"xgrammar": ("xgrammar", "xgrammar"), "guidance": ("llguidance", "structured")}


@dataclasses.dataclass(frozen=True)
class StructuredOutputsConfig:
    """What holds for all answers of a wanted form; the names are vLLM's, but for the last.

    Attributes:
        backend: who makes the masks; `auto` is llguidance.
        disable_any_whitespace, disable_additional_properties: as if every request had said so.
        enable_in_reasoning: the form holds while a model thinks, too.
        disable_jump_forward: tokens that a form leaves no choice about are drawn one a step, too; None: where a device works
            beside the host.
        reasoning_parser: name of the format of a model's reasoning, where neither `--reasoning-parser` nor `--reasoning-config`
            names one.
    """

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False
    disable_jump_forward: bool | None = None
    reasoning_parser: str = ""


def read_structured_outputs_config(
    given: Mapping[str, Any] | None, old_backend: str | None = None
) -> StructuredOutputsConfig:
    """The settings as `--structured-outputs-config` has them; `old_backend` is `--guided-decoding-backend`.
    Raises ConfigError: an unknown key or value, or a backend whose package is not installed."""
    setting = "structured_outputs_config"
    values = dict(given or {})
    if old_backend is not None:
        setting = "guided_decoding_backend" if "backend" not in values else setting
        values.setdefault("backend", old_backend)
    known = {field.name: field.default for field in dataclasses.fields(StructuredOutputsConfig)}
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(
            f"structured_outputs_config has {', '.join(map(repr, unknown))}; allowed: {', '.join(known)}",
            setting=setting,
        )
    for name, value in values.items():
        if name not in ("backend", "reasoning_parser") and not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config.{name}={value!r} must be true or false", setting=setting)
    config = StructuredOutputsConfig(**values)
    if config.backend not in BACKENDS:
        raise ConfigError.of(setting, f"backend={config.backend!r} is not one of {', '.join(BACKENDS)}")
    if config.backend != "auto":
        package, extra = _PACKAGES[config.backend]
        if importlib.util.find_spec(package) is None:
            raise ConfigError.of(
                setting,
                f"backend={config.backend!r} needs the package {package}, which is not installed: "
                f"{install_command(extra)}",
            )
    return config
