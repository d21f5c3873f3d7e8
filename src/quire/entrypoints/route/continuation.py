"""How a stream goes on at another server: the same request is computed there again, and what the client has is left out.

The token at a position depends on the logits, the seed and the position only, so the other server gives the same text. Knows the
events of `/v1/chat/completions` and `/v1/completions`. Knows no sockets.
"""

import json
from collections.abc import Iterable
from typing import Any, cast

DONE = b"[DONE]"
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")

Key = tuple[Any, ...]


class DifferentText(Exception):
    """The other server generates something else."""


def data_of(event: bytes) -> bytes:
    """An event's data; empty for a comment."""
    lines = (line for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].strip() for line in lines)


def is_done(event: bytes) -> bool:
    """Whether the stream is complete behind this event."""
    return data_of(event) == DONE


class Continuation:
    """Leaves out of a stream what an earlier one of the same request has sent.

    Args:
        sent: the events that the client has.
    """

    def __init__(self, sent: Iterable[bytes]) -> None:
        self._left: dict[Key, str] = {}
        self._ended: set[int] = set()
        self._identity: dict[str, Any] = {}
        self._has_usage = False
        for event in sent:
            chunk = _chunk_of(event)
            if chunk is None:
                continue
            self._identity = self._identity or {name: chunk[name] for name in ("id", "created") if name in chunk}
            self._has_usage = self._has_usage or (not chunk.get("choices") and chunk.get("usage") is not None)
            for choice in chunk.get("choices", ()):
                for key, text in _texts(choice).items():
                    self._left[key] = self._left.get(key, "") + text
                if choice.get("finish_reason"):
                    self._ended.add(choice.get("index", 0))

    def filter(self, event: bytes) -> bytes | None:
        """What the client gets of an event of the new stream. Raises DifferentText."""
        chunk = _chunk_of(event)
        if chunk is None:
            return event
        choices = cast("list[dict[str, Any]]", chunk.get("choices") or [])
        if "error" in chunk or (not choices and self._has_usage):
            return event if "error" in chunk else None
        chunk.update(self._identity)
        kept = [choice for choice in choices if self._cut(choice)]
        if choices and not kept:
            return None
        chunk["choices"] = kept
        return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

    def _cut(self, choice: dict[str, Any]) -> bool:
        """Cut what was sent off a choice; whether anything is left of it."""
        index = choice.get("index", 0)
        if index in self._ended:
            return False
        has_news = bool(choice.get("finish_reason"))
        for key, text in _texts(choice).items():
            before = self._left.get(key, "")
            common = min(len(before), len(text))
            if before[:common] != text[:common]:
                raise DifferentText(f"{before[:40]!r} was sent, and {text[:40]!r} came again")
            self._left[key] = before[common:]
            _put(choice, key, text[common:])
            has_news = has_news or len(text) > common
        if (
            has_news
            and any(key[0] == index and left for key, left in self._left.items())
            and choice.get("finish_reason")
        ):
            raise DifferentText("the answer ended before what was sent")
        return has_news


def _chunk_of(event: bytes) -> dict[str, Any] | None:
    data = data_of(event)
    if not data or data == DONE:
        return None
    try:
        chunk = json.loads(data)
    except ValueError:
        return None
    return cast("dict[str, Any]", chunk) if isinstance(chunk, dict) else None


def _texts(choice: dict[str, Any]) -> dict[Key, str]:
    """The texts of a choice, by where they are."""
    index = choice.get("index", 0)
    found: dict[Key, str] = {}
    if isinstance(choice.get("text"), str):
        found[index, "text"] = choice["text"]
    delta = cast("dict[str, Any]", choice.get("delta") or {})
    for name in _TEXTS:
        if isinstance(delta.get(name), str):
            found[index, "delta", name] = delta[name]
    for call in cast("list[dict[str, Any]]", delta.get("tool_calls") or []):
        function = cast("dict[str, Any]", call.get("function") or {})
        for name in ("name", "arguments"):
            if isinstance(function.get(name), str):
                found[index, "call", call.get("index", 0), name] = function[name]
    return found


def _put(choice: dict[str, Any], key: Key, text: str) -> None:
    match key:
        case (_, "text"):
            choice["text"] = text
        case (_, "delta", name):
            choice["delta"][name] = text
        case (_, "call", number, name):
            for call in choice["delta"]["tool_calls"]:
                if call.get("index", 0) == number:
                    call["function"][name] = text
        case _:
            raise KeyError(key)
