"""Tool calls as `call:get_weather{city:<|"|>Paris<|"|>,days:3}`: strings are between marks of their own, without escapes.

Knows a way of writing; knows no model.
"""

import dataclasses
import json
import re

from quire.parsers.bodies import complete
from quire.parsers.offered import Tools, as_json
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting
from quire.parsers.tags import TextValue

MAX_DEPTH = 64
_CLOSING = {"{": "}", "(": ")"}
_BARE_END = re.compile(r"[,}\])]")


@dataclasses.dataclass(frozen=True)
class Braces:
    """Names and values in braces, objects and lists within them alike.

    Attributes:
        quote: the mark before and after a string.
        before: the text before the function's name; its last character alone will do.
        quotes_all: every value is between quotes, so that only the schema tells its type.
    """

    quote: str
    before: str = "call:"
    quotes_all: bool = False

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        yield from reader.expect((self.before, self.before[-1:]))
        header, bracket = yield from reader.header(tuple(_CLOSING))
        function = header.strip()
        if not re.fullmatch(r"[\w.:/-]+", function) or not tools.may_call(function):
            raise Malformed
        out.call(function)
        count = 0
        while not (yield from self._is_over(reader, _CLOSING[bracket])):
            try:
                key = yield from self._key(reader)
            except Malformed:
                out.arguments("}" if count else "{}")
                raise
            out.arguments(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._argument(reader, out, tools, function, key)
            count += 1
        out.arguments("}" if count else "{}")
        complete(reader, out)

    def _is_over(self, reader: Reader, closing: str) -> Waiting[bool]:
        """Whether the closing bracket follows, which is taken, or the text ends; a comma is taken, too."""
        while (yield from reader.peek()) == ",":
            reader.take(1)
        if reader.text.startswith(closing):
            reader.take(1)
            return True
        return not reader.text

    def _key(self, reader: Reader) -> Waiting[str]:
        key = (
            (yield from reader.header((":",)))[0].strip().removeprefix(self.quote).removesuffix(self.quote).strip("\"'")
        )
        if not key or re.search(r"[{}\[\],]", key):
            raise Malformed
        return key

    def _argument(self, reader: Reader, out: Pieces, tools: Tools, function: str, key: str) -> Waiting[None]:
        """A value of the call itself; a string is handed on while it comes."""
        kind, or_null = tools.kind(function, key), "null" in tools.types(function, key)
        if (yield from reader.accept((self.quote,))) is None:
            value = yield from self._value(reader, 0)
            text = value.strip()
            is_bare = text[:1] not in ("{", "[", '"')
            is_text = is_bare and kind == "text" and not (or_null and text == "null")
            fitting = tools.as_json(function, key, text) if is_bare else value
            out.arguments(json.dumps(text, ensure_ascii=False) if is_text else fitting)
            return
        if self.quotes_all and kind != "text":
            text, _ = yield from reader.text_until((self.quote,))
            out.arguments(tools.as_json(function, key, text))
            return
        text_value = TextValue(out, or_null=or_null and self.quotes_all)
        yield from reader.until((self.quote,), text_value.add)
        text_value.end()

    def _value(self, reader: Reader, depth: int) -> Waiting[str]:
        """The JSON of a value."""
        if depth > MAX_DEPTH:
            raise Malformed
        if (yield from reader.accept((self.quote,))) is not None:
            text, _ = yield from reader.text_until((self.quote,))
            return json.dumps(text, ensure_ascii=False)
        first = yield from reader.peek()
        values: list[str] = []
        if first == "[":
            reader.take(1)
            while not (yield from self._is_over(reader, "]")):
                values.append((yield from self._value(reader, depth + 1)))
            return f"[{', '.join(values)}]"
        if first == "{":
            reader.take(1)
            while not (yield from self._is_over(reader, "}")):
                key = json.dumps((yield from self._key(reader)), ensure_ascii=False)
                values.append(f"{key}: {yield from self._value(reader, depth + 1)}")
            return f"{{{', '.join(values)}}}"
        return as_json((yield from self._bare(reader)))

    def _bare(self, reader: Reader) -> Waiting[str]:
        """Text up to a comma or a closing bracket, which is not taken."""
        while True:
            match = _BARE_END.search(reader.text)
            if match is not None:
                if match.start() == 0:
                    raise Malformed
                return reader.take(match.start())
            if reader.ended:
                return reader.take(len(reader.text))
            yield
