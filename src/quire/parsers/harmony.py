"""gpt-oss's format: messages on channels, of which one is thought, one the answer, and one carries calls.

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>
"""

import re

from quire.parsers.pieces import Kind, Pieces
from quire.parsers.reader import Reader, Waiting

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")


def parse(reader: Reader, out: Pieces) -> Waiting[None]:
    """A whole answer. Text outside of messages is content."""
    while True:
        outside: list[str] = []
        found = yield from reader.until(("<|start|>", "<|channel|>"), outside.append)
        text = "".join(outside)
        if text.strip() and text.strip() != "assistant":
            out.text("content", text)
        if found is None:
            return
        header: list[str] = []
        if (yield from reader.until(("<|message|>",), header.append)) is None:
            return
        out.marker()
        yield from _message("".join(header), reader, out)


def _message(header: str, reader: Reader, out: Pieces) -> Waiting[None]:
    """One message, whose header says where it belongs."""
    header = header.removeprefix("assistant")
    recipient, channel = _RECIPIENT.search(header), header.replace("<|channel|>", " ").split()
    if recipient is not None:
        out.call(recipient[1])
        yield from reader.until(_ENDS, out.arguments)
        return
    kind: Kind = "reasoning" if channel[:1] == ["analysis"] else "content"
    found = yield from reader.until(_ENDS, lambda text: out.text(kind, text), kind)
    if found is not None:
        out.marker()
