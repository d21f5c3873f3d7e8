"""Models by name: folders of this machine, and repositories of a hub."""

from quire.config.hub.find import (
    FoundModel,
    describe_plan,
    fetch_weights,
    find_adapter,
    find_model,
    find_tokenizer,
    stored_types,
)

__all__ = [
    "FoundModel",
    "describe_plan",
    "fetch_weights",
    "find_adapter",
    "find_model",
    "find_tokenizer",
    "stored_types",
]
