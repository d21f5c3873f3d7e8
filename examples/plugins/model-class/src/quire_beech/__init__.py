"""Adds the architecture `BeechForCausalLM`, whose modules are its own. It is named by its path: importing it imports torch."""

from quire import ModelRegistry


def register() -> None:
    """Quire calls this in each of its processes."""
    ModelRegistry.register_model("BeechForCausalLM", "quire_beech.model:BeechModel")
