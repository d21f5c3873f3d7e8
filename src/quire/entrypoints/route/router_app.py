"""The router: gives each request to the replica with the least to compute for it, and has it go on at another when one fails.

An ASGI application. A stream of `/v1/chat/completions` or `/v1/completions` goes on where it stopped (`continuation.py`); any
other request begins again as long as nothing was sent of its answer. Knows HTTP; of bodies it reads the prompt and the seed.
"""

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import starlette.routing
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.engine.replica_choice import Assignment, chain_of
from quire.entrypoints.http.backend_link import Answer, BackendGone, Headers, exchange
from quire.entrypoints.http.decoding import read_body
from quire.entrypoints.http.errors import HTTPError
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


class Router(starlette.routing.Router):
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
        own = [Route("/health", self._health), Route("/replicas", self._told)]
        super().__init__(own, redirect_slashes=False, default=self._pass_on, lifespan=self._living)
        piece = PIECE_BYTES // BYTES_PER_TOKEN
        self.pool = ReplicaPool(targets, piece, by_prefix=by_prefix)
        self.replicas, self._chooser = self.pool.replicas, self.pool.chooser
        self._check_every_s = check_every_s
        self.num_continued = 0
        self.prefill: PrefillServers | None = None
        if prefill:
            self.prefill = PrefillServers(ReplicaPool(prefill, piece, by_prefix=by_prefix), prefill_timeout_s, piece)

    @contextlib.asynccontextmanager
    async def _living(self, app: object) -> AsyncGenerator[None]:
        """While it lives, it looks after the servers."""
        pools = [self.pool] if self.prefill is None else [self.pool, self.prefill.pool]
        numbered = [(pool, number) for pool in pools for number in range(len(pool.replicas))]
        checks = [asyncio.ensure_future(pool.watch(number, self._check_every_s)) for pool, number in numbered]
        yield
        for check in checks:
            check.cancel()

    # --- requests ---

    async def _health(self, request: Request) -> Response:
        up = any(replica.is_up for replica in self.replicas)
        return JSONResponse({"status": "ok" if up else "no replica is up"}, 200 if up else 503)

    async def _told(self, request: Request) -> Response:
        return JSONResponse(self.describe())

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Every other request."""
        if scope["type"] != "http":
            return
        try:
            body = await read_body(Request(scope, receive), MAX_BODY_BYTES)
        except HTTPError as error:
            await _refused(error.detail.message, error.status)(scope, receive, send)
            return
        with contextlib.suppress(ClientGone):
            answer = await run_beside(receive, self._relay(_read_call(scope, body), send))
            if answer is not None:
                await answer(scope, receive, send)

    def describe(self) -> dict[str, Any]:
        """How the replicas stand, for `/replicas`."""
        told: dict[str, Any] = {"replicas": self.pool.describe(), "continued": self.num_continued}
        if self.prefill is not None:
            told |= {"prefill": self.prefill.pool.describe(), "prefill_missed": self.prefill.num_missed}
        return told

    async def _relay(self, call: _Call, send: Send) -> Response | None:
        """Answer a request by one replica after another, until one has answered to the end; gives what is said if none could."""
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
                return None
            if (stream.sent and not call.can_continue) or not call.can_repeat:
                break
            if stream.sent:
                self.num_continued += 1
        logger.error("a request failed: %s", problem)
        if not stream.has_begun:
            return _refused(problem, 502)
        await send({"type": "http.response.body", "body": b"data: " + _refused(problem, 502).body + b"\n\n"})
        return None

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
    """An answer to the client. Attributes: sent: the events that it has got; has_begun: it has the head of a stream."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.sent: list[bytes] = []
        self.has_begun = False

    async def relay(self, answer: Answer) -> None:
        """Pass a stream on; behind what was sent already. Raises BackendGone: it broke off."""
        rest = Continuation(self.sent) if self.sent else None
        if not self.has_begun:
            self.has_begun = True
            await self._send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
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


def _is_openai(event: bytes) -> bool:
    """Whether the stream ends with [DONE]."""
    return b'"chat.completion.chunk"' in event or b'"text_completion"' in event


def _refused(problem: str, status: int) -> Response:
    """An answer that no server has given."""
    return JSONResponse({"error": {"message": problem, "type": "server_error", "param": None, "code": status}}, status)


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
