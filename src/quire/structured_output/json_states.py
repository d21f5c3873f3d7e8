"""The state of a piece of JSON: how far it has come, without what cannot matter for its continuation.

Different texts may have the same continuations: the digits of a number that has ended, the amount of space between two parts, and
the content of a string that the schema leaves free do not matter. A `JsonState` leaves them out, so that it is equal for texts
with the same continuations; each token changes it. `read_rules` tells for which schemas this holds. Knows bytes and JSON; knows
no tokens, and does not check that a text is valid.
"""

import json
import re
from typing import Any, NamedTuple

from quire.guards import is_dict, is_sequence

ARRAY, OBJECT = "[", "{"
FREE = b"\"'"
"""The first byte of a lexeme that is a string, and of one whose content was left out because it cannot matter."""
_SPACE = re.compile(rb"[ \t\n\r]+")
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]+")
_STRING = re.compile(rb'(?:[^"\\]|\\.)*\\?', re.DOTALL)
_WORDS = (b"true", b"false", b"null")


class Rules(NamedTuple):
    """What of a text may matter under a schema.

    Attributes:
        longest: the largest `maxLength`, 0 without any.
        names: every property that the schema names anywhere.
        counts: numbers of items or properties that it asks for, in order.
    """

    longest: int
    names: frozenset[str]
    counts: tuple[int, ...]


class Frame(NamedTuple):
    """A container that is not closed yet.

    Attributes:
        kind: ARRAY or OBJECT.
        number: whole items, or properties that the schema does not name.
        keys: properties that it names, as they came.
        is_other: whether the value that comes is that of a property that it does not name.
    """

    kind: str
    number: int = 0
    keys: tuple[str, ...] = ()
    is_other: bool = False


class JsonState(NamedTuple):
    """Where a text ends.

    Attributes:
        frames: the open containers, the innermost last.
        phase: "open" (something or the container's end may come), "value", "key", "colon", "after" (a value).
        lexeme: what there is of a number, a string or a key that is not ended; of a free string an apostrophe, and its last
            character as far as that is begun.
        spaced: whether it ends in space.
        offset: characters of a free string that had to be counted.
    """

    frames: tuple[Frame, ...] = ()
    phase: str = "value"
    lexeme: bytes = b""
    spaced: bool = False
    offset: int = 0

    @property
    def is_in_string(self) -> bool:
        """Whether a string, or a key, is begun."""
        return self.lexeme[:1] in FREE and self.lexeme != b""

    @property
    def is_in_key(self) -> bool:
        """Whether a key is begun, or may be."""
        return self.phase == "key" or (self.phase == "open" and self.frames[-1].kind == OBJECT)


def go_on(state: JsonState, text: bytes, rules: Rules) -> tuple[JsonState, bool] | None:
    """The state after more text, and whether the string that it began in goes on; None where this is no JSON."""
    frames, phase, lexeme, spaced, offset = state
    stays = state.is_in_string
    at = 0
    while at < len(text):
        if lexeme and lexeme[0] in FREE:
            if (len(lexeme) - len(lexeme.rstrip(b"\\"))) % 2:
                lexeme += text[at : at + 1]
                at += 1
                continue
            run = _STRING.match(text, at)
            assert run is not None
            lexeme, at = lexeme + run.group(), run.end()
            if at == len(text):
                break
            at += 1
            stays, offset = False, 0
            is_key = phase == "key" or (phase == "open" and frames[-1].kind == OBJECT)
            frames, phase = _end_key(frames, lexeme, rules) if is_key else _end_value(frames, rules)
            lexeme, spaced = b"", False
        elif run := _SCALAR.match(text, at):
            lexeme, at, spaced = lexeme + run.group(), run.end(), False
            if lexeme in _WORDS:
                frames, phase = _end_value(frames, rules)
                lexeme = b""
        else:
            if lexeme:
                frames, phase = _end_value(frames, rules)
                lexeme = b""
            if run := _SPACE.match(text, at):
                at, spaced = run.end(), True
                continue
            spaced = False
            match text[at : at + 1]:
                case b'"':
                    lexeme = b'"'
                case b"[" | b"{":
                    frames, phase = (*frames, Frame(ARRAY if text[at] == 0x5B else OBJECT)), "open"
                case b"]" | b"}" if frames:
                    frames, phase = _end_value(frames[:-1], rules)
                case b"," if frames:
                    phase = "value" if frames[-1].kind == ARRAY else "key"
                case b":":
                    phase = "value"
                case _:
                    return None
            at += 1
    return JsonState(frames, phase, lexeme, spaced, offset), stays


