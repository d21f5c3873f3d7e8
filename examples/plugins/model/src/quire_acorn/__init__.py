"""Adds the architecture `AcornForCausalLM`. It is named by its path, so that only who loads such a checkpoint imports it."""

from quire import ModelRegistry


def register() -> None:
    """Quire calls this in each of its processes."""
    ModelRegistry.register_model("AcornForCausalLM", "quire_acorn.model:acorn")
