"""Parts of a model that are checkpoints of their own: Ultravox names its language model and its encoder."""

import dataclasses

from quire.config.hf_config import HFConfig
from quire.config.hub.find import fetch_weights, find_model
from quire.config.hub.listing import HubSettings
from quire.config.resolve import load_hf_config

SECTIONS = {"text_model_id": ("text_config", "language_model."), "audio_model_id": ("audio_config", "audio_tower.")}
"""By the field that names a part: the section that describes it, and what its tensors' names begin with in the whole."""
FOLDERS = "part_paths"
"""The field of the whole that has the parts' folders, by what their tensors' names begin with."""


def with_outer_parts(hf: HFConfig, settings: HubSettings) -> HFConfig:
    """The config with those of its parts in it; what is not on this machine is fetched.
    Raises ConfigError: a part cannot be had."""
    values, folders = hf.to_dict(), dict[str, str]()
    for field in values.keys() & SECTIONS.keys():
        if (name := values.pop(field)) is None:
            continue
        described, prefix = SECTIONS[field]
        anywhere = dataclasses.replace(settings, revision=None)
        found = find_model(str(name), anywhere)
        if found.hub is not None:
            fetch_weights(found.hub, anywhere)
        values[described] = load_hf_config(found.path, {}).to_dict() | (values.get(described) or {})
        folders[prefix] = found.path
    return HFConfig(values | {FOLDERS: folders}) if folders else hf
