"""Which architectures there are: a table from the names in config.json's `architectures` to functions that make specs, or to
classes that are models by themselves.

Knows names and who registered them. Built-in families are imported on the first look-up, plugins register their own.
"""

import dataclasses
import difflib
import importlib
import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Union, cast

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.plugins import registry

if TYPE_CHECKING:  # which import torch: a plugin that names a model by its path does without
    from quire.layers.interface import CausalLM
    from quire.models.spec import DecoderSpec

SpecFunction = Callable[[HFConfig], "DecoderSpec"]
ModelSource = Union[SpecFunction, type["CausalLM"]]  # noqa: UP007 (a name within quotes)

BUILT_IN_FAMILIES = (
    "llama",
    "qwen",
    "llama_moe",
    "gpt",
    "gemma",
    "layer_norm",
    "phi4_multimodal",
    "granite",
    "olmo",
    "glm",
    "llama_variants",
    "text_part",
    "molmo",
    "deepseek",
    "inkling",
    "window_moe",
    "mamba",
    "lfm2",
    "linear_attention",
    "pooling.bert",
    "pooling.paired",
    "encoder_decoder.whisper",
    "encoder_decoder.bart",
    "encoder_decoder.t5",
)


CLASSES_OF_OTHERS = {"exaone": "ExaoneForCausalLM", "sarvam_moe": "SarvamMoEForCausalLM"}
"""Model types that Transformers runs with another family's class, while their weights have names of their own."""


def packaged_features() -> dict[str, dict[str, Any]]:
    """What every architecture of Quire's own can do; `tools/model_table.py` writes the file."""
    return json.loads((files("quire") / "assets" / "architectures.json").read_bytes())


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
        return registry.Entry(self.architecture, self.source, self.owner).load(MODELS.kind, MODELS.setting)

    def make_spec(self, hf: HFConfig) -> "DecoderSpec":
        """The spec of a checkpoint with this config.json.

        Raises:
            ConfigError: no layer looks at other tokens.
        """
        from quire.models.defaults import completed
        from quire.models.patterns import beside_other_parts, nested_text

        own = CLASSES_OF_OTHERS.get(hf.get("model_type", ""), self.architecture)
        if own != self.architecture:
            return ModelRegistry.resolve(own).make_spec(hf)
        function, text = cast(SpecFunction, self.load()), nested_text(hf)
        is_nested = text is not None and not function.__module__.endswith(
            ("text_part", "paired", "molmo")
        )  # these read it themselves
        spec = function(completed(self.architecture, text if text is not None and is_nested else hf))
        spec = beside_other_parts(spec) if is_nested else spec
        if not any(spec.mixers_of(layer) for layer in range(spec.layers)):
            raise ConfigError(
                f"config.json of {self.architecture} has {spec.layers} layers, none of which is attention or a recurrent one: "
                "its num_hidden_layers, layer_types, layers_block_type, hybrid_override_pattern or block_configs must name one",
                setting="model",
            )
        return spec


_UNLOADED = ""

MODELS: registry.Registry[ModelSource] = registry.Registry(
    "architecture", "model", dict.fromkeys(packaged_features(), _UNLOADED)
)
"""The table. Names of Quire's own are there before their families are imported, so that nobody takes one by accident."""


def register(*architectures: str) -> Callable[[SpecFunction], SpecFunction]:
    """Decorator of Quire's own families: this function makes the spec of these architectures, unless a plugin replaces it."""

    def decorate(function: SpecFunction) -> SpecFunction:
        for architecture in architectures:
            register_built_in(architecture, function)
        return function

    return decorate


def register_built_in(architecture: str, source: ModelSource | str) -> None:
    """Add an architecture of Quire's own; a plugin's that overrides it stays."""
    entry = MODELS.entry(architecture) if architecture in MODELS else None
    if entry is None or entry.owner == registry.BUILT_IN_OWNER:
        is_named = entry is not None and entry.target == _UNLOADED
        MODELS.register(architecture, source, override=is_named, owner=registry.BUILT_IN_OWNER)


TRANSFORMERS = "quire.layers.transformers_backend:TransformersModel"
"""Runs what has no spec."""
BESIDE_TRANSFORMERS = "quire.models.text_part:text_beside_transformers"
"""The language half of a model that sees through Transformers' modules."""


class ModelRegistry:
    """The public face of the table."""

    @staticmethod
    def register_model(
        architecture: str, model: ModelSource | str, *, override: bool = False, owner: str | None = None
    ) -> None:
        """Add an architecture.

        Args:
            model: a function from the config to a `DecoderSpec`, a `CausalLM` class, or the path `module:attribute` of either
                (imported on first use).
            override: replace an existing entry; without it a second registration is an error.
            owner: who registers, for messages; None: the plugin that is being loaded, else the program.

        Raises:
            ConfigError: the name is taken.
        """
        MODELS.register(architecture, model, override=override, owner=owner)

    @staticmethod
    def get_supported_archs() -> list[str]:
        """Every registered name, sorted."""
        _load_built_in()
        return sorted(MODELS)

    @staticmethod
    def resolve(architectures: str | Sequence[str]) -> Entry:
        """The first of these names that is registered.

        Raises:
            ConfigError: none is; names the nearest ones, and where all are listed.
        """
        _load_built_in()
        wanted = [architectures] if isinstance(architectures, str) else list(architectures)
        for architecture in wanted:
            if architecture in MODELS:
                found = MODELS.entry(architecture)
                return Entry(architecture, found.target, found.owner)
        known = sorted(MODELS)
        nearest = [near for name in wanted for near in difflib.get_close_matches(name, known, n=3, cutoff=0.5)]
        hint = f"; nearest: {', '.join(dict.fromkeys(nearest))}" if nearest else ""
        raise ConfigError(
            f"model architecture {', '.join(map(repr, wanted)) or '(none in config.json)'} has no spec{hint}. "
            f"model_impl='transformers' runs what Transformers knows. `quire models` lists the {len(known)} that have one",
            setting="model",
        )


def _load_built_in() -> None:
    for family in BUILT_IN_FAMILIES:
        importlib.import_module(f"quire.models.{family}")
