"""Routes that reach into the engine, with `QUIRE_SERVER_DEV_MODE=1` only: memory given back, workers called, what was chosen.

Knows the engine's verbs. Who may reach these routes can do anything with the engine: they belong in no open network.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import bad_request
from quire.entrypoints.openai.route_tools import Handler, json_response, read_request, state_of

_LEVELS = ("1", "2")
_TAGS = ("weights", "kv_cache")


class RemoteCall(msgspec.Struct, kw_only=True):
    """Body of `POST /collective_rpc`."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


async def sleep(request: Request) -> Response:
    """`POST /sleep?level=1`: end what runs, give memory back (2: the weights are forgotten) until `/wake_up`."""
    level = request.query_params.get("level", "1")
    if level not in _LEVELS:
        raise bad_request(f"level: {level[:20]!r} is not one of {', '.join(_LEVELS)}.", "level")
    await _engine(request).sleep(int(level))
    return Response(status_code=200)


async def wake_up(request: Request) -> Response:
    """`POST /wake_up?tags=weights&tags=kv_cache`: take memory again; without tags, all."""
    tags = request.query_params.getlist("tags")
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        raise bad_request(f"tags: {unknown[0][:40]!r} is not one of {', '.join(_TAGS)}.", "tags")
    await _engine(request).wake_up(tags or None)
    return Response(status_code=200)


async def is_sleeping(request: Request) -> Response:
    """`GET /is_sleeping`."""
    return json_response({"is_sleeping": await _engine(request).is_sleeping()})


async def server_info(request: Request) -> Response:
    """`GET /server_info`: what was chosen for the engine, and why."""
    return json_response(await _engine(request).explain())


async def collective_rpc(request: Request) -> Response:
    """`POST /collective_rpc`: call a method of every worker; what is not JSON in the results comes as text."""
    call = await read_request(request, RemoteCall)
    results = await _engine(request).collective_rpc(call.method, call.timeout, call.args, call.kwargs)
    return Response(msgspec.json.encode({"results": results}, enc_hook=str), media_type="application/json")


def _engine(request: Request) -> Any:
    return state_of(request).engine


DEV_ROUTES: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/sleep", ("POST",), sleep),
    ("/wake_up", ("POST",), wake_up),
    ("/is_sleeping", ("GET",), is_sleeping),
    ("/server_info", ("GET",), server_info),
    ("/collective_rpc", ("POST",), collective_rpc),
)
