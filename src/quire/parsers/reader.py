"""Text that comes in pieces, for parsers that are written as if all of it were there.

A parser is a generator; it yields where it needs more text. `Reader` gives out no character before it is certain what it
belongs to, so that where the text was cut makes no difference. Knows characters; knows no format.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from quire.parsers.pieces import Kind

T = TypeVar("T")
Waiting = Generator[None, None, T]
"""A parser that returns T; each `yield` asks for more text."""
Emit = Callable[[str], None]

_STRUCTURE = re.compile(r'["{}\[\]<]')
_FIRST_KEY = re.compile(r'\s*\{\s*(?:"(?P<key>(?:[^"\\]|\\.)*)"|(?!["\s]))')
_SCALAR_END = re.compile(r"[,\]}\s]")


MOST_HEADER = 1 << 10
"""Characters within which a name ends."""


LEAST_CUT = 3
"""Characters of a marker by which it is known though it is cut off."""


class Malformed(Exception):
    """The text is not what the format says."""


class Reader:
    """The text that has come and was not taken yet.

    Attributes:
        passing: while everything that came has been emitted as pieces of one kind: that kind, and the characters with which
            something else may begin.
        drops_cut: a marker that is cut off at the end of the text is left out.
        holds: `mark` does nothing: all that is taken may have to be given back.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = self.holds = self.drops_cut = False
        self.passing: tuple[Kind, frozenset[str]] | None = None
        self._taken: list[str] = []
        self._ends: tuple[str, ...] = ()
        self._after_ends: tuple[str, ...] = ()
        self._string_end = re.compile(r'["\\]')

    def end_calls_at(self, ends: tuple[str, ...], followers: tuple[str, ...]) -> None:
        """JSON is cut off at the first of some markers, even within a string that was not closed: there a marker that may
        follow it, or the end of the text, must come next, or the marker belongs to the string."""
        self._ends, self._after_ends = ends, followers
        self._string_end = re.compile("|".join((r'["\\]', *map(re.escape, ends))))

    def ends_here(self, at: int) -> bool:
        """Whether a marker that ends calls begins at a place of the text, as far as this is here."""
        return bool(self._ends) and self.text.startswith(self._ends, at)

    def num_certain(self) -> int:
        """How many characters are here before one with which a marker that ends calls may begin."""
        return len(self.text) - (0 if self.ended else begun(self.text, self._ends))

    def put_back(self) -> None:
        """What was taken last comes once more."""
        self.text = self._taken.pop() + self.text

    def give_back(self, text: str) -> None:
        """Text that was taken comes once more."""
        self.text = text + self.text

    @property
    def taken(self) -> str:
        """Everything that was taken since `mark`, for a parser that has to give it back."""
        return "".join(self._taken)

    def mark(self) -> None:
        """Forget what was taken before."""
        if not self.holds:
            self._taken.clear()

    def take(self, count: int) -> str:
        """The next characters, which are there."""
        part, self.text = self.text[:count], self.text[count:]
        self._taken.append(part)
        return part

    def until(self, markers: tuple[str, ...], emit: Emit, kind: Kind | None = None) -> Waiting[str | None]:
        """Emit the text before the first of some markers, and take the marker; None where the text ends before one.

        Args:
            kind: what is emitted becomes pieces of this kind.
        """
        firsts = frozenset(marker[0] for marker in markers)
        while True:
            found = [(at, marker) for marker in markers if (at := self.text.find(marker)) >= 0]
            if found:
                at, marker = min(found, key=lambda each: (each[0], -len(each[1])))
                emit(self.take(at))
                if not self.ended and any(other != self.text and other.startswith(self.text) for other in markers):
                    yield  # it may be the beginning of a longer one
                    continue
                self.take(len(marker))
                return marker
            keep = begun(self.text, markers)
            if self.ended:
                emit(self.take(len(self.text) - (keep if self.drops_cut and keep >= LEAST_CUT else 0)))
                self.take(len(self.text))
                return None
            emit(self.take(len(self.text) - keep))
            if kind is not None and not keep:
                self.passing = kind, firsts
            yield
            self.passing = None

    def text_until(self, markers: tuple[str, ...]) -> Waiting[tuple[str, str | None]]:
        """Take the text before the first of some markers, and the marker; returns both. None: the text ends before one."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append)
        return "".join(parts), marker

    def header(self, stops: tuple[str, ...]) -> Waiting[tuple[str, str]]:
        """Take the text before the first of some markers, which holds a name, and the marker; returns both.

        Raises:
            Malformed: none follows within a name's length, or at all.
        """
        while True:
            head = self.text[:MOST_HEADER]
            found = [(at, stop) for stop in stops if (at := head.find(stop)) >= 0]
            if found:
                at, stop = min(found)
                return self.take(at), self.take(len(stop))
            if self.ended or len(self.text) >= MOST_HEADER:
                raise Malformed
            yield

    def opens_object(self) -> Waiting[bool]:
        """Whether a JSON object may begin here, as far as its first key; other values are told later."""
        while True:
            rest = self.text.lstrip()
            inner = rest[1:].lstrip()
            if rest and rest[0] != "{":
                return True
            if inner or self.ended:
                return inner[:1] in ("", '"', "}")
            yield

    def first_key(self) -> Waiting[str | None]:
        """The first key of the JSON object that begins here, of which nothing is taken; None: there is none."""
        while True:
            match = _FIRST_KEY.match(self.text)
            if match is not None and (match["key"] is not None or self.ended or match.end() < len(self.text)):
                return match["key"]
            if self.ended or len(self.text) >= MOST_HEADER:
                return None
            yield

    def peek(self) -> Waiting[str]:
        """The next character that is no white space, which is taken; empty at the end."""
        while True:
            self.take(len(self.text) - len(self.text.lstrip()))
            if self.text or self.ended:
                return self.text[:1]
            yield

    def starts_with(self, words: tuple[str, ...]) -> Waiting[str | None]:
        """The longest word with which the text goes on, white space aside; nothing else is taken. None if it is none of them."""
        while True:
            rest = self.text.lstrip()
            if not self.ended and any(word != rest and word.startswith(rest) for word in words):
                yield  # it may be the beginning of a (longer) word
                continue
            return max((word for word in words if rest.startswith(word)), key=len, default=None)

    def accept(self, words: tuple[str, ...]) -> Waiting[str | None]:
        """Take the longest of some words and the white space before it; None where the text goes on otherwise."""
        word = yield from self.starts_with(words)
        if word is not None:
            self.take(self.text.index(word) + len(word))
        return word

    def expect(self, words: tuple[str, ...]) -> Waiting[str]:
        """Take one of some words and the white space before it.

        Raises:
            Malformed: the text goes on otherwise.
        """
        word = yield from self.accept(words)
        if word is None:
            raise Malformed
        return word

    def json_value(self, emit: Emit) -> Waiting[None]:
        """Take one JSON value, emitting it as it is written.

        Raises:
            Malformed: no value begins here, or brackets close that were not opened.
        """
        first = yield from self.peek()
        if first == '"':
            yield from self._string(emit)
        elif first in ("{", "["):
            yield from self._nested(emit)
        elif first and first not in ",}]:":
            yield from self._scalar(emit)
        else:
            raise Malformed

    def json_string(self) -> Waiting[str]:
        """Take one JSON string; returns it with its quotes."""
        if (yield from self.peek()) != '"':
            raise Malformed
        parts: list[str] = []
        yield from self._string(parts.append)
        return "".join(parts)

    def _string(self, emit: Emit) -> Waiting[None]:
        emit(self.take(1))
        while True:
            match = self._string_end.search(self.text)
            if match is None:
                emit(self.take(self.num_certain()))
            elif match.group() == '"':
                emit(self.take(match.end()))
                return
            elif match.group() != "\\":
                emit(self.take(match.start()))
                if (yield from self._is_cut(match.group())):
                    raise Malformed
                emit(self.take(len(match.group())))
                continue
            elif match.end() < len(self.text):
                emit(self.take(match.end() + 1))
                continue
            else:
                emit(self.take(match.start()))
            if self.ended:
                raise Malformed
            yield

    def _is_cut(self, marker: str) -> Waiting[bool]:
        """Whether the marker that comes next, which is not taken, ends a call."""
        while True:
            rest = self.text[len(marker) :].lstrip()
            if rest.startswith(self._after_ends) or (self.ended and not rest):
                return True
            if self.ended or not any(word.startswith(rest) for word in self._after_ends):
                return False
            yield

    def _nested(self, emit: Emit) -> Waiting[None]:
        depth = 0
        while True:
            match = _STRUCTURE.search(self.text)
            if match is None:
                emit(self.take(len(self.text)))
                if self.ended:
                    raise Malformed
                yield
                continue
            emit(self.take(match.start()))
            if match.group() == '"':
                yield from self._string(emit)
                continue
            if match.group() == "<":  # no JSON: a marker begins here
                raise Malformed
            depth += 1 if match.group() in "{[" else -1
            emit(self.take(1))
            if depth == 0:
                return

    def _scalar(self, emit: Emit) -> Waiting[None]:
        while True:
            match = _SCALAR_END.search(self.text)
            if match is not None:
                emit(self.take(match.start()))
                return
            emit(self.take(len(self.text)))
            if self.ended:
                return
            yield


def begun(text: str, markers: tuple[str, ...]) -> int:
    """How many of the last characters may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
