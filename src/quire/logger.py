"""Logging: one stream handler for the package, settings from the environment, and a function tracer for hangs.

Knows the `QUIRE_LOGGING_*` variables. Does not touch the root logger.
"""

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, cast

from quire import envs
from quire.envs import set_variable
from quire.errors import ConfigError, refusing

ROOT_LOGGER = "quire"
MESSAGE_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"
_CONFIG_PATH = "QUIRE_LOGGING_CONFIG_PATH"
_REMEMBERED_MESSAGES = 4096
"""Different messages that a logger's `*_once` methods keep in mind; after that all are forgotten, so memory is bounded."""


if TYPE_CHECKING:

    class QuireLogger(logging.Logger):
        """What `init_logger` returns: a standard logger with three more methods."""

        def debug_once(self, message: str, *args: object) -> None: ...
        def info_once(self, message: str, *args: object) -> None: ...
        def warning_once(self, message: str, *args: object) -> None: ...


class _Formatter(logging.Formatter):
    """Text lines; what stands before the message is repeated on each line of a message that has several."""

    def __init__(self, prefix: str) -> None:
        super().__init__(MESSAGE_FORMAT, DATE_FORMAT)
        self.prefix = prefix
        self.process_label = ""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        text += "".join(f" {name}={value}" for name, value in _current_fields().items())
        label = f"({self.process_label}) " if self.process_label else ""
        lead = f"{self.prefix}{label}"
        if "\n" in text:
            header = self.formatMessage(record)[: -len(record.message) or None]
            text = text.replace("\n", f"\n{lead}{header}")
        return lead + text


class _JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        import json
        from datetime import UTC, datetime

        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "file": record.filename,
            "line": record.lineno,
            "process": self.process_label or record.processName,
            "pid": record.process,
            "message": record.getMessage(),
        }
        entry |= _current_fields()
        entry |= getattr(record, "fields", {})  # figures that the message tells in words
        if self.prefix:
            entry["prefix"] = self.prefix
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


_tables: list[Mapping[str, Callable[[], object]]] = []


def show_fields(fields: Mapping[str, Callable[[], object]]) -> None:
    """Add to each line what the functions of a table give: plugins put theirs in one that grows."""
    _tables.append(fields)


def _current_fields() -> dict[str, object]:
    """The added fields' values now; a function that fails gives the name of its error, so that nothing is lost but the value."""
    values: dict[str, object] = {}
    for name, function in [item for table in _tables for item in table.items()]:
        try:
            values[name] = function()
        except Exception as error:
            values[name] = type(error).__name__
    return values


