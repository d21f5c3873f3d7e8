"""How requests come in without holding up the streams that run: a few at a time, their longer texts tokenized in a thread.

Knows event loops, and a tokenizer's `encode`. Knows nothing of protocols.
"""

import asyncio
import collections
import weakref
from collections.abc import Sequence
from typing import Any

from quire.tokenizers.interface import Tokenizer

AT_ONCE = 4
"""Requests let in before the event loop looks at everything else again: about a millisecond's work."""
INLINE_CHARACTERS = 1024
"""Texts up to here are tokenized on the event loop (about 0.1 ms on one Zen 3 core, as long as a hop to a thread takes)."""
ALONE_CHARACTERS = 1 << 17
"""Texts from here on have a thread of their own: others do not wait for the tenth of a second or more that they take."""


class AdmissionGate:
    """Lets `AT_ONCE` requests in between two looks of the event loop at its sockets, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._left = AT_ONCE
        self._loop: asyncio.AbstractEventLoop | None = None

    async def enter(self) -> None:
        """Wait for one's turn; what follows, up to the next `await`, should be short."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # the first since a quiet moment
            self._loop = loop
            loop.call_soon(self._next_turn)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self) -> None:
        self._left = AT_ONCE
        is_quiet = not self._waiting
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if is_quiet or self._loop is None:
            self._loop = None
        else:
            self._loop.call_soon(self._next_turn)


class _Queue:
    """Texts that wait for one tokenizer's thread; those that come while it works are its next batch."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, bool, asyncio.Future[list[int]]]] = []
        self.task: asyncio.Task[None] | None = None

    async def work(self, tokenizer: Tokenizer) -> None:
        try:
            while self.waiting:
                batch, self.waiting = self.waiting, []
                for special in {special for _, special, _ in batch}:
                    texts = [(text, future) for text, is_special, future in batch if is_special is special]
                    results = await asyncio.to_thread(_encode_all, tokenizer, [text for text, _ in texts], special)
                    for (_, future), result in zip(texts, results, strict=True):
                        _resolve(future, result)
        finally:
            self.task = None


_queues: "weakref.WeakKeyDictionary[Any, _Queue]" = weakref.WeakKeyDictionary()


async def encode_text(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """A text's token ids; of a long one in a thread, together with others that come at the same time.
    Raises RequestError if it cannot be tokenized."""
    if len(text) <= INLINE_CHARACTERS:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    if len(text) >= ALONE_CHARACTERS:
        return list(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens))
    loop = asyncio.get_running_loop()
    queue = _queues.setdefault(tokenizer, _Queue())
    if queue.task is not None and queue.task.get_loop() is not loop:  # left behind by a loop that has ended
        queue = _queues[tokenizer] = _Queue()
    future: asyncio.Future[list[int]] = loop.create_future()
    queue.waiting.append((text, add_special_tokens, future))
    if queue.task is None:
        queue.task = loop.create_task(queue.work(tokenizer))
    return await future


def _encode_all(tokenizer: Tokenizer, texts: Sequence[str], special: bool) -> list[list[int] | Exception]:
    """Each text's token ids, or why it has none."""
    batch = getattr(tokenizer, "encode_batch", None)
    if batch is not None and len(texts) > 1:
        try:
            return batch(list(texts), special)
        except Exception:  # one of them is at fault: each alone tells which
            pass
    return [_encode_one(tokenizer, text, special) for text in texts]


def _encode_one(tokenizer: Tokenizer, text: str, special: bool) -> list[int] | Exception:
    try:
        return list(tokenizer.encode(text, add_special_tokens=special))
    except Exception as error:
        return error


def _resolve(future: "asyncio.Future[list[int]]", result: list[int] | Exception) -> None:
    if future.done():  # its client has gone
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
