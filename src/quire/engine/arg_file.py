"""Flags from a YAML file (`--config FILE`): each key is a flag's name, and what the command line says wins.

Knows YAML and the parser's flags. What the values may be is checked like those of flags.
"""

import argparse
import json
import typing
from typing import Any

from quire.config import limits
from quire.errors import ConfigError, did_you_mean
from quire.guards import is_dict, is_sequence

FLAG = "--config"


class _ConfigFlag(argparse.Action):
    """Leaves nothing in the namespace: the parser reads the file before it parses."""

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


def apply_file(parser: argparse.ArgumentParser, flags: dict[str, argparse.Action], path: str) -> dict[str, Any]:
    """Make a file's values the parser's defaults; gives them by destination.
    Raises ConfigError: the file cannot be read, or has a key or value that no flag takes."""
    defaults: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = f"--{key.replace('_', '-')}"
        action = flags.get(name)
        if action is None or name in ("--help", FLAG):
            hint = did_you_mean(key, [flag.lstrip("-") for flag in flags], "; {}")
            raise ConfigError(f"{path}: {key!r} is not an option{hint}", setting=key)
        if value is None:
            continue  # `key:` alone says nothing
        if action.dest == argparse.SUPPRESS:
            asked = argparse.Namespace()  # what the flag itself would set
            text = value if isinstance(value, str) else json.dumps(value)
            action(parser, asked, _one(action, key, text, path), name)
            defaults |= vars(asked)
            continue
        defaults[action.dest] = _converted(action, key, value, path)
        action.required = False
    parser.set_defaults(**defaults)
    return defaults


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(limits.MAX_CONFIG_FILE_BYTES)
        content: object = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path!r} cannot be read: {error}", setting="config") from error
    except (yaml.YAMLError, RecursionError) as error:
        message = f"config={path!r} is not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError(message, setting="config") from error
    if content is None:
        return {}
    if not is_dict(content) or not all(type(key) is str for key in content):
        raise ConfigError(f"config={path!r} must hold a mapping from option names to values", setting="config")
    return _folded(content)


def _folded(content: dict[str, Any]) -> dict[str, Any]:
    """`hf-overrides.rope.factor: 2` as the nested mapping that it stands for."""
    folded: dict[str, Any] = {}
    for key, value in content.items():
        *parents, last = key.split(".")
        target = folded
        for parent in parents:
            inner: Any = target.setdefault(parent, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key!r}: {parent!r} is given both as a value and as an object", setting=key)
            target = typing.cast("dict[str, Any]", inner)
        target[last] = value
    return folded


def _converted(action: argparse.Action, key: str, value: Any, path: str) -> Any:
    if action.nargs in ("+", "*") or isinstance(action.default, list):
        return [_one(action, key, item, path) for item in (value if is_sequence(value) else [value])]
    return _one(action, key, value, path)


def _one(action: argparse.Action, key: str, value: Any, path: str) -> Any:
    """One value, checked as on the command line."""
    is_switch = action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction)
    if is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {key}={value!r} must be true or false", setting=key)
        return value
    if is_dict(value) or is_sequence(value):
        if action.type in (None, str, int, float):
            raise ConfigError(f"{path}: {key}={value!r} must be one value", setting=key)
        value = json.dumps(value)
    try:
        converted: Any = action.type(str(value)) if callable(action.type) else str(value)
    except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {key}: {error}", setting=key) from error
    if action.choices is not None and converted not in action.choices:
        allowed = list(map(str, action.choices))
        told = ", ".join(allowed) + did_you_mean(str(value), allowed, "; {}")
        raise ConfigError(f"{path}: {key}={value!r} is not one of {told}", setting=key)
    return converted
