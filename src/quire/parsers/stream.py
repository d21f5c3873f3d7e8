"""A parser for one answer: text in pieces, pieces of reasoning, content and calls out.

However the text is cut, the pieces add up to the same. What looks like a call and is none is content; nothing is lost.

A model may call a function without ending its reasoning first. So a marker of a call ends the reasoning, too, if a call of
an offered function begins there before the reasoning's end; otherwise the model only writes about calls. Knows the order of an
answer's parts; knows no model.
"""

import dataclasses
import re
from collections.abc import Generator
from typing import Any

from quire.parsers import harmony
from quire.parsers.formats import NO_CALLS, ToolFormat
from quire.parsers.offered import Tools
from quire.parsers.pieces import Answer, Kind, Piece, Pieces
from quire.parsers.reader import Emit, Malformed, Reader, Waiting, begun
from quire.parsers.reasoning import NO_REASONING, Reasoning
from quire.parsers.response_template import parse as template_parse

_MOST_HEAD = 1 << 12
"""Characters within which a call has to name its function, to end the reasoning."""


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """Reads the reasoning of one answer.

    Args:
        tools: the format of calls; `NO_CALLS` if the request allows none.
        offered: the request's functions.
    """

    reasoning: Reasoning
    tools: ToolFormat
    offered: Tools

    def read_opening(self, reader: Reader, out: Pieces, in_reasoning: bool | None) -> Waiting[str | None]:
        """Take the reasoning with which an answer may begin; returns the marker that goes on, as `read`.

        Args:
            in_reasoning: the prompt ended inside the reasoning (or outside of it); None: as the format says.
        """
        reasoning = self.reasoning
        start = yield from reader.starts_with(reasoning.start)
        found = None
        if start is None and in_reasoning is None and (yield from reader.starts_with(reasoning.answer)) is not None:
            return None  # the model answers at once, with the marker of the answer
        if start is not None or (reasoning.implied if in_reasoning is None else in_reasoning):
            if reasoning.is_content:
                out.text("content", reasoning.start[0] if start is None else "")
            elif start is not None:
                yield from self._skip(reader, out, start)
            found = yield from self.read(reader, out, start)
        elif in_reasoning is None and (end := (yield from reader.starts_with(reasoning.end))) is not None:
            yield from self._skip(reader, out, end)  # it ends what has not begun
        return found

    def read(self, reader: Reader, out: Pieces, start: str | None) -> Waiting[str | None]:
        """Take reasoning up to its end, behind its start marker; returns the marker of the call or header that ended it."""
        kind: Kind = "content" if self.reasoning.is_content else "reasoning"
        ends, raw = self.reasoning.ends_of(start), self.reasoning.calls if self.tools is NO_CALLS else ()
        begin, section = self.tools.begin, self.tools.section[:1]
        if section:  # a call that the model only drafts has nothing around it
            section = (*section, *self.tools.dropped)
        noise = dict(self.reasoning.noise)

        def emit(text: str) -> None:
            if not self.reasoning.is_hidden:
                out.text(kind, text)

        markers = (*ends, *(section or begin), *raw, *noise)
        while (found := (yield from reader.until(markers, emit, kind))) is not None:
            if found in noise:
                yield from self.skip_noise(reader, found)
                continue
            if found in ends:
                if self.reasoning.is_content:
                    emit(found)
                else:
                    out.marker()
                return found if found in self.reasoning.header else None
            if found in raw:
                out.text("content", found)
                return None
            if (yield from self._is_call(reader, ends, begin if found in section else (), found)):
                out.marker()
                return found
            emit(found)
        return None

    def skip_noise(self, reader: Reader, marker: str) -> Waiting[None]:
        """Take what belongs to such a marker; its line's end ends it, too."""
        end = dict(self.reasoning.noise)[marker]
        if end:
            yield from reader.until((end, "\n"), lambda text: None)

    def _skip(self, reader: Reader, out: Pieces, marker: str) -> Waiting[None]:
        yield from reader.expect((marker,))
        out.marker()

    def _is_call(self, reader: Reader, ends: tuple[str, ...], begin: tuple[str, ...], marker: str) -> Waiting[bool]:
        """Whether a call goes on here behind its marker (and one more, if `begin` names any). Nothing is taken."""
        skipped = 0
        if begin:
            if (more := (yield from reader.starts_with(begin))) is None:
                return False
            marker = more
            skipped = reader.text.index(more) + len(more)
        probe, out, num_read = Reader(), Pieces(), skipped
        probe.give_back(marker if marker in self.tools.direct else "")
        steps = self.tools.body.read(probe, out, self.offered)
        self.offered.is_strict = not begin  # behind the marker of a section, whatever is written so is a call
        while True:
            text = reader.text
            found = [at for end in ends if (at := text.find(end)) >= 0]
            limit = min(found) if found else len(text) - (0 if reader.ended else begun(text, ends))
            limit = min(limit, _MOST_HEAD)
            if limit > num_read:
                probe.text += text[num_read:limit]
                num_read = limit
            probe.ended = bool(found) or reader.ended or limit == _MOST_HEAD
            is_over = probe.ended
            try:
                next(steps)
            except (StopIteration, Malformed):
                is_over = True
            names = [piece.text for piece in out.drain() if piece.kind == "call"]
            if names or is_over:
                return bool(names) and self.offered.may_call(names[0])
            yield


