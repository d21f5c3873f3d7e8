"""Converts an `EngineConfig` to plain data and back, to send it to another process. Classes are sent as paths, never as code."""

import dataclasses
import inspect
import types
import typing
from typing import Any, cast

from quire.config.engine import EngineConfig
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError


def config_to_plain(config: EngineConfig) -> dict[str, Any]:
    """The configuration as nested dicts of plain values.
    Raises ConfigError if a value cannot leave this process (a function, a class of the main script)."""
    return _record_to_plain(config, "")


def _record_to_plain(record: Any, where: str) -> dict[str, Any]:
    return {
        field.name: _to_plain(getattr(record, field.name), f"{where}{field.name}")
        for field in dataclasses.fields(record)
    }


def _to_plain(value: Any, where: str) -> Any:
    if isinstance(value, HFConfig):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _record_to_plain(value, f"{where}.")
    if isinstance(value, dict):
        return {key: _to_plain(entry, where) for key, entry in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_to_plain(entry, where) for entry in cast("list[Any]", value)]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if inspect.isclass(value) and value.__module__ != "__main__" and "<" not in value.__qualname__:
        return f"{value.__module__}:{value.__qualname__}"
    raise ConfigError(
        f"{where} is {value!r}, which cannot be sent to another process; give a class by its path (`module:Class`), or "
        "run core and worker in this process",
        setting=where.rpartition(".")[2],
    )


def config_from_plain(values: dict[str, Any]) -> EngineConfig:
    return _record_from_plain(EngineConfig, values)


def _record_from_plain(record_type: type[Any], values: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(record_type)
    return record_type(**{name: _from_plain(hints[name], value) for name, value in values.items()})


def _from_plain(hint: Any, value: Any) -> Any:
    if isinstance(hint, types.UnionType):  # a record that may be missing
        records = [part for part in typing.get_args(hint) if dataclasses.is_dataclass(part)]
        return _from_plain(records[0], value) if records and value is not None else value
    if hint is HFConfig:
        return HFConfig(value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record_from_plain(hint, value)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        entry, *_ = typing.get_args(hint)
        return tuple(_from_plain(entry, item) for item in cast("list[Any]", value))
    return value
