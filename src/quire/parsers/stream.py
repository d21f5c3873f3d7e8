"""A parser for one answer: text in pieces, pieces of reasoning, content and calls out.

However the text is cut, the pieces add up to the same. What looks like a call and is none is content; nothing is lost. Knows
the order of an answer's parts; knows no model.
"""

from collections.abc import Generator
from typing import Any

from quire.parsers import harmony
from quire.parsers.formats import Reasoning, ToolFormat
from quire.parsers.offered import Tools
from quire.parsers.pieces import Answer, Kind, Piece, Pieces
from quire.parsers.reader import Malformed, Reader, Waiting


class AnswerParser:
    """Reads one answer.

    Args:
        reasoning, tools: the formats; None: it does not think, or no call is looked for.
        is_harmony: the answer is in gpt-oss's format, whatever else is given.
        offered: the request's tools, in the protocol's form; types of parameters are taken from them.
        in_reasoning: the prompt ended inside the reasoning (or outside of it); None: as the format says.
        tokenizer: for parsers from outside.
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
    ) -> None:
        self._reader, self._out = Reader(), Pieces()
        self._tools, self._offered = tools, Tools(offered, tokenizer)
        self._reasoning = reasoning
        self._begins_inside = reasoning is not None and (reasoning.implied if in_reasoning is None else in_reasoning)
        parse = harmony.parse(self._reader, self._out) if is_harmony else self._answer()
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
        if passing is None:
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
        return self._out.drain()

    def _answer(self) -> Waiting[None]:
        reader, out, reasoning = self._reader, self._out, self._reasoning
        if reasoning is not None:
            inside = self._begins_inside
            word = yield from reader.starts_with(reasoning.start)
            if word is not None:
                yield from reader.expect((word,))
                out.marker()
                inside = True
            if inside:
                yield from reader.until(reasoning.end, lambda text: out.text("reasoning", text), "reasoning")
                out.marker()
        if self._tools is None:
            yield from self._content(reasoning.answer if reasoning else ())
        else:
            yield from self._content_and_calls(self._tools, reasoning.answer if reasoning else ())

    def _content(self, dropped: tuple[str, ...]) -> Waiting[None]:
        while (yield from self._reader.until(dropped, self._emit, "content")) is not None:
            self._out.marker()

    def _emit(self, text: str) -> None:
        self._out.text("content", text)

    def _content_and_calls(self, tools: ToolFormat, dropped: tuple[str, ...]) -> Waiting[None]:
        reader, out = self._reader, self._out
        if tools.bare:
            yield from self._calls(tools, "")
        markers = (*tools.begin, *tools.end, *tools.section, *dropped)
        while (found := (yield from reader.until(markers, self._emit, "content"))) is not None:
            if found in tools.begin:
                yield from self._calls(tools, found)
            elif out.num_calls or found in (*tools.section, *dropped):
                out.marker()
            else:  # an end without a beginning
                self._emit(found)

    def _calls(self, tools: ToolFormat, marker: str) -> Waiting[None]:
        """The calls behind a marker; what is no call after all is content."""
        reader, out = self._reader, self._out
        while True:
            reader.mark()
            before, out.in_call, self._offered.is_strict = out.num_calls, False, not marker
            try:
                yield from tools.body.read(reader, out, self._offered)
            except Malformed:
                if not out.in_call:
                    self._emit((marker if out.num_calls == before else "") + reader.taken)
                return
            out.marker()
            if not tools.separator or (yield from reader.starts_with((tools.separator,))) is None:
                return
            yield from reader.expect((tools.separator,))


def parse_answer(text: str, **formats: Any) -> Answer:
    """A whole answer at once; arguments as of `AnswerParser`."""
    parser, answer = AnswerParser(**formats), Answer()
    for piece in (*parser.push(text), *parser.finish()):
        answer.add(piece)
    return answer
