"""A model's generation_config.json: its sampling defaults, and every token id that ends generation.

Knows the file. Knows nothing of tokenizers or of what a request says.
"""

import os
from typing import Any

from quire.config.checks import check_keys
from quire.config.files import read_json_object, read_json_object_if_there
from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.guards import is_sequence

FILE_NAME = "generation_config.json"
IGNORE = ("quire", "vllm")
"""Values of `generation_config` that mean the engine's own sampling defaults, not the model's."""
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
}


def load_generation_config(setting: str, model_path: str) -> dict[str, Any]:
    """The generation config that the setting `generation_config` names: `auto` (beside the model), or a folder of its own.
    Raises ConfigError if the folder has no such file, or if the file is not JSON."""
    if setting in ("auto", *IGNORE):
        return read_json_object_if_there(os.path.join(model_path, FILE_NAME), setting="generation_config")
    path = os.path.join(os.path.expanduser(setting), FILE_NAME)
    if not os.path.isfile(path):
        raise ConfigError(
            f"generation_config={setting!r}: no {path!r}; give 'auto' (the model's), 'quire' (none), or a folder that "
            f"holds {FILE_NAME}",
            setting="generation_config",
        )
    return read_json_object(path, setting="generation_config")


def default_sampling(generation: dict[str, Any], setting: str, override: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults under the names of `SamplingParams`; what the operator overrides wins.
    Raises ConfigError if no request could use a default."""
    check_keys("override_generation_config", override, (*_SAMPLING_KEYS, "eos_token_id"))
    own = {} if setting in IGNORE else _rename(generation)
    overridden = _rename(override)
    _check_usable(overridden, "override_generation_config", "give values that a request could have")
    chosen = {**own, **overridden}
    _check_usable(
        chosen, "generation_config", "set override_generation_config, or generation_config='quire' to ignore it"
    )
    return chosen


def _rename(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[key] for key, name in _SAMPLING_KEYS.items() if values.get(key) is not None}


def _check_usable(chosen: dict[str, Any], setting: str, remedy: str) -> None:
    from quire.errors import RequestError
    from quire.sampling_params import SamplingParams

    try:
        SamplingParams(**chosen)
    except RequestError as error:
        raise ConfigError.of(setting, f"its sampling defaults cannot be used: {error}; {remedy}") from error


def eos_token_ids(hf_config: HFConfig, generation: dict[str, Any]) -> tuple[int, ...]:
    """Every id that ends generation, of both files, each once, in their order.
    Raises ConfigError if an id is not a whole number."""
    ids: dict[int, None] = {}
    for file, value in (("config.json", hf_config.get("eos_token_id")), (FILE_NAME, generation.get("eos_token_id"))):
        for item in value if is_sequence(value) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                message = f"{file} has eos_token_id={value!r}; token ids are whole numbers from 0"
                raise ConfigError(message, setting="model")
            ids[item] = None
    return tuple(ids)
