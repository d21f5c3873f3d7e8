"""Adds the reasoning format `lime` (`--reasoning-parser lime`): the markers around what a model thinks."""

from quire.parsers.plugin import register_reasoning_format
from quire.parsers.reasoning import Reasoning


def register() -> None:
    """Quire calls this in each of its processes."""
    register_reasoning_format("lime", Reasoning(("<lime>",), ("</lime>",)))
