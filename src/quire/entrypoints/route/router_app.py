"""The router: gives each request to the replica with the least to compute for it, and has it go on at another when one fails.

An ASGI application. A stream of `/v1/chat/completions` or `/v1/completions` goes on where it stopped (`continuation.py`); any
other request begins again as long as nothing was sent of its answer. Knows HTTP; of bodies it reads the prompt and the seed.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import Sequence
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send

from quire.engine.replica_choice import Assignment, chain_of
from quire.entrypoints.http.backend_link import Answer, BackendGone, Headers, exchange
from quire.entrypoints.http.streaming import ClientGone, run_beside
from quire.entrypoints.http_client import Target
from quire.entrypoints.route.continuation import Continuation, DifferentText, is_done
from quire.entrypoints.route.prefill import PrefillServers
from quire.entrypoints.route.replica_pool import ReplicaPool
from quire.logger import init_logger

logger = init_logger(__name__)

PIECE_BYTES = 256
BYTES_PER_TOKEN = 4
"""Prompts are compared in pieces of so many bytes, and weighed as so many bytes a token: texts are not tokenized here."""
CHECK_EVERY_S = 1.0
PREFILL_TIMEOUT_S = 30.0
MAX_BODY_BYTES = 256 << 20
CONTINUED = frozenset({"/v1/chat/completions", "/v1/completions"})
REPEATED = CONTINUED | {
    "/v1/embeddings",
    "/v1/messages",
    "/v1/responses",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
}
"""Posts that may be sent to another replica when the first one failed, as nothing is kept of them but answers."""
_SEED_BITS = 31


@dataclasses.dataclass
class _Call:
    """A client's request. Attributes: keys, num_tokens: of its prompt, as `ReplicaChooser` wants them; can_continue: a stream of
    it can go on elsewhere; can_repeat: it may be sent to another replica."""

    method: str
    path: str
    headers: Headers
    body: bytes
    keys: list[int]
    num_tokens: int
    can_continue: bool
    can_repeat: bool


class Router:
    """An ASGI application in front of several servers.

    Args:
        targets: the servers.
        by_prefix: a prompt's cached beginning counts; else the load alone.
        check_every_s: how often each server's `/health` is asked for.
        prefill: servers that compute prompts for these; each may take `prefill_timeout_s`.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        by_prefix: bool = True,
        check_every_s: float = CHECK_EVERY_S,
        prefill: Sequence[Target] = (),
        prefill_timeout_s: float = PREFILL_TIMEOUT_S,
    ) -> None:
        piece = PIECE_BYTES // BYTES_PER_TOKEN
        self.pool = ReplicaPool(targets, piece, by_prefix=by_prefix)
        self.replicas, self._chooser = self.pool.replicas, self.pool.chooser
        self._check_every_s = check_every_s
        self.num_continued = 0
        self.prefill: PrefillServers | None = None
        if prefill:
            self.prefill = PrefillServers(ReplicaPool(prefill, piece, by_prefix=by_prefix), prefill_timeout_s, piece)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        checks: list[asyncio.Task[None]] = []
        pools = [self.pool] if self.prefill is None else [self.pool, self.prefill.pool]
        while (message := await receive())["type"] == "lifespan.startup":
            checks = [
                asyncio.ensure_future(pool.watch(number, self._check_every_s))
                for pool in pools
                for number in range(len(pool.replicas))
            ]
            await send({"type": "lifespan.startup.complete"})
        for check in checks:
            check.cancel()
        del message
        await send({"type": "lifespan.shutdown.complete"})

    # --- requests ---

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == "/health":
            up = any(replica.is_up for replica in self.replicas)
            await _reply(send, 200 if up else 503, {"status": "ok" if up else "no replica is up"})
            return
        if path == "/replicas":
            await _reply(send, 200, self.describe())
            return
        body = await _read_body(receive)
        if body is None:
            await _reply(send, 413, _error(f"the body has more than {MAX_BODY_BYTES} bytes", 413))
            return
        with contextlib.suppress(ClientGone):
            await run_beside(receive, self._relay(_read_call(scope, body), send))

    def describe(self) -> dict[str, Any]:
        """How the replicas stand, for `/replicas`."""
        told: dict[str, Any] = {"replicas": self.pool.describe(), "continued": self.num_continued}
        if self.prefill is not None:
            told |= {"prefill": self.prefill.pool.describe(), "prefill_missed": self.prefill.num_missed}
        return told

    async def _relay(self, call: _Call, send: Send) -> None:
        """Answer a request by one replica after another, until one has answered to the end."""
        stream = _Stream(send)
        if self.prefill is not None and call.can_continue:
            asked = (call.path, call.headers, call.body, call.keys, call.num_tokens)
            call.body = await self.prefill.compute(*asked)
        tried: set[int] = set()
        problem = "there is no replica"
        while (assignment := self.pool.choose(call.keys, call.num_tokens, tried)) is not None:
            tried.add(assignment.replica)
            try:
                problem = await self._relay_from(assignment, call, stream, is_last=len(tried) == len(self.replicas))
            finally:
                self._chooser.end(assignment)
            if not problem:
                return
            if (stream.sent and not call.can_continue) or not call.can_repeat:
                break
            if stream.sent:
                self.num_continued += 1
        await stream.fail(problem)

    async def _relay_from(self, assignment: Assignment, call: _Call, stream: "_Stream", *, is_last: bool) -> str:
        """Answer a request by a replica; why it could not."""
        number = assignment.replica
        target = self.replicas[number].target
        try:
            async with exchange(target, call.method, call.path, call.headers, call.body) as answer:
                if answer.status == 503 and not is_last:
                    return f"{target.url} answers 503"
                if stream.sent and not (answer.status == 200 and answer.is_stream):
                    return f"{target.url} answers {answer.status} to a request that goes on"
                self._chooser.begin_answer(assignment)
                await (
                    stream.relay(answer) if answer.is_stream and answer.status == 200 else stream.relay_whole(answer)
                )
                return ""
        except BackendGone as error:
            self.pool.note(number, str(error))
            return str(error)
        except DifferentText as error:
            return f"{target.url} does not go on with the same text: {error}"


