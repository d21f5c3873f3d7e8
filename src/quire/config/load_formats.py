"""The load formats by name: who reads the files of a checkpoint. Plugins register further ones. Imports no torch.

GGUF and Mistral's own layout are known by the model, not by the setting.
"""

from collections.abc import Callable
from typing import Any

from quire.plugins.registry import Registry

MakeReader = Callable[..., Any]
"""Makes a `model_loader.checkpoint.WeightReader` from a folder, the file names to ignore, and (a plugin's) the keys of
`model_loader_extra_config` as keywords."""

_SAFETENSORS = "quire.model_loader.safetensors_reader:SafetensorsReader"

LOAD_FORMATS: Registry[MakeReader] = Registry(
    "load format",
    "load_format",
    {
        **dict.fromkeys(("auto", "hf", "safetensors", "bitsandbytes", "mistral"), _SAFETENSORS),
        "pt": "quire.model_loader.torch_bin_reader:TorchBinReader",
    },
)
SPECIAL_FORMATS = ("gguf", "sharded_state", "dummy")
"""Formats that are not read file by file, or not at all."""


def register_load_format(name: str, reader: Any, *, override: bool = False, owner: str | None = None) -> None:
    """Make a reader known as `--load-format NAME`: a subclass of `WeightReader`, a function that makes one, or the path of one.
    `override`, `owner`: see `Registry.register`.

    Raises:
        ConfigError: the name is taken.
    """
    LOAD_FORMATS.register(name, reader, override=override, owner=owner)
