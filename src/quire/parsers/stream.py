"""A parser for one answer: text in pieces, pieces of reasoning, content and calls out.

However the text is cut, the pieces add up to the same. What looks like a call and is none is content; nothing is lost. Knows
the order of an answer's parts; knows no model.
"""

from collections.abc import Generator
from typing import Any

from quire.parsers import harmony
from quire.parsers.formats import ToolFormat
from quire.parsers.offered import Tools
from quire.parsers.pieces import Answer, Kind, Piece, Pieces
from quire.parsers.reader import Emit, Malformed, Reader, Waiting
from quire.parsers.reasoning import Reasoning
from quire.parsers.response_template import parse as template_parse
from quire.parsers.thoughts import Thoughts


class AnswerParser:
    """Reads one answer.

    Args:
        reasoning, tools: the formats; None: it does not think, or no call is looked for.
        is_harmony: the answer is in gpt-oss's format, whatever else is given.
        offered: the request's tools, in the protocol's form; types of parameters are taken from them.
        in_reasoning: the prompt ended inside the reasoning (or outside of it); None: as the format says.
        tokenizer: for parsers from outside.
        response_template, prompt, has_tools: as of `response_template.parse`; it reads the answer whatever else is given.

    Attributes:
        has_filled: the answer was nothing but reasoning, which is its content, too (`Reasoning.fills`).
    """

    def __init__(
        self,
        reasoning: Reasoning | None = None,
        tools: ToolFormat | None = None,
        *,
        is_harmony: bool = False,
        offered: list[dict[str, Any]] | None = None,
        in_reasoning: bool | None = None,
        tokenizer: Any = None,
        response_template: dict[str, Any] | None = None,
        prompt: str = "",
        has_tools: bool = False,
    ) -> None:
        self._reader, self._out = Reader(), Pieces()
        self._tools, self._offered = tools, Tools(offered, tokenizer)
        if tools is not None:
            self._reader.end_calls_at(tools.end, (*tools.begin, *tools.section[1:]))
        self._reasoning = reasoning
        self._in_reasoning = in_reasoning
        self._only_thoughts: list[str] | None = [] if reasoning is not None and reasoning.fills else None
        self.has_filled = False
        self._is_unclosed = False
        if response_template is not None:
            parse = template_parse(self._reader, self._out, response_template, prompt, self._offered.offered, has_tools)
        else:
            parse = harmony.parse(self._reader, self._out, self._offered) if is_harmony else self._answer()
        self._steps: Generator[None, None, Any] | None = parse

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._out.num_calls

    def push(self, text: str) -> list[Piece]:
        """More text."""
        self._reader.text += text
        return self._advance()

    def pass_plain(self, text: str) -> Kind | None:
        """More text, where it is one piece as it stands: that piece's kind. None where `push` has to read it."""
        passing = self._reader.passing
        if passing is None or self._only_thoughts is not None:
            return None
        kind, firsts = passing
        return kind if firsts.isdisjoint(text) and self._out.passes(kind, text) else None

    def finish(self) -> list[Piece]:
        """The text has ended."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
            except Malformed:  # the end of the text stands within a call that was handed on
                self._steps = None
        if self._reader.ended:
            self._out.end()
        pieces = self._out.drain()
        return pieces if self._only_thoughts is None else self._filled(pieces, self._only_thoughts)

    def _filled(self, pieces: list[Piece], thoughts: list[str]) -> list[Piece]:
        """The pieces; at the end of an answer that was nothing but reasoning, this once more as content."""
        thoughts += [piece.text for piece in pieces if piece.kind == "reasoning"]
        if any(piece.kind != "reasoning" for piece in pieces):
            self._only_thoughts = None
        elif self._reader.ended and thoughts:
            self._only_thoughts, self.has_filled = None, True
            return [*pieces, Piece("content", "".join(thoughts))]
        return pieces

    def _answer(self) -> Waiting[None]:
        reasoning = self._reasoning
        if reasoning is None:
            yield from self._content(None, None)
            return
        thoughts = Thoughts(reasoning, self._tools, self._offered)
        if reasoning.header and not self._in_reasoning:
            yield from self._content(thoughts, None, begins_in_header=True)
        else:
            found = yield from thoughts.read_opening(self._reader, self._out, self._in_reasoning)
            yield from self._content(thoughts, found)

    def _emit(self, text: str) -> None:
        self._out.text("content", text)

    def _content(self, thoughts: Thoughts | None, found: str | None, begins_in_header: bool = False) -> Waiting[None]:
        """Content, calls, and more reasoning. `found`: the marker that has ended the reasoning, if it is more than that."""
        reader, out, tools = self._reader, self._out, self._tools
        dropped: tuple[str, ...] = ()
        again: tuple[str, ...] = ()
        header: tuple[str, ...] = ()
        noise: tuple[str, ...] = ()
        if thoughts is not None:
            noise = tuple(dict(thoughts.reasoning.noise))
            again, header = thoughts.reasoning.again, thoughts.reasoning.header
            dropped = (*thoughts.reasoning.answer, *(thoughts.reasoning.end if found else ()))
        if tools is not None and tools.bare and found is None:
            yield from self._calls(tools, "")
        begin = () if tools is None else tools.begin
        dropped = dropped if tools is None else (*tools.section, *tools.dropped, *dropped)
        markers = (*begin, *(() if tools is None else tools.end), *dropped, *again, *header, *noise)
        if begins_in_header and (found := (yield from self._header(markers, self._emit))) is None:
            return
        while True:
            if found is None and (found := (yield from reader.until(markers, self._emit, "content"))) is None:
                return
            marker, found = found, None
            if tools is not None and tools.keeps_space and marker in (*begin, *tools.section[:1], *tools.dropped):
                out.keep_space()
            if tools is not None and marker in begin:
                yield from self._calls(tools, marker)
            elif thoughts is not None and marker in again:
                out.reasoning_begins()
                found = yield from thoughts.read(reader, out, marker)
            elif thoughts is not None and marker in noise:
                yield from thoughts.skip_noise(reader, marker)
            elif marker in header:
                out.marker()
                found = yield from self._header(markers)
            elif self._is_unclosed and tools is not None and marker in tools.end:
                self._is_unclosed = False
                self._emit(marker)
            elif out.num_calls or marker in dropped:
                out.marker()
            else:  # an end without a beginning
                self._emit(marker)

    def _header(self, markers: tuple[str, ...], if_no_header: Emit | None = None) -> Waiting[str | None]:
        """Leave out the header of a message; returns the marker behind it. A text without any marker is no header."""
        parts: list[str] = []
        found = yield from self._reader.until(markers, parts.append)
        if found is None and if_no_header is not None:
            if_no_header("".join(parts))
        return found

    def _calls(self, tools: ToolFormat, marker: str) -> Waiting[None]:
        """The calls behind a marker; what is no call after all is content."""
        reader, out = self._reader, self._out
        self._offered.is_bare = tools.bare and len(marker) <= 1
        self._offered.is_strict = self._offered.is_bare or tools.only_offered
        if marker in tools.direct:
            reader.give_back(marker)
        while True:
            reader.mark()
            before, out.in_call = out.num_calls, False
            try:
                yield from tools.body.read(reader, out, self._offered)
            except Malformed:
                if not out.in_call:
                    self._no_call(marker, out.num_calls > before)
                return
            out.marker()
            if not tools.separator or (yield from reader.starts_with((tools.separator,))) is None:
                return
            yield from reader.expect((tools.separator,))

    def _no_call(self, marker: str, has_called: bool) -> None:
        """What was taken is no call: the marker is content, and what follows is read once more. Behind a bracket it is not: calls
        do not stand within other JSON."""
        taken = self._reader.taken
        if len(marker) == 1:
            self._emit(taken)
            return
        if marker and not has_called:
            taken = taken.removeprefix(marker)
            self._emit(marker)
            self._is_unclosed = True
        self._reader.give_back(taken)


def parse_answer(text: str, **formats: Any) -> Answer:
    """A whole answer at once; arguments as of `AnswerParser`."""
    parser, answer = AnswerParser(**formats), Answer()
    for piece in (*parser.push(text), *parser.finish()):
        answer.add(piece)
    if parser.has_filled:
        answer.reasoning = ""
    return answer