class _StreamHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stdout` or `sys.stderr` is at the moment, so that redirection works at any time."""

    def __init__(self, stream_name: str) -> None:
        logging.Handler.__init__(self)
        self._stream_name = stream_name

    @property
    def stream(self) -> TextIO:
        return getattr(sys, self._stream_name)

    @stream.setter
    def stream(self, value: TextIO) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Nothing: the base class may assign, but the name decides."""


@functools.cache
def _configure() -> None:
    """Set up the package's logger, once a process."""
    config_path = envs.QUIRE_LOGGING_CONFIG_PATH
    if not envs.QUIRE_CONFIGURE_LOGGING:
        if config_path:
            raise ConfigError(
                f"{_CONFIG_PATH}={config_path!r} is given, but QUIRE_CONFIGURE_LOGGING is off: turn it on, or unset "
                f"{_CONFIG_PATH}",
                setting=_CONFIG_PATH,
            )
        return
    if config_path:
        from logging.config import dictConfig

        content, what = (
            _read_logging_config(config_path),
            f"{_CONFIG_PATH}={config_path!r} is not a logging configuration",
        )
        with refusing(ValueError, TypeError, AttributeError, ImportError, setting=_CONFIG_PATH, what=what):
            dictConfig(content)
        return
    root = logging.getLogger(ROOT_LOGGER)
    handler = _StreamHandler(envs.QUIRE_LOGGING_STREAM)
    make = _JsonFormatter if envs.QUIRE_LOGGING_FORMAT == "json" else _Formatter
    handler.setFormatter(make(envs.QUIRE_LOGGING_PREFIX))
    root.setLevel(envs.QUIRE_LOGGING_LEVEL)
    root.addHandler(handler)
    root.propagate = False


def _read_logging_config(path: str) -> dict[str, Any]:
    import json

    given = f"{_CONFIG_PATH}={path!r}"
    if not os.path.isfile(path):
        why = "does not exist: give a JSON file for logging.config.dictConfig, or unset it"
        raise ConfigError(f"{given} {why}", setting=_CONFIG_PATH)
    what = f"{given} cannot be read as JSON"
    with refusing(OSError, ValueError, setting=_CONFIG_PATH, what=what), open(path, encoding="utf-8") as file:
        content: object = json.load(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{given} must hold a JSON object (dict), not {type(content).__name__}", setting=_CONFIG_PATH)
    return cast("dict[str, Any]", content)


def init_logger(name: str) -> "QuireLogger":
    """A standard logger with `debug_once`, `info_once` and `warning_once`.

    Raises:
        ConfigError: a logging variable has no usable value.
    """
    _configure()
    logger = cast("QuireLogger", logging.getLogger(name))
    if not hasattr(logger, "warning_once"):
        seen: set[tuple[int, str, str]] = set()
        for method, level in (
            ("debug_once", logging.DEBUG),
            ("info_once", logging.INFO),
            ("warning_once", logging.WARNING),
        ):
            setattr(logger, method, functools.partial(_log_once, logger, seen, level))
    return logger


def _log_once(logger: logging.Logger, seen: set[tuple[int, str, str]], level: int, message: str, *args: object) -> None:
    key = (level, message, repr(args))
    if key in seen:
        return
    if len(seen) >= _REMEMBERED_MESSAGES:
        seen.clear()
    seen.add(key)
    logger.log(level, message, *args, stacklevel=2)


def use_log_format(name: str) -> None:
    """Write lines as `text` or `json` from now on, in this process and in the children that it will start."""
    set_variable("QUIRE_LOGGING_FORMAT", name)
    _configure()
    for handler in logging.getLogger(ROOT_LOGGER).handlers:
        old = handler.formatter
        if isinstance(old, _Formatter):
            formatter = (_JsonFormatter if name == "json" else _Formatter)(old.prefix)
            formatter.process_label = old.process_label
            handler.setFormatter(formatter)


def use_log_level(name: str) -> None:
    """Write lines of this level and above from now on, in this process and in the children that it will start."""
    set_variable("QUIRE_LOGGING_LEVEL", name)
    _configure()
    logging.getLogger(ROOT_LOGGER).setLevel(name)


def leave_logging_alone() -> None:
    """Set up no handler and no level, here and in the children: Python's own logging decides."""
    set_variable("QUIRE_CONFIGURE_LOGGING", "0")
    root = logging.getLogger(ROOT_LOGGER)
    root.handlers.clear()
    root.setLevel(logging.NOTSET)
    root.propagate = True


def use_log_config(path: str) -> None:
    """Follow a JSON file for `logging.config.dictConfig`, here and in the children.

    Raises:
        ConfigError: it is none.
    """
    _read_logging_config(path)  # refused before anything has changed
    set_variable("QUIRE_LOGGING_CONFIG_PATH", path)
    logging.getLogger(ROOT_LOGGER).handlers.clear()
    _configure.cache_clear()
    _configure()


def set_process_label(kind: str, rank: int | None = None) -> None:
    """Name this process in the prefix of its log lines, for example `EngineCore` or `Worker rank=3`; children call it first."""
    _configure()
    label = kind if rank is None else f"{kind} rank={rank}"
    for handler in logging.getLogger(ROOT_LOGGER).handlers:
        if isinstance(handler.formatter, _Formatter):
            handler.formatter.process_label = f"{label} pid={os.getpid()}"


class _Tracer:
    """Appends a line to a file for each call and return below a folder."""

    def __init__(self, path: str, root_dir: str) -> None:
        self._path = path
        self._root_dir = root_dir

    def __call__(self, frame: FrameType, event: str, arg: object) -> "_Tracer | None":
        try:
            if event in ("call", "return") and frame.f_code.co_filename.startswith(self._root_dir):
                self._write(frame, event)
        except Exception:
            # While the interpreter shuts down, modules may be gone already; tracing must not break what it watches.
            return None
        return self

    def _write(self, frame: FrameType, event: str) -> None:
        from datetime import datetime

        code = frame.f_code
        verb = "Call to" if event == "call" else "Return from"
        line = f"{datetime.now()} {verb} {code.co_qualname} in {code.co_filename}:{frame.f_lineno}"
        caller = frame.f_back
        if caller is not None:
            where = f"{caller.f_code.co_qualname} in {caller.f_code.co_filename}:{caller.f_lineno}"
            line += f" {'from' if event == 'call' else 'to'} {where}"
        # Opened for each line, so that the last line before a crash is on disk.
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def enable_trace_function_call(path: str, root_dir: str | None = None) -> None:
    """Write every call and return in the package (or below `root_dir`) to a file, for the calling thread.

    Very slow; meant for finding where a process hangs or crashes. Each thread that is to be traced calls it.
    """
    init_logger(__name__).warning(
        "QUIRE_TRACE_FUNCTION is on: every function call in this thread is written to %s. It slows everything down and is "
        "meant for finding hangs and crashes only.",
        path,
    )
    folder = root_dir if root_dir is not None else os.path.dirname(os.path.abspath(__file__))
    sys.settrace(_Tracer(path, folder))


def trace_this_thread_if_asked(instance_id: str = "") -> str | None:
    """Where `QUIRE_TRACE_FUNCTION` is on, trace the calling thread into a file of its own; returns the file's path."""
    if not envs.QUIRE_TRACE_FUNCTION:
        return None
    import tempfile

    folder = os.path.join(tempfile.gettempdir(), f"quire-trace-{instance_id or os.getpid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, f"process-{os.getpid()}-thread-{threading.get_ident()}.log")
    enable_trace_function_call(path)
    return path