class _Stream:
    """An answer to the client. Attributes: sent: the events that it has got."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.sent: list[bytes] = []
        self._has_begun = False

    async def relay(self, answer: Answer) -> None:
        """Pass a stream on; behind what was sent already. Raises BackendGone: it broke off."""
        rest = Continuation(self.sent) if self.sent else None
        await self._begin(answer)
        ended = False
        async with contextlib.aclosing(answer.events()) as events:
            async for event in events:
                kept = event if rest is None else rest.filter(event)
                if kept is not None:
                    self.sent.append(kept)
                    await self._send({"type": "http.response.body", "body": kept, "more_body": True})
                ended = ended or is_done(event)
        if not ended and self.sent and _is_openai(self.sent[0]):
            raise BackendGone("the stream ended before it was complete")
        await self._send({"type": "http.response.body", "body": b""})

    async def relay_whole(self, answer: Answer) -> None:
        """Pass an answer on once all of it has come. Raises BackendGone: it broke off."""
        body = await answer.whole()
        headers = [(name, value) for name, value in answer.headers if name != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _begin(self, answer: Answer) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})

    async def fail(self, problem: str) -> None:
        """No replica could answer to the end."""
        logger.error("a request failed: %s", problem)
        error = _error(problem, 502)
        if not self._has_begun:
            await _reply(self._send, 502, error)
            return
        body = b"data: " + json.dumps(error).encode() + b"\n\n"
        await self._send({"type": "http.response.body", "body": body})


def _is_openai(event: bytes) -> bool:
    """Whether the stream ends with [DONE]."""
    return b'"chat.completion.chunk"' in event or b'"text_completion"' in event


def _error(text: str, code: int) -> dict[str, Any]:
    return {"error": {"message": text, "type": "server_error", "param": None, "code": code}}


async def _reply(send: Send, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _read_body(receive: Receive) -> bytes | None:
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _read_call(scope: Scope, body: bytes) -> _Call:
    """What is to be sent on. A stream that shall be able to go on elsewhere gets a seed, as the server would give it one."""
    path = scope["path"]
    query = scope.get("query_string", b"").decode("latin-1")
    whole = f"{scope.get('raw_path', path.encode()).decode('latin-1')}{'?' + query if query else ''}"
    can_continue, prompt = False, b""
    root = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    if scope["method"] == "POST" and body[:1] == b"{":
        with contextlib.suppress(ValueError):
            request = cast("dict[str, Any]", json.loads(body))
            prompt = _prompt_of(request)
            can_continue = path in CONTINUED
            if can_continue and request.get("seed") is None:
                request["seed"] = secrets.randbits(_SEED_BITS)
                body = json.dumps(request, ensure_ascii=False).encode()
    pieces = [prompt[at : at + PIECE_BYTES] for at in range(0, len(prompt) - PIECE_BYTES + 1, PIECE_BYTES)]
    tokens = max(1, len(prompt) // BYTES_PER_TOKEN)
    can_repeat = scope["method"] in ("GET", "HEAD") or path in REPEATED
    keys = chain_of(pieces, root)
    return _Call(scope["method"], whole, list(scope["headers"]), body, keys, tokens, can_continue, can_repeat)


def _prompt_of(request: dict[str, Any]) -> bytes:
    """What the prompt is made of, in the order in which it is computed."""
    parts = [request.get(name) for name in ("model", "tools", "system", "instructions", "messages", "prompt", "input")]
    return "".join(part if isinstance(part, str) else json.dumps(part) for part in parts if part is not None).encode()
