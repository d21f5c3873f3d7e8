"""Routes that reach into the engine, with `QUIRE_SERVER_DEV_MODE=1` only: pauses, memory given back, requests ended, workers
called, what was chosen.

Knows the engine's verbs. Who may reach these routes can do anything with the engine: they belong in no open network.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.pausing import PAUSE_MODES
from quire.entrypoints.openai.errors import bad_field
from quire.entrypoints.openai.route_tools import Handler, flag_of, json_response, read_request, state_of

_LEVELS = ("0", "1", "2")
_TAGS = ("weights", "kv_cache", "scheduling")


class RemoteCall(msgspec.Struct, kw_only=True):
    """Body of `POST /collective_rpc`."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class AbortRequests(msgspec.Struct, kw_only=True):
    """Body of `POST /abort_requests`."""

    request_ids: list[str]


async def sleep(request: Request) -> Response:
    """`POST /sleep?level=1&mode=abort`: give memory back (0: none; 2: the weights are forgotten) until `/wake_up`."""
    level = _one_of(request, "level", _LEVELS, "1")
    await _engine(request).sleep(int(level), _mode(request))
    return Response(status_code=200)


async def pause(request: Request) -> Response:
    """`POST /pause?mode=abort&clear_cache=true`: schedule nothing until `/resume`. What runs is ended (`abort`), ends first
    (`wait`), or stands still (`keep`); new requests wait."""
    await _engine(request).pause_generation(mode=_mode(request), clear_cache=flag_of(request, "clear_cache", True))
    return json_response({"status": "paused"})


async def resume(request: Request) -> Response:
    """`POST /resume`: schedule again."""
    await _engine(request).resume_generation()
    return json_response({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """`GET /is_paused`."""
    return json_response({"is_paused": await _engine(request).is_paused()})


async def abort_requests(request: Request) -> Response:
    """`POST /abort_requests`: end requests, named by their ids or their answers'; unknown ones are passed over."""
    body = await read_request(request, AbortRequests)
    return json_response({"num_aborted": await _engine(request).abort_named(body.request_ids)})


async def release_kv_cache_memory(request: Request) -> Response:
    """`POST /release_kv_cache_memory`: give the KV cache's memory back until `/wake_up?tags=kv_cache`; what runs stands still."""
    await _engine(request).release_kv_cache_memory()
    return Response(status_code=200)


async def get_world_size(request: Request) -> Response:
    """`GET /get_world_size`: devices that the model is spread over."""
    return json_response({"world_size": _engine(request).config.parallel.world_size})


def _mode(request: Request) -> str:
    return _one_of(request, "mode", PAUSE_MODES, "abort")


def _one_of(request: Request, name: str, allowed: tuple[str, ...], default: str) -> str:
    value = request.query_params.get(name, default)
    if value not in allowed:
        raise bad_field(name, f"{value[:20]!r} is not one of {', '.join(allowed)}.")
    return value


async def wake_up(request: Request) -> Response:
    """`POST /wake_up?tags=weights&tags=kv_cache&tags=scheduling`: undo `/sleep`; without tags, all of it."""
    tags = request.query_params.getlist("tags")
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        raise bad_field("tags", f"{unknown[0][:40]!r} is not one of {', '.join(_TAGS)}.")
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
    ("/pause", ("POST",), pause),
    ("/resume", ("POST",), resume),
    ("/is_paused", ("GET",), is_paused),
    ("/abort_requests", ("POST",), abort_requests),
    ("/release_kv_cache_memory", ("POST",), release_kv_cache_memory),
    ("/get_world_size", ("GET",), get_world_size),
    ("/server_info", ("GET",), server_info),
    ("/collective_rpc", ("POST",), collective_rpc),
)
