"""Every environment variable that Quire reads, declared once; `envs.QUIRE_X` reads it when it is accessed.

The only module (beside `env_override`) that looks at the environment.
"""

import contextlib
import datetime
import math
import os
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from quire.errors import ConfigError, nearest

NumberT = TypeVar("NumberT", int, float)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")
_lending = threading.Lock()


class Variable(NamedTuple):
    """One variable. `default` (or what it returns) is its value if it is not set. `parse` converts its text, and raises a
    ValueError that names the allowed values."""

    default: Any
    doc: str
    parse: Callable[[str], Any]


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("1, true, yes, on, 0, false, no or off")


def _text(text: str) -> str | None:
    return text or None


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(
    kind: Callable[[str], NumberT], is_allowed: Callable[[NumberT], bool], allowed: str
) -> Callable[[str], NumberT]:
    """Reads a number; `allowed` says which there may be."""

    def parse(text: str) -> NumberT:
        with contextlib.suppress(ValueError):
            if is_allowed(number := kind(text)):
                return number
        raise ValueError(allowed)

    return parse


def _layers(text: str) -> list[int]:
    count = _number(int, lambda number: number > 0, "numbers of layers above 0, with commas between them")
    return [count(part) for part in text.split(",")]


_positive = _number(int, lambda number: number > 0, "a whole number above 0")
_seconds = _number(float, lambda number: 0.0 < number < math.inf, "a number of seconds above 0")
_seconds_or_never = _number(float, lambda number: 0.0 <= number < math.inf, "a number of seconds, or 0 for never")


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("a date, for example 2026-12-31") from None


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip()
        for allowed in words:
            if word.lower() == allowed.lower():
                return allowed
        raise ValueError(", ".join(words))

    return parse


def _default_cache_root() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "quire")


# --- the variables ---

