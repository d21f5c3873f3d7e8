"""Adds the tool-call format `larch` (`--tool-call-parser larch`). A format is data: Quire reads it while it streams, and enforces
it by a grammar where a call has to be made."""

from quire.parsers.bodies import JsonObject
from quire.parsers.formats import ToolFormat
from quire.parsers.plugin import register_tool_format


def register() -> None:
    """Quire calls this in each of its processes."""
    register_tool_format("larch", ToolFormat(JsonObject(), begin=("<larch>",), end=("</larch>",)))
