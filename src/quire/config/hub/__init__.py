"""Models by name: folders of this machine, and repositories of a hub."""

from quire.config.hub.find import (
    DEMO_MODEL,
    FoundModel,
    built_in_folder,
    describe_plan,
    fetch_weights,
    find_adapter,
    find_model,
    find_tokenizer,
    stored_types,
)
from quire.config.hub.outer_parts import with_outer_parts

__all__ = [
    "DEMO_MODEL",
    "FoundModel",
    "built_in_folder",
    "describe_plan",
    "fetch_weights",
    "find_adapter",
    "find_model",
    "find_tokenizer",
    "stored_types",
    "with_outer_parts",
]
