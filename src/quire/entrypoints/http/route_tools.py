"""What every route has and does: its line in a table, the server's state, a typed body, an answer in JSON."""

import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.caller import CALLER, check_timeout
from quire.entrypoints.http.decoding import read_body
from quire.entrypoints.http.errors import ErrorResponse, HTTPError, bad_field
from quire.entrypoints.http.long_bodies import Page, encode, json_response
from quire.entrypoints.http.push import AnswerStream, stream_answer
from quire.entrypoints.http.siblings import OWN
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import EVENTS, run_while_connected

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
PageT = TypeVar("PageT", bound=Page)
Handler = Callable[[Request], Awaitable[Response]]


class RequestWithId(Protocol):
    """A body in which the client may name its request."""

    request_id: str | None


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A line of a table of routes.

    Attributes:
        about: what it does, for the OpenAPI document; routes without a line are not in it.
        body: what a request for work holds, one of several; an operator's request has none.
        answer: what an answer in JSON holds, where that has a type: a Struct, or a list of some.
        example: a body that works.
        query: the parameters of the query, and their types.
        form: the fields of a form with a file (`multipart/form-data`), and their types; `binary` is the file, and what ends with
            `?` may be left out.
        error: what the answers hold that are no success.
        stream_type: what a streamed answer is called.
    """

    path: str
    handler: Handler
    about: str = ""
    methods: tuple[str, ...] = ("POST",)
    body: tuple[type[msgspec.Struct], ...] = ()
    answer: Any = None
    example: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    query: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    form: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    error: type[msgspec.Struct] = ErrorResponse
    stream_type: str = "text/event-stream"


def build_routes(endpoints: Iterable[Endpoint]) -> list[Route]:
    """A route for each path, so that the `Allow` of a 405 names all its methods."""
    by_path: dict[str, dict[str, Handler]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {}).update(dict.fromkeys(endpoint.methods, endpoint.handler))
    return [Route(path, _by_method(handlers), methods=list(handlers)) for path, handlers in by_path.items()]


def _by_method(handlers: dict[str, Handler]) -> Handler:
    """The handler of a request's method; Starlette lets no other method through, but HEAD where there is GET."""

    async def handler(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handler


_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def flag_of(request: Request, name: str, default: bool) -> bool:
    """A parameter of the query that is true or false."""
    value = request.query_params.get(name, str(default)).lower()
    if value not in _TRUTH:
        raise bad_field(name, f"{value[:20]!r} is not true or false.")
    return _TRUTH[value]


def number_of(request: Request, name: str, default: int, low: int, high: int = 1 << 62, header: str = "") -> int:
    """A parameter of the query, or else of a header, that is a whole number."""
    text = request.query_params.get(name, request.headers.get(header) if header else None)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 19 and low <= int(text) <= high):
        wanted = f"{low} to {high}" if high < 1 << 62 else f"at least {low}"
        raise bad_field(name, f"{text[:60]!r} is no whole number from the range {wanted}.")
    return int(text)


def page_of(kind: type[PageT], data: list[Any], ids: Sequence[str], has_more: bool) -> PageT:
    """A page of some entries, which have these ids."""
    return kind(data=data, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=has_more)


def is_ascending(request: Request) -> bool:
    """Whether a list is wanted with its first entry first."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_field("order", f"{order[:60]!r} is unknown; allowed: 'asc', 'desc'.")
    return order == "asc"


def state_of(request: Request) -> ServerState:
    return request.app.state.server


async def siblings_answers(request: Request, path: str) -> list[bytes]:
    """What the server's other processes say of themselves; nothing to one of them."""
    siblings = state_of(request).siblings
    if siblings is None or OWN in request.query_params:
        return []
    return await siblings.ask(path)


async def tell_siblings(request: Request, body: msgspec.Struct) -> None:
    """Have the server's other processes do the same, with this body."""
    siblings = state_of(request).siblings
    if siblings is not None and OWN not in request.query_params:
        await siblings.tell(request.url.path, encode(body))


def public_id(request: Request, body: RequestWithId) -> str:
    """The id that the client sees: its own (field, then header), or the one the request was given."""
    return body.request_id or str(request.scope["state"]["request_id"])


async def read_request(request: Request, kind: type[BodyT], *, queues: bool = True, any_type: bool = False) -> BodyT:
    """The typed body of a request for work; refused before it is read while the server cannot serve, or has no room in its queue
    (unless the request is not for the queue).

    Args:
        any_type: a program may call JSON what it likes, as curl does; a page of another origin may not, which a browser lets
            send without asking what is not called JSON.
    """
    state = state_of(request)
    state.accept_work(queues=queues)
    if not any_type or "origin" in request.headers:
        _check_content_type(request)
    if (encoding := request.headers.get("content-encoding", "identity")).lower() not in ("", "identity"):
        message = f"Content-Encoding: {encoding[:100]!r} cannot be read; send the body as it is."
        raise HTTPError(400, message, code="unsupported_media_type")
    body = await read_bytes(request)
    await state.gate.enter()
    state.accept_work(queues=queues)  # of a burst, the first may have filled the queue
    decoded = state.decoder.decode(body, kind, request.scope["state"].setdefault("warnings", []))
    if queues and (timeout := getattr(decoded, "timeout", None)) is not None:
        CALLER.set(CALLER.get().until(time.monotonic() + check_timeout(timeout)))
    if queues:
        await state.look_for_model(getattr(decoded, "model", None))
    return decoded


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if content_type not in ("application/json", "text/json", "") and not content_type.endswith("+json"):
        message = f"Content-Type: {content_type[:100]!r} cannot be read; send application/json."
        raise HTTPError(400, message, code="unsupported_media_type")


async def read_bytes(request: Request) -> bytes:
    """The body as it came; read once, however often it is asked for."""
    kept: dict[str, Any] = request.scope["state"]
    if "body" not in kept:
        kept["body"] = await read_body(request, state_of(request).settings.max_body_bytes)
    return kept["body"]


def work_route(
    kind: type[Any], answer: Callable[[ServerState, Any, str], Awaitable[Any]], *, any_type: bool = False
) -> Handler:
    """A route of work that never streams: `answer` gives what is encoded. `any_type`: as of `read_request`."""

    async def handler(request: Request) -> Response:
        body = await read_request(request, kind, any_type=any_type)

        async def work() -> Response:
            answered = await answer(state_of(request), body, public_id(request, body))
            return answered if isinstance(answered, Response) else json_response(answered)

        return await run_while_connected(request, work())

    return handler


def streaming_route(
    kind: type[Any],
    prepare: Callable[[ServerState, Any, str], Awaitable[Any]],
    stream: Callable[[Any], AnswerStream | None],
    answer: Callable[[Any], Awaitable[Any]],
    content_type: bytes = EVENTS,
) -> Handler:
    """A route whose body becomes a job, which is answered whole or as a stream.

    Args:
        stream: None for a job that cannot be streamed.
        content_type: of the stream. One that is not of events is what is wanted where the body says nothing, has no signs of
            life, and takes bodies of any type.
    """
    has_events = content_type == EVENTS

    async def handler(request: Request) -> Response:
        state = state_of(request)
        body = await read_request(request, kind, any_type=not has_events)

        async def work() -> Response:
            with state.preparing():
                job = await prepare(state, body, public_id(request, body))
            streamed = stream(job) if body.stream or (body.stream is None and not has_events) else None
            if streamed is not None:
                interval = state.settings.sse_keep_alive_interval if has_events else 0.0
                return await stream_answer(request, streamed, interval, content_type)
            return json_response(await answer(job))

        return await run_while_connected(request, work())

    return handler