QUIRE_CONFIGURE_LOGGING: Annotated[bool, Variable(True, "0 leaves Python's logging alone.", _switch)]
QUIRE_LOGGING_LEVEL: Annotated[
    str, Variable("INFO", "Lowest level that is logged.", _one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
]
QUIRE_LOGGING_PREFIX: Annotated[str, Variable("", "Text before every log line.", str)]
QUIRE_LOGGING_STREAM: Annotated[str, Variable("stdout", "Where the log goes.", _one_of("stdout", "stderr"))]
QUIRE_LOGGING_FORMAT: Annotated[str, Variable("text", "`json` writes one JSON object a line.", _one_of("text", "json"))]
QUIRE_LOGGING_CONFIG_PATH: Annotated[
    str | None, Variable(None, "A JSON file for logging.config.dictConfig, in place of Quire's own set-up.", _text)
]
QUIRE_TRACE_FUNCTION: Annotated[
    bool, Variable(False, "1 writes every call and return inside the package to a file. Slow; for hangs.", _switch)
]
QUIRE_LOG_STATS_INTERVAL: Annotated[float, Variable(10.0, "Seconds between two log lines with statistics.", _seconds)]
QUIRE_API_KEY: Annotated[str | None, Variable(None, "The server's key, where --api-key is not given.", _text)]
QUIRE_SERVER_DEV_MODE: Annotated[
    bool, Variable(False, "1 opens /sleep, /wake_up, /is_sleeping, /server_info and /collective_rpc.", _switch)
]
QUIRE_ALLOW_RUNTIME_LORA_UPDATING: Annotated[
    bool, Variable(False, "1 opens /v1/load_lora_adapter and /v1/unload_lora_adapter.", _switch)
]
QUIRE_LORA_RESOLVER_CACHE_DIR: Annotated[
    str | None,
    Variable(None, "A folder with adapters in folders of their own, which clients may name as `model`.", _text),
]
QUIRE_LORA_RESOLVER_HF_REPO_LIST: Annotated[
    list[str] | None,
    Variable(None, "Comma-separated repositories of a hub with adapters, which clients may name as `model`.", _list),
]
QUIRE_KV_EVENTS_USE_INT_BLOCK_HASHES: Annotated[
    bool, Variable(True, "0 names pages in KV events by all bytes of their names, not by 64 bits as numbers.", _switch)
]
QUIRE_IMAGE_FETCH_TIMEOUT: Annotated[
    float, Variable(5.0, "Seconds for fetching an image that a request names by URL, redirects included.", _seconds)
]
QUIRE_VIDEO_FETCH_TIMEOUT: Annotated[
    float, Variable(30.0, "Seconds for fetching a video that a request names by URL, redirects included.", _seconds)
]
QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB: Annotated[
    int, Variable(25, "MiB that a sound file sent to /v1/audio/transcriptions may have.", _positive)
]
QUIRE_MEDIA_LOADING_THREAD_COUNT: Annotated[
    int, Variable(8, "Files that a frontend fetches at once, of those that requests name by URL.", _positive)
]
QUIRE_MEDIA_URL_ALLOW_REDIRECTS: Annotated[
    bool, Variable(True, "0 follows no redirects of URLs that requests name.", _switch)
]
QUIRE_PLUGINS: Annotated[
    list[str] | None, Variable(None, "Comma-separated names of the plugins that may load; unset means all.", _list)
]
QUIRE_VERSION: Annotated[
    str | None,
    Variable(None, "The version that patches are compared with, where the installed one says something else.", _text),
]
QUIRE_STRICT_PATCHES: Annotated[
    bool, Variable(False, "1 ends the start where something is wrong with a patch; for tests.", _switch)
]
QUIRE_PATCH_DATE: Annotated[
    datetime.date,
    Variable(
        datetime.date.today, "The day that patches' expiry is compared with; a process tells its children.", _date
    ),
]
QUIRE_AS_VLLM: Annotated[
    bool, Variable(False, "1 reads VLLM_X where QUIRE_X is not set; `quire as-vllm` sets it.", _switch)
]
QUIRE_PLATFORM: Annotated[
    str | None, Variable(None, "The platform to use: a built-in name, or that of a platform plugin.", _text)
]
QUIRE_PP_LAYER_PARTITION: Annotated[
    list[int],
    Variable([], "Layers of each stage of a pipeline, as in `10,12`; by default about as many each.", _layers),
]
QUIRE_CPU_THREADS: Annotated[
    int | None, Variable(None, "Compute threads on a CPU where `cpu_threads` is not given.", _positive)
]
QUIRE_CPU_ISA: Annotated[
    str | None,
    Variable(
        None,
        "Instruction set of the CPU kernels, instead of the best one: avx512_bf16, avx512, avx2, neon or generic.",
        _text,
    ),
]
QUIRE_USE_MODELSCOPE: Annotated[bool, Variable(False, "1 resolves hub ids at ModelScope.", _switch)]
QUIRE_CACHE_ROOT: Annotated[
    str, Variable(_default_cache_root, "Where Quire keeps files between runs.", os.path.expanduser)
]
QUIRE_KERNEL_CACHE: Annotated[
    str | None,
    Variable(None, "A folder of compiled GPU kernels (`quire compile-cache --output`) that is only read.", _text),
]
QUIRE_ALLOW_LONG_MAX_MODEL_LEN: Annotated[
    bool, Variable(False, "1 allows a max_model_len beyond what the checkpoint declares.", _switch)
]
QUIRE_ENABLE_MULTIPROCESSING: Annotated[
    bool | None,
    Variable(
        None,
        "1 runs the engine core in a process of its own, 0 in the process that asks for it; unset: a server's in its own, "
        "an offline engine's not.",
        _switch,
    ),
]
QUIRE_ENGINE_READY_TIMEOUT_S: Annotated[
    float, Variable(600.0, "How long an engine core may take to start, or to answer a call.", _seconds)
]
QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS: Annotated[
    float,
    Variable(
        60.0,
        "A step may take so long, and longer where more is predicted; after that the engine core hangs. The first steps may "
        "take ten times as long. 0 turns this off.",
        _seconds_or_never,
    ),
]
QUIRE_RPC_BASE_PATH: Annotated[
    str | None, Variable(None, "Folder of the internal Unix sockets; unset means a private temporary folder.", _text)
]
QUIRE_FAULTS: Annotated[
    str | None,
    Variable(None, "For tests: where the engine's processes kill or stop themselves (`quire/faults.py`).", _text),
]
QUIRE_KEEP_ALIVE_ON_ENGINE_DEATH: Annotated[
    bool, Variable(False, "1 keeps a server up whose engine has died; see the flag.", _switch)
]
QUIRE_HTTP_TIMEOUT_KEEP_ALIVE: Annotated[int, Variable(5, "Seconds that an idle connection is kept.", _positive)]
QUIRE_HTTP_MAX_REQUEST_BODY_SIZE: Annotated[int, Variable(32 << 20, "Bytes that a request's body may have.", _positive)]

VARIABLES: dict[str, Variable] = {
    name: hint.__metadata__[0] for name, hint in __annotations__.items() if name.startswith("QUIRE_")
}
"""The variables by name. A declaration above has no value, so each access goes through `__getattr__`."""


_RENAMED = {"QUIRE_ENABLE_MULTIPROCESSING": "VLLM_ENABLE_V1_MULTIPROCESSING"}
"""Variables that vLLM calls otherwise than by its prefix."""


def own_name(name: str) -> str:
    """The variable that a variable of vLLM's is here."""
    own = next((own for own, foreign in _RENAMED.items() if foreign == name), None)
    return own or name.replace("VLLM_", "QUIRE_", 1)


_added: list[Mapping[str, Variable]] = []


def know(variables: Mapping[str, Variable]) -> None:
    """Know the variables of a table, too: plugins declare theirs in one that grows."""
    _added.append(variables)


def _declared() -> dict[str, Variable]:
    return {**VARIABLES, **{name: each for table in _added for name, each in table.items()}}


def __getattr__(name: str) -> Any:
    variable = VARIABLES.get(name) or _declared().get(name)
    if variable is None:
        raise AttributeError(f"module 'quire.envs' has no attribute {name!r}")
    text = os.environ.get(name)
    if text is None and os.environ.get("QUIRE_AS_VLLM") and name.startswith("QUIRE_"):
        text = os.environ.get(_RENAMED.get(name) or name.replace("QUIRE_", "VLLM_", 1))
    if text is None:
        default = variable.default
        return default() if callable(default) else default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not valid; allowed: {error}", setting=name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_declared()})


def foreign(name: str) -> str | None:
    """A variable of a standard such as OpenTelemetry; None if it is unset or empty."""
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


@contextlib.contextmanager
def lent_variables(values: Mapping[str, str]) -> Generator[None]:
    """Give this process these variables for a while: for a library that reads them when it makes something."""
    with _lending:
        before = {name: os.environ[name] for name in values if name in os.environ}
        os.environ.update(values)
        try:
            yield
        finally:
            for name in values:
                del os.environ[name]
            os.environ.update(before)


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment for a child, with some variables changed; None takes one away."""
    return {name: value for name, value in {**os.environ, **changes}.items() if value is not None}


def with_defaults(values: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a child, and values for variables that the user has not set."""
    return {**values, **os.environ}


def relevant_environment() -> dict[str, str]:
    """The variables that are set and that Quire, plugins, torch or the hub's client read; for a bug report."""
    prefixes = ("QUIRE_", "CUDA_", "NCCL_", "OMP_", "MKL_", "TORCH", "PYTORCH_")
    names = ("HF_HUB_OFFLINE", "HF_HOME", "KMP_AFFINITY", "LD_PRELOAD", *_declared())
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes) or name in names}


def unknown_variables() -> list[tuple[str, str | None]]:
    """Names in the environment that Quire does not know, each with the nearest known name: all that begin with `QUIRE_`, and
    those that are nearly a plugin's."""
    known = _declared()
    prefixes = tuple({f"{name.partition('_')[0]}_" for name in known})
    unknown = sorted(name for name in os.environ if name.startswith(prefixes) and name not in known)
    pairs = [(name, nearest(name, known)) for name in unknown]
    return [(name, near) for name, near in pairs if near is not None or name.startswith("QUIRE_")]