def _end_value(frames: tuple[Frame, ...], rules: Rules) -> tuple[tuple[Frame, ...], str]:
    if not frames:
        return frames, "after"
    frame = frames[-1]
    if frame.kind == ARRAY:
        frame = frame._replace(number=_count(frame.number, rules))
    elif frame.is_other:
        frame = frame._replace(is_other=False)
    return (*frames[:-1], frame), "after"


def _end_key(frames: tuple[Frame, ...], lexeme: bytes, rules: Rules) -> tuple[tuple[Frame, ...], str]:
    frame = frames[-1]
    try:
        name = json.loads(lexeme + b'"')
    except ValueError:  # half a surrogate, or worse: no name of a schema
        name = None
    if name in rules.names:
        frame = frame._replace(keys=(*frame.keys, name))
    else:
        frame = frame._replace(number=_count(frame.number, rules), is_other=True)
    return (*frames[:-1], frame), "colon"


def _count(count: int, rules: Rules) -> int:
    """One more, up to the largest number that the schema asks for and one."""
    return min(count + 1, rules.counts[-1] + 1 if rules.counts else 0)


def round_counts(frames: tuple[Frame, ...], rules: Rules, most: int) -> tuple[Frame, ...]:
    """Frames with rounded counts: counts are equal from which the next `most` bytes reach no number that the schema asks for."""
    return tuple(frame._replace(number=_round(frame.number, rules.counts, most)) for frame in frames)


def _round(count: int, counts: tuple[int, ...], most: int) -> int:
    for wanted in counts:
        if wanted >= count:
            return max(count, wanted - most - 1)
    return count


_ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "$schema",
    "$id",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_HARMLESS = frozenset(("type", "enum", "const", "required", "minLength", "maxLength", "$ref", *_ANNOTATIONS, *_NUMBERS))
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_NARROW_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"))
"""Formats whose texts are never taken for any text: they have no space, no Umlaut."""


def read_rules(schema: Any) -> Rules | None:
    """What may matter under a schema; None where that may be more than `JsonState` keeps: what a string was (`pattern`,
    alternatives that begin alike), or a part of a given container."""
    names: set[str] = set()
    counts: set[int] = set()
    longest = _read(schema, schema, names, counts)
    return None if longest is None else Rules(longest, frozenset(names), tuple(sorted(counts)))


def _read(schema: Any, root: Any, names: set[str], counts: set[int]) -> int | None:
    """The largest `maxLength`; None as `read_rules`."""
    if isinstance(schema, bool):
        return 0
    if not is_dict(schema):
        return None
    parts: list[Any] = []
    for name, value in schema.items():
        if name in ("properties", "$defs", "definitions") and is_dict(value):
            parts += value.values()
            names.update(map(str, value))
        elif name in ("items", "additionalProperties"):
            parts.append(value)
        elif name == "prefixItems" and is_sequence(value):
            parts += value
            counts.add(len(value))
        elif name in _COUNTS and isinstance(value, int):
            counts.add(value)
        elif name in ("anyOf", "oneOf", "allOf") and is_sequence(value):
            if len(value) > 1 and (name == "allOf" or "type" in schema or not _begin_apart(value, root)):
                return None
            parts += value
        elif name in ("enum", "const"):
            if any(is_dict(one) or is_sequence(one) for one in (value if name == "enum" else [value])):
                return None
        elif name not in _HARMLESS and not (name == "format" and value in _NARROW_FORMATS):
            return None
    most = schema.get("maxLength", 0)
    bounds = [most if isinstance(most, int) else None, *(_read(part, root, names, counts) for part in parts)]
    return None if None in bounds else max(bound for bound in bounds if bound is not None)


def _begin_apart(parts: Any, root: Any) -> bool:
    """Whether the first character of an answer says which of the alternatives it follows."""
    kinds: list[Any] = []
    for part in parts:
        place: Any = part.get("$ref") if is_dict(part) else None
        target: Any = part
        if isinstance(place, str):
            target = root
            for step in place.removeprefix("#/").split("/"):
                target = target.get(step) if is_dict(target) else None
        kind: Any = target.get("type") if is_dict(target) else None
        if not isinstance(kind, str):
            return False
        kinds.append("number" if kind == "integer" else kind)
    return len(set(kinds)) == len(kinds)
