"""Flags from a YAML file (`--config FILE`): each key is a flag's name. The command line wins.

A file becomes words of a command line, which the parser reads before the real ones, so it checks both alike.
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any, cast

from quire.config.files import read_yaml
from quire.errors import ConfigError, did_you_mean
from quire.guards import is_dict, is_sequence

FLAG = "--config"


class _ConfigFlag(argparse.Action):
    """Leaves nothing in the namespace: the parser has read the file already."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        pass


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    text = "a YAML file of these options (`max-model-len: 4096`); the command line wins"
    parser.add_argument(FLAG, action=_ConfigFlag, default=argparse.SUPPRESS, metavar="FILE", help=text)


def named_file(args: list[str]) -> str | None:
    """The file that the arguments name, if any."""
    for index, arg in enumerate(args):
        if arg == "--":
            return None
        if arg == FLAG and index + 1 < len(args):
            return args[index + 1]
        if arg.startswith(FLAG + "="):
            return arg.partition("=")[2]
    return None


def words_of_file(path: str, flags: Mapping[str, argparse.Action]) -> list[str]:
    """A file's options as words of a command line.
    Raises ConfigError if the file cannot be read, or has an option that is not a flag or that cannot have such a value."""
    words: list[str] = []
    for key, value in _read(path).items():
        flag = f"--{key.replace('_', '-')}"
        action = flags.get(flag)
        if action is None or flag in ("--help", FLAG):
            hint = did_you_mean(key, [flag.lstrip("-") for flag in flags], "; {}")
            raise ConfigError(f"{path}: {key!r} is not an option{hint}", setting=key)
        if value is not None:  # `key:` alone says nothing
            words += _words_of_option(f"{path}: {key}", flag, action, value)
    return words


def _words_of_option(where: str, flag: str, action: argparse.Action, value: Any) -> list[str]:
    is_negatable = isinstance(action, argparse.BooleanOptionalAction)
    if is_negatable or action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}={value!r} must be true or false")
        no = [f"--no-{flag[2:]}"] if is_negatable else []
        return [flag] if value else no
    if value is True and action.nargs == "?":
        return [flag]
    if is_sequence(value) and (action.nargs in ("+", "*") or isinstance(action.default, list)):
        texts = list(map(_text, value))
        return [f"{flag}={text}" for text in texts] if action.nargs is None else [flag, *texts]
    if (is_dict(value) or is_sequence(value)) and action.type in (None, str, int, float) and action.nargs is None:
        raise ConfigError(f"{where}={value!r} must be one value")
    return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(path: str) -> dict[str, Any]:
    content = read_yaml(path, setting="config")
    if content is None:
        return {}
    if not is_dict(content) or not all(type(key) is str for key in content):
        raise ConfigError(f"config={path!r} must hold a mapping from option names to values", setting="config")
    nested: dict[str, Any] = {}
    for key, value in content.items():
        set_path(nested, key, value)
    return nested


def set_path(target: dict[str, Any], path: str, value: Any) -> None:
    """Set a nested key: `a.b.c`, or `a.b.c+`, which appends to a list. Raises ConfigError if a part of it has another kind."""
    *parents, last = path.split(".")
    for parent in parents:
        inner = target.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{path!r}: {parent!r} is given both as a value and as an object", setting=path)
        target = cast("dict[str, Any]", inner)
    if not last.endswith("+"):
        target[last] = value
        return
    last = last[:-1]
    items = target.setdefault(last, [])
    if not isinstance(items, list):
        raise ConfigError(f"{path!r}: {last!r} is given both as a value and as a list", setting=path)
    cast("list[Any]", items).extend(value if is_sequence(value) else [value])
