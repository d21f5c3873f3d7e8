"""Reads small files of settings (JSON, YAML), with errors that name the file and the setting.

Knows files and formats. Knows nothing of what they mean.
"""

import json
import os
from typing import Any, cast

from quire.config import limits
from quire.errors import ConfigError


def read_json(path: str, *, setting: str) -> object:
    """A file's JSON value. Raises ConfigError if it cannot be read, is too large, or is not JSON."""
    try:
        size = os.path.getsize(path)
        if size > limits.MAX_CONFIG_FILE_BYTES:
            message = f"{path!r} has {size} bytes; at most {limits.MAX_CONFIG_FILE_BYTES} are read"
            raise ConfigError(message, setting=setting)
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read: {error.strerror or error}", setting=setting) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path!r} is not valid JSON: {error}", setting=setting) from error


def read_json_object(path: str, *, setting: str) -> dict[str, Any]:
    """A file's JSON object. Raises ConfigError as `read_json` does, and if the value is not an object."""
    content = read_json(path, setting=setting)
    if not isinstance(content, dict):
        raise ConfigError(f"{path!r} must hold a JSON object, not {type(content).__name__}", setting=setting)
    return cast("dict[str, Any]", content)


def read_yaml(path: str, *, setting: str) -> object:
    """What is in a file. Raises ConfigError: it cannot be read, or is not YAML."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file.read(limits.MAX_CONFIG_FILE_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}={path!r} cannot be read: {error}", setting=setting) from error
    except (yaml.YAMLError, RecursionError) as error:
        message = f"{setting}={path!r} is not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError(message, setting=setting) from error


def tensors_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the header of a safetensors file says of each tensor; nothing of it is checked.
    Raises OSError, ValueError: it cannot be read, is too large, or is none."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > limits.MAX_CONFIG_FILE_BYTES:
            raise ValueError(f"its header has {size} bytes")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    entries = cast("dict[str, Any]", header)
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def read_json_object_if_there(path: str, *, setting: str) -> dict[str, Any]:
    """As `read_json_object`; an empty object if there is no such file."""
    return read_json_object(path, setting=setting) if os.path.isfile(path) else {}
