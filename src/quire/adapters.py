"""Which adapter a request asks for. Plain data: what an adapter is, and where it lies, is known by the workers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import ConfigError, RequestError
from quire.guards import is_dict
from quire.media import MediaItem

CONFIG = "adapter_config.json"
"""The file that describes an adapter in its folder."""


class LoRARequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An adapter, by its name and its folder.

    Two of them are the same adapter if name, number and folder are equal. Whoever changes the files of an adapter gives it
    another `lora_int_id`, or sets `load_inplace` once.

    Attributes:
        lora_name: what people call it.
        lora_int_id: tells versions of it apart; at least 1.
        lora_path: a local folder.
        base_model_name: the model that it was made for, as `/v1/models` lists it.
        load_inplace: its files have changed: they are read again, for this request and those that come later.
        is_3d_lora_weight: accepted for compatibility: how experts' weights are stored is seen in the files.
        version: how often its files were read again; the engine counts it.
        num_virtual_tokens: that it puts before each prompt; the engine reads that in its folder.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    version: int = 0
    num_virtual_tokens: int = 0

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def key(self) -> str:
        """Text that no other adapter has."""
        return f"{self.lora_int_id}:{self.version}:{self.lora_name}:{self.lora_path}"

    @property
    def as_loaded(self) -> "LoRARequest":
        """The same for the rest of those who share a request that has its files read again: they are read once."""
        return msgspec.structs.replace(self, load_inplace=False) if self.load_inplace else self


def id_of(key: str) -> int:
    """The `lora_int_id` of the adapter with this key."""
    return int(key.partition(":")[0])


def check_adapter(request: object) -> LoRARequest:
    """An adapter that a user gave. Raises RequestError: it is none, or one of its fields is not valid."""
    if not isinstance(request, LoRARequest):
        raise RequestError(f"lora_request must be a LoRARequest, not {type(request).__name__}", param="lora_request")
    if not request.lora_name or not request.lora_path:
        raise RequestError("lora_request needs a lora_name and a lora_path", param="lora_request")
    if request.lora_int_id < 1:
        raise RequestError(f"lora_int_id is {request.lora_int_id}; it must be at least 1", param="lora_request")
    return request


def adapter_of_media(by_modality: Mapping[str, str], media: Iterable[MediaItem]) -> LoRARequest | None:
    """The first of these adapters of whose modality there is an item."""
    kinds = {item.modality.removesuffix("_embeds") for item in media}
    found = ((kind, number) for number, kind in enumerate(by_modality, 1) if kind in kinds)
    return next((LoRARequest(kind, number, by_modality[kind]) for kind, number in found), None)


def check_path(path: str) -> None:
    """Raises ConfigError: there is no adapter, as far as a look at its configuration tells. One in a single file has none."""
    if not Path(path).is_file():
        read_config(path)


VIRTUAL = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")
"""PEFT's kinds of adapters that put virtual tokens before a prompt."""
MAX_VIRTUAL_TOKENS = 512


def virtual_tokens_of(config: Mapping[str, Any]) -> int:
    """How many virtual tokens an adapter with this configuration puts before a prompt. Raises ConfigError: impossibly many."""
    if config["peft_type"] not in VIRTUAL:
        return 0
    count = config.get("num_virtual_tokens")
    if not isinstance(count, int) or not 1 <= count <= MAX_VIRTUAL_TOKENS:
        raise ConfigError(
            f"num_virtual_tokens is {count!r} in {CONFIG}; 1 to {MAX_VIRTUAL_TOKENS} can be served", setting="lora_path"
        )
    return count


def read_config(path: str) -> dict[str, Any]:
    """An adapter's configuration. Raises ConfigError: there is none, or it is damaged."""
    file = Path(path) / CONFIG
    try:
        config: Any = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path!r} is no adapter: {file.name} cannot be read ({error.strerror or error}); give the folder that PEFT saved",
            setting="lora_path",
        ) from error
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}", setting="lora_path") from error
    if not is_dict(config) or "peft_type" not in config:
        raise ConfigError(f"{file} has no peft_type: it is not PEFT's", setting="lora_path")
    return config
