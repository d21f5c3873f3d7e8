"""Reads a model's reasoning from the text of an answer, up to its end marker or to the first call.

A model may call a function without ending its reasoning first. So a marker of a call ends the reasoning, too, if a call of
an offered function begins there before the reasoning's end; otherwise the model only writes about calls.
Knows reasoning formats and the markers of calls; knows no model.
"""

import dataclasses

from quire.parsers.formats import NO_CALLS, ToolFormat
from quire.parsers.offered import Tools
from quire.parsers.pieces import Kind, Pieces
from quire.parsers.reader import Malformed, Reader, Waiting, begun
from quire.parsers.reasoning import Reasoning

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