class AnswerParser:
    """Reads one answer.

    Args:
        reasoning, tools: the formats; None: it does not think, or no call is looked for.
        is_harmony: the answer is in gpt-oss's format, whatever else is given.
        offered: the request's tools, as the protocol has them; types of parameters are taken from them.
        in_reasoning: the prompt ended inside the reasoning (or outside of it); None: as the format says.
        tokenizer: for parsers from outside.
        hides_calls: calls are read, and left out of the answer.
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
        hides_calls: bool = False,
        response_template: dict[str, Any] | None = None,
        prompt: str = "",
        has_tools: bool = False,
    ) -> None:
        self._in_reasoning = None if reasoning is None else in_reasoning
        reasoning, tools = reasoning or NO_REASONING, tools or NO_CALLS
        own = reasoning.own_space
        own_end: tuple[Kind, ...] = tuple(kind for kind in own if kind == "content" or not reasoning.ends_trimmed)
        self._reader, self._out = Reader(), Pieces(own, own_end)
        self._reader.drops_cut = tools.drops_cut
        self._reader.end_calls_at(tools.end, (*tools.begin, *tools.section[1:]))
        self._reasoning, self._tools, self._offered = reasoning, tools, Tools(offered, tokenizer)
        self._hides_calls = hides_calls
        self._only_thoughts: list[str] | None = None
        if reasoning.fills:
            self._only_thoughts = []
            self._out.resume("reasoning")
        self.has_filled = False
        self._is_unclosed = False
        if response_template is not None:
            parse = template_parse(self._reader, self._out, response_template, prompt, self._offered.offered, has_tools)
        else:
            parse = harmony.parse(self._reader, self._out, self._offered) if is_harmony else self._answer()
        self._steps: Generator[None, None, Any] | None = parse

    @property
    def num_calls(self) -> int:
        """Calls so far that are part of the answer."""
        return 0 if self._hides_calls else self._out.num_calls

    def push(self, text: str) -> list[Piece]:
        """More text."""
        self._reader.text += text
        return self._advance()

    def pass_plain(self, text: str) -> Kind | None:
        """More text, where all of it is one piece: that piece's kind. None where `push` has to read it."""
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
            except Malformed:  # the text ends within a call that was handed on
                self._steps = None
        if self._reader.ended:
            self._out.end()
        pieces = [
            piece for piece in self._out.drain() if not self._hides_calls or piece.kind in ("reasoning", "content")
        ]
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
        thoughts = Thoughts(self._reasoning, self._tools, self._offered)
        if self._reasoning.header and not self._in_reasoning:
            yield from self._content(thoughts, None, begins_in_header=True)
        else:
            found = yield from thoughts.read_opening(self._reader, self._out, self._in_reasoning)
            yield from self._content(thoughts, found)

    @property
    def _is_over(self) -> bool:
        """Whether the answer has called, and its format has nothing but calls from there on."""
        return self._tools.ends_turn and self._out.num_calls > 0

    def _emit(self, text: str) -> None:
        if not self._is_over:
            self._out.text("content", text)

    def _content(self, thoughts: Thoughts, found: str | None, begins_in_header: bool = False) -> Waiting[None]:
        """Content, calls, and more reasoning. `found`: the marker that has ended the reasoning, if it is more than that."""
        reader, out, tools, reasoning = self._reader, self._out, self._tools, self._reasoning
        if tools.bare and found is None:
            yield from self._calls("")
        noise = tuple(dict(reasoning.noise))
        dropped = (*tools.section, *tools.dropped, *reasoning.answer, *(reasoning.end if found else ()))
        markers = (*tools.begin, *tools.end, *dropped, *reasoning.again, *reasoning.header, *noise)
        if begins_in_header and (found := (yield from self._header(markers, self._emit))) is None:
            return
        while True:
            kind = None if self._is_over else "content"
            if found is None and (found := (yield from reader.until(markers, self._emit, kind))) is None:
                return
            marker, found = found, None
            if tools.keeps_space and marker in (*tools.begin, *tools.section[:1], *tools.dropped):
                out.keep_space()
            if marker in tools.begin:
                yield from self._calls(marker)
            elif marker in reasoning.again:
                out.interrupt()
                found = yield from thoughts.read(reader, out, marker)
            elif marker in noise:
                yield from thoughts.skip_noise(reader, marker)
            elif marker in reasoning.answer:
                out.interrupt()
            elif marker in reasoning.header:
                out.marker()
                found = yield from self._header(markers)
            elif self._is_unclosed and marker in tools.end:
                self._is_unclosed = False
                self._emit(marker)
            else:
                self._stray(marker, marker in dropped)

    def _stray(self, marker: str, is_dropped: bool) -> None:
        """A marker that begins nothing here: left out, or content where it is an end without a beginning."""
        if self._out.num_calls or is_dropped:
            self._out.marker()
        elif self._tools.marks_only_calls:
            self._out.keep_space()
            self._out.marker()
        else:
            self._emit(marker)

    def _header(self, markers: tuple[str, ...], if_no_header: Emit | None = None) -> Waiting[str | None]:
        """Leave out the header of a message; returns the marker behind it. At the beginning of an answer, text that is no
        header is content (`if_no_header`)."""
        text, found = yield from self._reader.text_until(markers)
        recipient = self._reasoning.recipient
        is_header = text.strip() in ("", "assistant") if recipient else found not in self._reasoning.end
        if if_no_header is not None and (found is None or not is_header):
            if_no_header(text)
        elif found is not None and recipient and (named := re.search(recipient, text)) is not None:
            self._emit(text[named.start() :] + found)
            found = yield from self._reader.until(markers, self._emit, "content")
        return found

    def _calls(self, marker: str) -> Waiting[None]:
        """The calls behind a marker; what is no call after all is content."""
        reader, out, tools = self._reader, self._out, self._tools
        self._offered.is_bare = tools.bare and len(marker) <= 1
        self._offered.is_strict = self._offered.is_bare or tools.only_offered
        if marker in tools.direct:
            reader.give_back(marker)
        while True:
            reader.mark()
            before, out.in_call = out.num_calls, False
            while len(marker) > 1 and marker not in tools.direct and (yield from reader.accept((marker,))):
                pass  # models write it twice
            try:
                if tools.whole:
                    yield from self._whole_calls(tools)
                else:
                    yield from tools.body.read(reader, out, self._offered)
            except Malformed:
                if not out.in_call:
                    self._no_call(marker, out.num_calls > before)
                return
            finally:
                reader.holds = False
            out.marker()
            if tools.end:
                yield from reader.accept(tools.end)
            if not tools.separator or (yield from reader.accept((tools.separator,))) is None:
                return

    def _whole_calls(self, tools: ToolFormat) -> Waiting[None]:
        """Calls that are handed on when they are whole. Raises Malformed: they are not."""
        self._reader.holds = True
        held, answer = Pieces(), Answer()
        yield from tools.body.read(self._reader, held, self._offered)
        if tools.end:
            yield from self._reader.expect(tools.end)
        for piece in held.drain():
            answer.add(piece)
        fitted = [self._offered.fitted(call.name, call.arguments, tools.checks) for call in answer.calls]
        for call, arguments in zip(answer.calls, fitted, strict=True):
            if arguments is None:
                raise Malformed
            self._out.call(call.name, call.id)
            self._out.arguments(arguments)
        self._out.in_call = False

    def _no_call(self, marker: str, has_called: bool) -> None:
        """What was taken is no call: the marker is content, and what follows is read once more. Behind a bracket it is not: calls
        are not part of other JSON."""
        taken = self._reader.taken
        if len(marker) == 1:
            self._emit(taken)
            return
        if marker and not has_called:
            if marker in self._tools.direct:
                taken = taken.removeprefix(marker)
            if self._tools.drops_cut and self._reader.ended:
                self._reader.take(len(self._reader.text))
                return
            if self._tools.marks_only_calls:
                self._out.marker()
            else:
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
