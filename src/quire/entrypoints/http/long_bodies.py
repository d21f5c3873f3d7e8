"""JSON of any length, written in pieces between other requests' work.

Encoding a vector for each of 3,000 tokens takes hundreds of milliseconds, in which no other stream would get a token. So what is
long is taken apart: each piece is encoded in about a millisecond, and sent before the next one is made. Knows structs, lists,
dicts and NumPy's arrays; knows no route.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import msgspec
import numpy as np
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

ItemT = TypeVar("ItemT")
MadeT = TypeVar("MadeT")
AT_ONCE = 8192
"""Numbers and texts of a piece."""
MANY, FEW = 64, 4
"""Of more entries only some are looked at, to see how long a value is: a whole one, or one of many."""
LETTERS = 64
"""So many letters of a text count as one number."""
BUSY_S, HAND_OVER_S = 0.003, 0.0001


class Page(msgspec.Struct, kw_only=True):
    """A part of a list, as its answer."""

    object: str = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class Made(Sequence[MadeT], Generic[ItemT, MadeT]):
    """A sequence whose entries are made when they are read: each by a function of an item."""

    def __init__(self, items: Sequence[ItemT], make: Callable[[ItemT], MadeT]) -> None:
        self._items, self._make = items, make

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> MadeT: ...
    @overload
    def __getitem__(self, index: slice) -> list[MadeT]: ...
    def __getitem__(self, index: int | slice) -> MadeT | list[MadeT]:
        if isinstance(index, slice):
            return [self._make(self._items[at]) for at in range(*index.indices(len(self)))]
        return self._make(self._items[index])

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(cast("Sequence[Any]", other)) if isinstance(other, Sequence) else other)


def chained(first: Sequence[Any], then: Sequence[Any]) -> Any:
    """One sequence behind another, neither of which is copied."""
    length = len(first)
    return Made(range(length + len(then)), lambda at: first[at] if at < length else then[at - length])


def to_builtin(value: Any) -> Any:
    """What msgspec encodes in the place of an array, or of a sequence that is made when it is read."""
    if isinstance(value, np.ndarray):
        return cast("np.ndarray[Any, Any]", value).tolist()
    if isinstance(value, Made):
        return list(cast("Made[Any, Any]", value))
    raise NotImplementedError(f"{type(value).__name__} has no form in JSON")


encode = msgspec.json.Encoder(enc_hook=to_builtin).encode


def size_of(value: Any, many: int = MANY) -> int:
    """About how many numbers and texts a value has. Of more than `many` entries some tell how long all of them are; within them,
    of fewer."""
    if isinstance(value, str | bytes):
        return 1 + len(value) // LETTERS
    if isinstance(value, np.ndarray):
        return cast("np.ndarray[Any, Any]", value).size
    if isinstance(value, msgspec.Struct):
        return 1 + sum([size_of(getattr(value, name), many) for name in value.__struct_fields__])
    if isinstance(value, dict):
        entries: Sequence[Any] = list(cast("dict[Any, Any]", value).values())
    elif isinstance(value, list | tuple | Made):
        entries = cast("Sequence[Any]", value)
    else:
        return 1
    some = entries[:: 1 + len(entries) // many]
    return 1 + sum([size_of(each, max(many // 8, 1)) for each in some]) * len(entries) // max(len(some), 1)


def pieces_of(value: Any) -> Iterator[bytes]:
    """The JSON of a value in pieces of at most about `AT_ONCE` numbers and texts."""
    if size_of(value) <= AT_ONCE:
        yield encode(value)
    elif isinstance(value, list | tuple | Made | np.ndarray):
        yield from _list_pieces(cast("Sequence[Any]", value))
    elif isinstance(value, dict):
        yield from _object_pieces(iter(cast("dict[Any, Any]", value).items()))
    elif isinstance(value, msgspec.Struct) and value.__struct_config__.tag is None:
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        fields = ((name, getattr(value, field)) for name, field in names)
        yield from _object_pieces((name, each) for name, each in fields if each is not msgspec.UNSET)
    else:
        yield encode(value)


def _list_pieces(items: Sequence[Any]) -> Iterator[bytes]:
    """Short entries together, long ones by themselves."""
    opening, batch, room = b"[", list[Any](), AT_ONCE
    if isinstance(items, np.ndarray) and items.ndim == 1:
        for at in range(0, len(items), AT_ONCE):
            yield opening + encode(items[at : at + AT_ONCE])[1:-1]
            opening = b","
        yield b"]"
        return
    for at in range(0, len(items), AT_ONCE):
        for item in items[at : at + AT_ONCE] if isinstance(items, np.ndarray) else _read(items, at):
            size = size_of(item, FEW)
            if batch and size > room:
                yield opening + encode(batch)[1:-1]
                opening, batch, room = b",", [], AT_ONCE
            if size > AT_ONCE:
                yield opening
                yield from pieces_of(item)
                opening = b","
            else:
                batch.append(item)
                room -= size
    yield opening + encode(batch)[1:-1] + b"]" if batch else b"]"


def _read(items: Sequence[Any], start: int) -> Iterator[Any]:
    return (items[at] for at in range(start, min(start + AT_ONCE, len(items))))


def _object_pieces(entries: Iterator[tuple[Any, Any]]) -> Iterator[bytes]:
    opening = b"{"
    for name, value in entries:
        yield opening + encode(str(name)) + b":"
        yield from pieces_of(value)
        opening = b","
    yield b"}"


class Turns:
    """Lets others go on between the pieces of long work: other requests after each piece, other threads every few milliseconds.

    A thread that waits for the interpreter is woken when the loop lets it go. But the loop lets it go for microseconds (a write,
    a look at its sockets), and takes it again first: for 0.2 s no request got what the core had computed for it. So the loop's
    thread sleeps for a moment.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def pass_on(self) -> None:
        """Between two pieces."""
        if time.perf_counter() - self._since > BUSY_S:
            time.sleep(
                HAND_OVER_S
            )  # the thread, not the task: with others as long as this one the loop would never rest
            self._since = time.perf_counter()
        await asyncio.sleep(0)


class LongBody(Response):
    """An answer whose body is made while it is sent."""

    media_type = "application/json"

    def __init__(self, value: Any, status: int = 200) -> None:
        super().__init__(status_code=status)
        del self.headers["content-length"]
        self._value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        waiting, turns = bytearray(), Turns()
        for piece in pieces_of(self._value):
            waiting += piece
            if len(waiting) > AT_ONCE:
                await send({"type": "http.response.body", "body": bytes(waiting), "more_body": True})
                waiting.clear()
                await turns.pass_on()
        await send({"type": "http.response.body", "body": bytes(waiting)})


def json_response(value: Any, status: int = 200) -> Response:
    """An answer as JSON: at once, or in pieces between other requests' work where it is long."""
    if size_of(value) > AT_ONCE:
        return LongBody(value, status)
    return Response(encode(value), status_code=status, media_type="application/json")
