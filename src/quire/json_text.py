"""JSON texts inside of requests, such as a tool call's arguments, which are parsed after the body that carries them.

What walks such a value later (a template's `tojson`, say) does so by recursion, so its depth is bounded like the body's.
"""

import json
import re
from typing import Any

from quire.config.limits import MAX_JSON_DEPTH

_BRACKETS_AND_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class TooDeepError(ValueError):
    """A JSON text is nested more than `MAX_JSON_DEPTH` levels."""

    def __init__(self) -> None:
        super().__init__(f"nested more than {MAX_JSON_DEPTH} levels deep")


def check_depth(text: bytes) -> None:
    """Raises TooDeepError if a JSON text is nested too deep. Counts only where there are brackets enough for that."""
    if text.count(b"[") + text.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for match in _BRACKETS_AND_STRINGS.finditer(text):
        token = match.group()
        if token in (b"[", b"{"):
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise TooDeepError
        elif token in (b"]", b"}"):
            depth -= 1


def parse_json(text: str) -> Any:
    """Raises ValueError if the text is not JSON; TooDeepError, which is one, if it is nested too deep."""
    check_depth(text.encode("utf-8", "surrogatepass"))
    try:
        return json.loads(text)
    except RecursionError:  # brackets inside of what only looks like a string
        raise TooDeepError from None
