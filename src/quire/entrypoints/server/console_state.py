"""What the console shows: the engine's figures and requests now, and what happened besides answers.

Each of a server's processes has its own events and tenants; the one that is asked adds up all of them.
"""

import contextlib
import sqlite3
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.route_tools import Endpoint, json_response, siblings_answers, state_of
from quire.entrypoints.http.siblings import OWN
from quire.errors import CapacityError, EngineDeadError
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.events import Event, EventKind, merge_events, merge_totals
from quire.metrics.tenants import TenantFigures, TenantTable
from quire.version import __version__

STATE = "/console/state"
MOST_BATCHES = 10


class Happenings(msgspec.Struct):
    """What happened besides answers.

    Attributes:
        events: the last ones, oldest first.
        event_totals: how many there were of each kind.
        tenants: each tenant's requests and tokens.
    """

    events: list[Event]
    event_totals: dict[EventKind, int]
    tenants: dict[str, TenantFigures]

    @classmethod
    def of(cls, metrics: EngineMetrics) -> "Happenings":
        """Those of this process."""
        return cls(metrics.events.latest(), dict(metrics.events.totals), metrics.tenants.rows)

    @classmethod
    def merge(cls, parts: "list[Happenings]") -> "Happenings":
        """Those of all processes."""
        tenants = TenantTable()
        for part in parts:
            tenants.add(part.tenants)
        events = merge_events(part.events for part in parts)
        return cls(events, merge_totals(part.event_totals for part in parts), tenants.rows)


async def console_state(request: Request) -> Response:
    """`GET /console/state`: figures, the last steps, live and finished requests, events; what they mean:
    docs/observability.md. While no core answers: `problem` says why, and there are events alone."""
    server = state_of(request)
    engine: Any = server.engine
    own = Happenings.of(engine.metrics)
    if OWN in request.query_params:
        return json_response(own)
    decode = msgspec.json.Decoder(Happenings).decode
    others = [decode(answer) for answer in await siblings_answers(request, STATE)]
    shown: dict[str, Any] = {
        "model": server.model_names[0],
        "version": __version__,
        "uptime_s": round(time.time() - server.started_at, 1),
        **msgspec.structs.asdict(Happenings.merge([own, *others])),
    }
    if server.batches is not None:
        with contextlib.suppress(sqlite3.Error, OSError):
            shown["batches"], _ = await server.batches.store.page(None, MOST_BATCHES)
    try:
        shown |= await engine.inspect()
    except (CapacityError, EngineDeadError) as error:
        shown["problem"] = str(error)
    return json_response(shown)


async def console_request(request: Request) -> Response:
    """`GET /console/requests/{id}`: what happened to a request; the id is the answer's, or the `X-Request-Id`."""
    wanted: str = request.path_params["id"]
    engine: Any = state_of(request).engine
    found = await engine.timeline(wanted)
    if found is None:
        message = f"No request {wanted[:200]!r} is remembered: timelines of the last few hundred requests are kept."
        raise HTTPError(404, message, param="id", code="request_not_found")
    return json_response(found)


_GET = ("GET",)
CONSOLE = (
    Endpoint(
        STATE,
        console_state,
        "What the engine does now: figures, the last steps, live and finished requests, events, tenants.",
        _GET,
    ),
    Endpoint(
        "/console/requests/{id:path}",
        console_request,
        "What happened to a request, by the id of its answer or its X-Request-Id.",
        _GET,
    ),
)
