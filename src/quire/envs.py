"""Every environment variable that Quire reads, in one table; `envs.QUIRE_X` reads it when it is accessed.

The only module (beside `env_override`) that looks at the environment.
"""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import ConfigError, nearest

if TYPE_CHECKING:
    QUIRE_CONFIGURE_LOGGING: bool
    QUIRE_LOGGING_LEVEL: str
    QUIRE_LOGGING_PREFIX: str
    QUIRE_LOGGING_STREAM: str
    QUIRE_LOGGING_FORMAT: str
    QUIRE_LOGGING_CONFIG_PATH: str | None
    QUIRE_TRACE_FUNCTION: bool
    QUIRE_LOG_STATS_INTERVAL: float
    QUIRE_API_KEY: str | None
    QUIRE_SERVER_DEV_MODE: bool
    QUIRE_PLUGINS: list[str] | None
    QUIRE_PLATFORM: str | None
    QUIRE_CPU_ISA: str | None
    QUIRE_CPU_THREADS: int | None
    QUIRE_USE_MODELSCOPE: bool
    QUIRE_CACHE_ROOT: str
    QUIRE_KERNEL_CACHE: str | None
    QUIRE_ALLOW_LONG_MAX_MODEL_LEN: bool
    QUIRE_ENABLE_MULTIPROCESSING: bool
    QUIRE_ENGINE_READY_TIMEOUT_S: float
    QUIRE_RPC_BASE_PATH: str | None
    QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH: bool
    QUIRE_HTTP_TIMEOUT_KEEP_ALIVE: int
    QUIRE_HTTP_MAX_REQUEST_BODY_SIZE: int

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


class Variable(NamedTuple):
    """One variable. `parse` gets its text and raises ValueError with the allowed values; `default` is used where it is unset."""

    kind: str
    default: Any
    doc: str
    parse: Callable[[str], Any]


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("1, true, yes, on, 0, false, no or off")


def _parse_text(text: str) -> str | None:
    return text or None


def _parse_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number <= 0:
        raise ValueError("a whole number above 0")
    return number


def _parse_seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise ValueError("a number of seconds above 0")
    return number


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip()
        for allowed in words:
            if word.lower() == allowed.lower():
                return allowed
        raise ValueError(", ".join(words))

    return parse


def _flag(default: bool, doc: str) -> Variable:
    return Variable("bool", default, doc, _parse_bool)


def _text(default: str | None, doc: str) -> Variable:
    return Variable("str", default, doc, _parse_text)


def _default_cache_root() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "quire")


VARIABLES: dict[str, Variable] = {
    "QUIRE_CONFIGURE_LOGGING": _flag(True, "0 leaves Python's logging alone."),
    "QUIRE_LOGGING_LEVEL": Variable(
        "str",
        "INFO",
        "Lowest level that is logged.",
        _one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
    ),
    "QUIRE_LOGGING_PREFIX": Variable("str", "", "Stands before every log line.", str),
    "QUIRE_LOGGING_STREAM": Variable("str", "stdout", "Where the log goes.", _one_of("stdout", "stderr")),
    "QUIRE_LOGGING_FORMAT": Variable("str", "text", "`json` writes one JSON object a line.", _one_of("text", "json")),
    "QUIRE_LOGGING_CONFIG_PATH": _text(
        None, "A JSON file for logging.config.dictConfig, in place of Quire's own set-up."
    ),
    "QUIRE_TRACE_FUNCTION": _flag(
        False, "1 writes every call and return inside the package to a file. Slow; for hangs."
    ),
    "QUIRE_LOG_STATS_INTERVAL": Variable("float", 10.0, "Seconds between two lines of figures.", _parse_seconds),
    "QUIRE_API_KEY": _text(None, "The server's key, where --api-key is not given."),
    "QUIRE_SERVER_DEV_MODE": _flag(False, "1 opens /sleep, /wake_up, /is_sleeping, /server_info and /collective_rpc."),
    "QUIRE_PLUGINS": Variable(
        "list", None, "Comma-separated names of the plugins that may load; unset means all.", _parse_list
    ),
    "QUIRE_PLATFORM": _text(None, "The platform to use: a built-in name, or that of a platform plugin."),
    "QUIRE_CPU_THREADS": Variable(
        "int", None, "Compute threads on a CPU where `cpu_threads` is not given.", _parse_positive
    ),
    "QUIRE_CPU_ISA": _text(
        None, "Instruction set of the CPU kernels, instead of the best one: avx512_bf16, avx512, avx2, neon or generic."
    ),
    "QUIRE_USE_MODELSCOPE": _flag(False, "1 resolves hub ids at ModelScope."),
    "QUIRE_CACHE_ROOT": Variable(
        "str", _default_cache_root, "Where Quire keeps files between runs.", os.path.expanduser
    ),
    "QUIRE_KERNEL_CACHE": _text(
        None, "A folder of compiled GPU kernels (`quire compile-cache --output`) that is only read."
    ),
    "QUIRE_ALLOW_LONG_MAX_MODEL_LEN": _flag(False, "1 allows a max_model_len beyond what the checkpoint declares."),
    "QUIRE_ENABLE_MULTIPROCESSING": _flag(False, "1 runs the offline engine's core in a process of its own."),
    "QUIRE_ENGINE_READY_TIMEOUT_S": Variable(
        "float", 600.0, "How long an engine core may take to start.", _parse_seconds
    ),
    "QUIRE_RPC_BASE_PATH": _text(None, "Folder of the internal Unix sockets; unset means a private temporary folder."),
    "QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH": _flag(False, "1 keeps a server up whose engine has died; see the flag."),
    "QUIRE_HTTP_TIMEOUT_KEEP_ALIVE": Variable("int", 5, "Seconds that an idle connection is kept.", _parse_positive),
    "QUIRE_HTTP_MAX_REQUEST_BODY_SIZE": Variable(
        "int", 32 << 20, "Bytes that a request's body may have.", _parse_positive
    ),
}


def __getattr__(name: str) -> Any:
    variable = VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module 'quire.envs' has no attribute {name!r}")
    text = os.environ.get(name)
    if text is None:
        default = variable.default
        return default() if callable(default) else default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not valid; allowed: {error}", setting=name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *VARIABLES})


def foreign(name: str) -> str | None:
    """A variable that belongs to a standard and not to us (OpenTelemetry's); None where it is unset or empty."""
    return os.environ.get(name) or None


def is_set(name: str) -> bool:
    """Whether the user gave this variable a value."""
    return name in os.environ


def set_default(name: str, value: str) -> None:
    """Give this process and its children a value for a variable that the user has not set."""
    os.environ.setdefault(name, value)


def set_variable(name: str, value: str) -> None:
    """Give this process and its children a value that the user chose in another way."""
    os.environ[name] = value


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment for a child, with some variables changed; None takes one away."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def relevant_environment() -> dict[str, str]:
    """Variables that are set and that Quire, torch or the hub's client act on; for a bug report."""
    prefixes = ("QUIRE_", "CUDA_", "NCCL_", "OMP_", "MKL_", "TORCH", "PYTORCH_")
    names = ("HF_HUB_OFFLINE", "HF_HOME", "KMP_AFFINITY", "LD_PRELOAD")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes) or name in names}


def unknown_variables() -> list[tuple[str, str | None]]:
    """QUIRE_ names in the environment that Quire does not know, each with the known name that looks most like it."""
    unknown = sorted(name for name in os.environ if name.startswith("QUIRE_") and name not in VARIABLES)
    if not unknown:
        return []
    return [(name, nearest(name, VARIABLES)) for name in unknown]
