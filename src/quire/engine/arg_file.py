"""Flags from a YAML file (`--config FILE`): each key is a flag's name, and what the command line says wins.

Knows YAML and the parser's flags. What the values may be is checked like those of flags.
"""

import argparse
import difflib
from typing import Any

from quire.config import limits
from quire.errors import ConfigError
from quire.guards import is_dict, is_sequence

FLAG = "--config"


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE`."""
    parser.add_argument(
        FLAG, metavar="FILE", help="a YAML file of these options (`max-model-len: 4096`); the command line wins"
    )


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


def apply_file(parser: argparse.ArgumentParser, flags: dict[str, argparse.Action], path: str) -> None:
    """Make a file's values the parser's defaults.

    Raises:
        ConfigError: the file cannot be read, or has a key or value that no flag takes.
    """
    defaults: dict[str, Any] = {}
    for key, value in _read(path).items():
        action = flags.get(f"--{key.replace('_', '-')}")
        if action is None or action.dest in ("help", "config"):
            near = difflib.get_close_matches(f"--{key}", flags, n=1)
            hint = f"; did you mean {near[0].lstrip('-')!r}?" if near else ""
            raise ConfigError(f"{path}: {key!r} is not an option{hint}", setting=key)
        defaults[action.dest] = _converted(action, key, value, path)
    parser.set_defaults(**defaults)


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(limits.MAX_CONFIG_FILE_BYTES)
        content: object = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path!r} cannot be read: {error}", setting="config") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(
            f"config={path!r} is not valid YAML: {' '.join(str(error).split())}", setting="config"
        ) from error
    if content is None:
        return {}
    if not is_dict(content) or not all(type(key) is str for key in content):
        raise ConfigError(f"config={path!r} must hold a mapping from option names to values", setting="config")
    return content


def _converted(action: argparse.Action, key: str, value: Any, path: str) -> Any:
    if action.nargs in ("+", "*"):
        return list(value) if is_sequence(value) else [value]
    if isinstance(value, str) and action.type is not None and callable(action.type):
        try:
            return action.type(value)
        except (argparse.ArgumentTypeError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: {key}: {error}", setting=key) from error
    if isinstance(action, argparse.BooleanOptionalAction) and not isinstance(value, bool):
        raise ConfigError(f"{path}: {key}={value!r} must be true or false", setting=key)
    return value
