"""gpt-oss's format: messages on channels, of which one is thought, one the answer, and one carries calls.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>
"""

import re

from quire.parsers.offered import Tools
from quire.parsers.pieces import Kind, Pieces
from quire.parsers.reader import Reader, Waiting

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HEADER_ENDS = ("<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"\bto=(?P<prefix>functions\.)?(?P<name>[\w.-]+)")
_HEADER_WORDS = re.compile(
    r"(?:\s*(?:<\|channel\|>|<\|constrain\|>\s*\w*|to=[^\s<]+|(?:assistant|analysis|commentary|final|json)\b))*\s*"
)
_CHANNELS = ("analysis", "commentary", "final")
_BUILT_IN = ("browser", "python", "container", "web_search_preview", "code_interpreter")
"""Tools that OpenAI runs itself; the model may write to them all the same."""


def parse(reader: Reader, out: Pieces, tools: Tools) -> Waiting[None]:
    """A whole answer. Text outside of messages is content."""
    seen: set[Kind] = set()
    while True:
        text, found = yield from reader.text_until(("<|start|>", "<|channel|>"))
        if text.strip() and text.strip() != "assistant":
            out.text("content", text)
        if found is None:
            return
        yield from _message(reader, out, tools, seen)


def _message(reader: Reader, out: Pieces, tools: Tools, seen: set[Kind]) -> Waiting[None]:
    """One message, whose header says where it belongs.

    Args:
        seen: kinds of text that the answer has already; a line break separates two messages of a kind.
    """
    header, found = yield from reader.text_until(_HEADER_ENDS)
    text = ""
    if found != "<|message|>":  # the model has left this marker out, or the answer ends in the header
        size = _HEADER_WORDS.match(header).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches anything
        header, text = header[:size], header[size:]
        if found is None and any(word.startswith(text) for word in (*_CHANNELS, "assistant", "json", "to=")):
            return
    out.marker()
    kind, function = _place(header, tools)
    if function is not None:
        out.call(function)
    started = False

    def emit(more: str) -> None:
        nonlocal started
        if function is not None:
            started = started or bool(more.strip())
            out.arguments(more)
        elif kind is not None and (started or more.strip()):
            if not started and kind in seen:
                out.line_break(kind)
            started = True
            seen.add(kind)
            out.text(kind, more)

    emit(text)
    if found == "<|message|>":
        found = yield from reader.until(_ENDS, emit, None if function is not None else kind)
    if function is not None and not started and found is not None:
        out.arguments("{}")
    elif function is None and found is not None:
        out.marker()


def _place(header: str, tools: Tools) -> tuple[Kind | None, str | None]:
    """Whether a message is reasoning, content, or neither; and the function that it calls."""
    channel = next((word for word in header.replace("<|channel|>", " ").split() if word in _CHANNELS), None)
    kind: Kind = "reasoning" if channel == "analysis" else "content"
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        return kind, None
    name, tools.is_strict = recipient["name"], True
    is_offered = bool(tools.offered) and tools.may_call(name)
    if recipient["prefix"] or is_offered or not (name == "assistant" or name.partition(".")[0] in _BUILT_IN):
        return None, name
    return ("reasoning" if kind == "reasoning" and name != "assistant" else None), None
