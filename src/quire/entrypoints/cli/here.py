"""Models that are on this machine: those of the hub's cache, by name. Knows the cache's folders, and deletes only there."""

import shutil
from pathlib import Path
from typing import NamedTuple

from quire.config.hub.find import fetch_weights, find_model
from quire.config.hub.listing import HubSettings
from quire.errors import ConfigError, did_you_mean

_PREFIX = "models--"
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")


class LocalModel(NamedTuple):
    """A model of the cache.

    Attributes:
        num_bytes: of its files, each counted once. changed: seconds of the epoch.
        has_weights: a file of weights is among them; otherwise only its settings were looked at.
    """

    name: str
    folder: Path
    num_bytes: int
    changed: float
    has_weights: bool


def local_models(cache: Path) -> list[LocalModel]:
    """What was downloaded, the latest first."""
    folders = [path for path in cache.glob(f"{_PREFIX}*") if any(path.glob("snapshots/*/config.json"))]
    found = [_describe(path) for path in folders]
    return sorted(found, key=lambda model: -model.changed)


def _describe(path: Path) -> LocalModel:
    files = list(filter(Path.is_file, path.rglob("*")))
    stats = {stat.st_ino: stat for stat in map(Path.stat, files)}.values()
    name = path.name.removeprefix(_PREFIX).replace("--", "/", 1)
    changed = max((stat.st_mtime for stat in stats), default=0.0)
    has_weights = any(file.suffix in _WEIGHTS for file in files)
    return LocalModel(name, path, sum(stat.st_size for stat in stats), changed, has_weights)


def fetch(name: str, settings: HubSettings) -> Path:
    """A model's folder with all of its files. Raises ConfigError: there is none, or not all can be fetched."""
    found = find_model(name, settings)
    if found.hub is not None:
        fetch_weights(found.hub, settings)
    return Path(found.path)


def remove(name: str, cache: Path) -> LocalModel:
    """Delete a model's files. Raises ConfigError: it is not there."""
    models = {model.name: model for model in local_models(cache)}
    if name not in models:
        there = f"there are {', '.join(models)}" if models else f"there are none in {cache}"
        raise ConfigError.of("model", f"{name!r} was not downloaded; {did_you_mean(name, models, '{}', there)}")
    shutil.rmtree(models[name].folder)
    return models[name]
