"""Adds the architecture `AcornForCausalLM` and the tool-call format `acorn` to Quire."""

from quire import ModelRegistry
from quire.parsers.bodies import JsonObject
from quire.parsers.formats import ToolFormat
from quire.parsers.plugin import register_tool_format


def register() -> None:
    """Quire calls this function when it starts. The model is named by its path: it is imported when a checkpoint needs it."""
    ModelRegistry.register_model("AcornForCausalLM", "quire_acorn.model:acorn")
    register_tool_format("acorn", ToolFormat(JsonObject(), begin=("<acorn>",), end=("</acorn>",)))
