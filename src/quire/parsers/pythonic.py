"""Tool calls in Python's notation: `[f(a=1, b="x"), g()]`. Only literals are read; nothing is run.

Models are not exact: a string has a raw line break, or a quote within quotes, `07` for 7, `{"a", "b"}` for a list, a
keyword such as `from` as a parameter's name. All this is read as it is meant. Knows a way of writing; knows no model.
"""

import ast
import dataclasses
import json
import keyword
import re
import warnings
from typing import Any

from quire.parsers.bodies import complete
from quire.parsers.offered import Tools
from quire.parsers.pieces import Pieces
from quire.parsers.reader import Malformed, Reader, Waiting

MAX_LITERAL = 1 << 16
"""Characters of a call; longer ones are content."""
_STRING = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=[1-9]\d*(?![\w.]))")
_KEYWORD = re.compile(rf"\b({'|'.join(keyword.kwlist)})(\s*=(?!=))")
_OF_KEYWORD = "quire_keyword_"
_PARAMETER = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")


@dataclasses.dataclass(frozen=True)
class Pythonic:
    """`[f(a=1, b="x"), g()]`, or one call a line. A call is handed on when it is whole."""

    brackets: bool = True

    def read(self, reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
        if self.brackets:
            yield from reader.expect(("[",))
        while True:
            first = yield from reader.peek()
            if self.brackets and first == "]":
                reader.take(1)
                return
            if not (first.isidentifier()):
                if self.brackets or not out.num_calls:
                    raise Malformed
                return
            text = yield from self._whole_call(reader)
            name, arguments = read_call(text)
            if not tools.may_call(name):
                raise Malformed
            out.call(name)
            out.arguments(json.dumps(arguments, ensure_ascii=False))
            complete(reader, out)
            if self.brackets and (yield from reader.expect((",", "]"))) == "]":
                return

    def _whole_call(self, reader: Reader) -> Waiting[str]:
        """Up to the bracket that closes the first one; brackets in strings do not count. Where a string does not end before the
        calls do, a string has an apostrophe, and the last bracket closes the call."""
        size, depth, quote = 0, 0, ""
        while True:
            limit = reader.num_certain()
            while size < limit:
                char = reader.text[size]
                size += 1
                if quote:
                    if reader.ends_here(size - 1):
                        return self._last_call(reader, size - 1)
                    if char == "\\":
                        size += 1
                    elif char == quote:
                        quote = ""
                elif char in "\"'":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                    if depth == 0:
                        return reader.take(size)
                elif depth == 0 and not (char.isidentifier() or char.isdigit() or char in ". "):
                    raise Malformed
            if reader.ended and quote:
                return self._last_call(reader, len(reader.text))
            if reader.ended or size > MAX_LITERAL:
                raise Malformed
            yield

    def _last_call(self, reader: Reader, end: int) -> str:
        """Everything up to the last bracket before the calls' end."""
        text = reader.text[:end].rstrip()
        text = text.removesuffix("]").rstrip() if self.brackets else text
        if not text.endswith(")"):
            raise Malformed
        return reader.take(len(text))


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call.

    Raises:
        Malformed: it is none, or its arguments are no literals.
    """
    name, arguments = _parsed(_exact(text)) or _parsed(_exact(_requoted(text))) or ("", {})
    if not name:
        raise Malformed
    return name, arguments


def _parsed(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a backslash before a character that needs none
            call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
            return None
        arguments = {
            str(each.arg).removeprefix(_OF_KEYWORD): ast.literal_eval(_AsJson().visit(each.value))
            for each in call.keywords
        }
        json.dumps(arguments, allow_nan=False)
        return ast.unparse(call.func), arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _exact(text: str) -> str:
    """The same in Python's exact notation, as far as one string after the other tells."""
    parts: list[str] = []
    at = 0
    for match in (*_STRING.finditer(text), None):
        between = text[at : match.start() if match else len(text)]
        parts.append(_KEYWORD.sub(rf"{_OF_KEYWORD}\1\2", _LEADING_ZEROS.sub("", between)))
        if match:
            parts.append(
                match.group().replace("\\\n", "\n").replace("\n", "\\n").replace("\r", "\\r").replace("\0", "\\0")
            )
            at = match.end()
    return "".join(parts)


def _requoted(text: str) -> str:
    """The same with quotes within a string parameter escaped: it ends before the next parameter, or the call's end."""
    opening = text.find("(") + 1
    parts, at = [text[:opening]], opening
    while (match := _PARAMETER.match(text, at)) is not None:
        at = match.end()
        quote = text[at : at + 1]
        if quote in ("'", '"'):
            end = re.compile(rf"(?<!\\){quote}(?=\s*(?:,\s*[A-Za-z_]\w*\s*=|\)\s*$))").search(text, at + 1)
        else:
            end = re.compile(r"(?=,\s*[A-Za-z_]\w*\s*=|\)\s*$)").search(text, at)
        if end is None:
            return text
        value = text[at : end.end()]
        if quote in ("'", '"'):
            value = quote + re.sub(rf"(?<!\\){quote}", "\\" + quote, value[1:-1]) + quote
        parts += [match.group(), value]
        at = end.end()
        if text[at : at + 1] == ",":
            parts.append(",")
            at += 1
    return "".join([*parts, text[at:]])


class _AsJson(ast.NodeTransformer):
    """JSON's words for constants, and a list in place of a set."""

    _VALUES = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:  # the name is Python's
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node

    def visit_Set(self, node: ast.Set) -> ast.expr:  # the name is Python's
        return ast.List([self.visit(each) for each in node.elts], ast.Load())
