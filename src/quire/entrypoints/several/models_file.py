"""The file of `quire serve --models FILE`: which models there are, under which names, with which flags and how much memory.

Knows YAML. Knows nothing of processes.
"""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quire.config.files import read_yaml
from quire.config.hub.download import amount
from quire.engine.arg_parser import human_int
from quire.errors import ConfigError, refusing

_UNITS = {"KB": "k", "MB": "M", "GB": "G", "TB": "T"}


class ModelEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A model.

    Attributes:
        name: one or several; the first is shown. Left out, it is the model's own.
        flags: of `quire serve`, as a mapping without dashes or as words.
        memory: what it takes while it is awake; left out, what `quire explain` says.
        load: `start`: it is awake once the server has started; `demand`: with its first request.
    """

    model: str
    name: str | list[str] | None = None
    flags: dict[str, Any] | list[str] | str = []
    memory: str | int | None = None
    load: Literal["start", "demand"] = "demand"

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if isinstance(self.name, str) else tuple(self.name or (self.model,))


class ModelsFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All models, and what those that are awake may take together."""

    models: list[ModelEntry]
    memory: str | int | None = None


def read_models_file(path: str) -> ModelsFile:
    """Raises ConfigError: it cannot be read, or something in it is wrong; the message says where."""
    known = ", ".join(ModelEntry.__struct_fields__)
    with refusing(msgspec.ValidationError, setting="models", what=f"models={path!r} (a model may have {known})"):
        models = msgspec.convert(read_yaml(path, setting="models"), ModelsFile)
    _check(models, path)
    return models


def _check(models: ModelsFile, path: str) -> None:
    if not models.models:
        raise ConfigError.of("models", f"{path!r} names no model.")
    seen: set[str] = set()
    for entry in models.models:
        for name in entry.names:
            if not name or name in seen:
                raise ConfigError.of("models", f"{path!r}: the name {name!r} is empty or there twice.")
            seen.add(name)
    budget = read_bytes(models.memory, "memory")
    for entry in models.models:
        size = read_bytes(entry.memory, f"memory of {entry.names[0]!r}")
        if budget is not None and size is not None and size > budget:
            message = (
                f"{path!r}: {entry.names[0]!r} takes {amount(size)}; all that are awake may take {amount(budget)}."
            )
            raise ConfigError.of("models", message)


def read_bytes(value: str | int | None, what: str) -> int | None:
    """A size as people write it: 6G, 6GB, 6 GB, 6000000000. Raises ConfigError: it is none."""
    if value is None:
        return None
    text = str(value).replace(" ", "")
    for ending, unit in _UNITS.items():
        if text.upper().endswith(ending):
            text = text[:-2] + unit
    try:
        size = human_int(text)
    except argparse.ArgumentTypeError:
        size = 0
    if size <= 0:
        raise ConfigError.of("models", f"{what}: {value!r} is not a size, such as 6G.")
    return size


def flag_words(flags: Mapping[str, Any] | list[str] | str) -> list[str]:
    """Flags as words of a command line."""
    if isinstance(flags, str):
        return shlex.split(flags)
    if isinstance(flags, list):
        return [word for text in flags for word in shlex.split(text)]
    words: list[str] = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is False:
            words.append(f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words += [flag, *map(_as_text, value)]
        else:
            words += [flag, _as_text(value)]
    return words


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
