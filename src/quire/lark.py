"""A grammar in llguidance's Lark, put together from texts that are markers, free text, JSON and regular expressions.

Grammars of requests and of tool calls are written with it. Knows the notation, and that a marker may be one special token.
Compiles nothing; knows no format.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark

ANY_TEXT = r"(.|\n)*"
"""A regular expression that matches any text."""
_JSON_SPACE = r"[ \t\r\n]{1,16}"


class Lark:
    """Rules in the making. Its methods return right sides of rules.

    Args:
        special: the tokenizer's special tokens, which a grammar must name by id: their text alone is not them.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self._rules: dict[tuple[str, str], str] = {}
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")

    def rule(self, body: str) -> str:
        """A rule of its own."""
        return self._defined("r", f": {body}")

    def text(self, text: str) -> str:
        """Exactly this text."""
        parts: list[str] = []
        at = 0
        for match in self._special.finditer(text):
            parts += [_quoted(text[at : match.start()]), f"<[{self.special[match.group()]}]>"]
            at = match.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part)

    def json(self, schema: Mapping[str, Any], is_lenient: bool) -> str:
        """JSON of a schema.

        Args:
            is_lenient: what the engine does not know of a schema is passed over, not refused.
        """
        options = {"whitespace_pattern": _JSON_SPACE, "lenient": is_lenient}
        return "%json " + json.dumps({**schema, "x-guidance": options}).replace("::=", r"\u003a:=")

    def until(self, marker: str, pattern: str | None = None, never: Iterable[str] = (), bare: bool = False) -> str:
        """Text up to and with a marker.

        Args:
            pattern: what the text looks like, as a regular expression; None: anything.
            never: what the text does not contain, either.
            bare: it has no white space at its ends.
        """
        plain, special = self._split(marker)
        others = [other for other in never if not self._special.search(other)]
        if pattern is None and not special and not others and not bare:
            return self.up_to_any([marker])
        absent = [*others, *(() if special else (marker,))]
        without = _without(absent)
        without += rf" & ~/[ \t\r\n]{ANY_TEXT}/ & ~/{ANY_TEXT}[ \t\r\n]/" if bare else ""
        return f"{self._terminal(between_slashes(pattern or ANY_TEXT), without, _quoted(plain))} {self.text(special)}"

    def up_to_any(self, markers: Iterable[str], before: str = ANY_TEXT, never: Iterable[str] = ()) -> str:
        """Text up to and with the first of some markers.

        Args:
            before: the text before it, as a regular expression.
            never: what that text does not contain.
        """
        text = f"(/{before}/{_without(never)})" if never else f"/{before}/"
        ways: list[str] = []
        for marker in dict.fromkeys(markers):
            plain, special = self._split(marker)
            if special:
                ways.append(f"{self._terminal(before, _without(never), _quoted(plain))} {self.text(special)}")
            else:
                ways.append(self._defined("r", f"[lazy]: {text} {_quoted(marker)}"))
        return f"({' | '.join(ways)})"

    def _split(self, marker: str) -> tuple[str, str]:
        """A marker up to its first special token, and the rest."""
        match = self._special.search(marker)
        at = len(marker) if match is None else match.start()
        return marker[:at], marker[at:]

    def anything(self, never: Iterable[str] = ()) -> str:
        """Any text up to the end, or up to a special token. `never`: what it does not contain."""
        return self._terminal(ANY_TEXT, _without(never))

    def has_special(self, text: str) -> bool:
        """Whether there is a special token in a text."""
        return self._special.search(text) is not None

    def pattern(self, pattern: str, never: str = "") -> str:
        """Text that a regular expression matches, without a part that another one matches (if there is one)."""
        return self._terminal(
            between_slashes(pattern), f" & ~/{ANY_TEXT}{between_slashes(never)}{ANY_TEXT}/" if never else ""
        )

    def _terminal(self, pattern: str, also: str = "", after: str = "") -> str:
        return self._defined("T", f": (/{pattern}/{also}) {after}")

    def _defined(self, kind: str, definition: str) -> str:
        """The name of a rule or terminal; what is asked for twice is there once."""
        return self._rules.setdefault((kind, definition), f"{kind}{len(self._rules)}")

    def write(self, start: str) -> str:
        """The whole grammar. `space` is a few characters of white space, or none."""
        head = ["%llguidance {}", "start: " + start, "space: SPACE?", r"SPACE: /[ \t\r\n]{1,8}/"]
        return "\n".join([*head, *(name + definition for (_, definition), name in self._rules.items())])


def _without(parts: Iterable[str]) -> str:
    """That a text contains none of some parts."""
    return "".join(f" & ~/{ANY_TEXT}{between_slashes(escaped(part))}{ANY_TEXT}/" for part in parts)


def escaped(text: str) -> str:
    """A regular expression of one text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def _quoted(text: str) -> str:
    return json.dumps(text).replace("::=", r"\u003a:=") if text else ""


def between_slashes(pattern: str) -> str:
    """A regular expression as Lark writes it between slashes.

    Classes such as \\d mean ASCII, as in JSON schemas: no model's "digit" should be one of another script.
    """
    return regex_to_lark(pattern, "dws").replace("::=", r"\x3A:=")
