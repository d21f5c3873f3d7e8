"""Which architectures there are: a table from the names in config.json's `architectures` to functions that make specs.

Knows names and who registered them. Built-in families are imported on the first look-up, plugins register their own.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Sequence

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.spec import DecoderSpec

SpecFunction = Callable[[HFConfig], DecoderSpec]

BUILT_IN_FAMILIES = (
    "llama", "qwen", "mixtral", "gpt2", "gemma", "phi", "starcoder2", "opt", "granite", "cohere", "exaone4",
    "granite_moe", "gpt_oss", "glm_moe", "ernie_moe",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered architecture."""

    architecture: str
    make_spec: SpecFunction
    owner: str


_entries: dict[str, Entry] = {}


def register(*architectures: str, owner: str = "quire") -> Callable[[SpecFunction], SpecFunction]:
    """Decorator: this function makes the spec of these architectures."""

    def decorate(function: SpecFunction) -> SpecFunction:
        for architecture in architectures:
            ModelRegistry.register_model(architecture, function, owner=owner)
        return function

    return decorate


class ModelRegistry:
    """The public face of the table."""

    @staticmethod
    def register_model(
        architecture: str, make_spec: SpecFunction | str, *, override: bool = False, owner: str = "plugin"
    ) -> None:
        """Add an architecture.

        Args:
            make_spec: a function from the config to a `DecoderSpec`, or its path `module:attribute` (imported on first use).
            override: replace an existing entry; without it a second registration is an error.
            owner: who registers, for messages.

        Raises:
            ConfigError: the name is taken.
        """
        existing = _entries.get(architecture)
        if existing is not None and not override:
            raise ConfigError(
                f"architecture {architecture!r} is already registered by {existing.owner!r}; {owner!r} must pass "
                f"override=True to replace it"
            )
        function = _lazy(make_spec) if isinstance(make_spec, str) else make_spec
        _entries[architecture] = Entry(architecture, function, owner)

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Every registered name, sorted."""
        _load_built_in()
        return sorted(_entries)

    @staticmethod
    def resolve(architectures: str | Sequence[str]) -> Entry:
        """The first of these names that is registered.

        Raises:
            ConfigError: none is; names the nearest ones and all that exist.
        """
        _load_built_in()
        wanted = [architectures] if isinstance(architectures, str) else list(architectures)
        for architecture in wanted:
            if architecture in _entries:
                return _entries[architecture]
        known = sorted(_entries)
        nearest = [near for name in wanted for near in difflib.get_close_matches(name, known, n=3, cutoff=0.5)]
        hint = f"; nearest: {', '.join(dict.fromkeys(nearest))}" if nearest else ""
        raise ConfigError(
            f"model architecture {', '.join(map(repr, wanted)) or '(none in config.json)'} has no spec{hint}. "
            f"Supported: {', '.join(known)}",
            setting="model",
        )


def _load_built_in() -> None:
    for family in BUILT_IN_FAMILIES:
        importlib.import_module(f"quire.models.{family}")


def _lazy(path: str) -> SpecFunction:
    def make_spec(hf: HFConfig) -> DecoderSpec:
        module, _, attribute = path.partition(":")
        return getattr(importlib.import_module(module), attribute)(hf)

    return make_spec
