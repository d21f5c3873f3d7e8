"""Which architectures there are: a table from the names in config.json's `architectures` to functions that make specs, or to
classes that are models by themselves.

Knows names and who registered them. Built-in families are imported on the first look-up, plugins register their own.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Sequence
from typing import cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.layers.interface import CausalLM
from quire.models.defaults import completed
from quire.models.nested_text import beside_other_parts, nested_text
from quire.models.spec import DecoderSpec

SpecFunction = Callable[[HFConfig], DecoderSpec]
ModelSource = SpecFunction | type[CausalLM]

BUILT_IN_FAMILIES = (
    "llama",
    "qwen",
    "llama_moe",
    "gpt",
    "gemma",
    "layer_norm",
    "granite",
    "olmo",
    "glm",
    "renamed_llama",
    "text_part",
    "deepseek",
    "deepseek_v4",
    "window_moe",
    "llama_variants",
    "mamba",
    "lfm2",
    "linear_attention",
    "pooling.bert",
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered architecture.

    Attributes:
        source: makes its spec, is its class, or is the path `module:attribute` of either (imported on first use).
    """

    architecture: str
    source: ModelSource | str
    owner: str

    def load(self) -> ModelSource:
        """The function or class.

        Raises:
            ConfigError: the path does not lead to one.
        """
        if not isinstance(self.source, str):
            return self.source
        module, _, attribute = self.source.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"architecture {self.architecture!r} was registered by {self.owner!r} as {self.source!r}, which cannot be "
                f"imported: {error}. The form is 'module:attribute'",
                setting="model",
            ) from error

    def make_spec(self, hf: HFConfig) -> DecoderSpec:
        """The spec of a checkpoint with this config.json.

        Raises:
            ConfigError: no layer looks at other tokens.
        """
        function, text = cast(SpecFunction, self.load()), nested_text(hf)
        is_nested = text is not None and not function.__module__.endswith("text_part")  # which reads it by itself
        spec = function(completed(self.architecture, text if text is not None and is_nested else hf))
        spec = beside_other_parts(spec) if is_nested else spec
        if not any(spec.mixers_of(layer) for layer in range(spec.layers)):
            raise ConfigError(
                f"config.json of {self.architecture} has {spec.layers} layers, none of which is attention or a recurrent one: "
                "its num_hidden_layers, layer_types, layers_block_type, hybrid_override_pattern or block_configs must name one",
                setting="model",
            )
        return spec


_entries: dict[str, Entry] = {}


def register(*architectures: str, owner: str = "quire") -> Callable[[SpecFunction], SpecFunction]:
    """Decorator: this function makes the spec of these architectures."""

    def decorate(function: SpecFunction) -> SpecFunction:
        for architecture in architectures:
            ModelRegistry.register_model(architecture, function, owner=owner)
        return function

    return decorate


TRANSFORMERS = "quire.layers.transformers_backend:TransformersModel"
"""Runs what has no spec."""


class ModelRegistry:
    """The public face of the table."""

    @staticmethod
    def register_model(
        architecture: str, model: ModelSource | str, *, override: bool = False, owner: str = "plugin"
    ) -> None:
        """Add an architecture.

        Args:
            model: a function from the config to a `DecoderSpec`, a `CausalLM` class, or the path `module:attribute` of either
                (imported on first use).
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
        _entries[architecture] = Entry(architecture, model, owner)

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
            f"model_impl='transformers' runs what Transformers knows. Supported: {', '.join(known)}",
            setting="model",
        )


def _load_built_in() -> None:
    for family in BUILT_IN_FAMILIES:
        importlib.import_module(f"quire.models.{family}")
