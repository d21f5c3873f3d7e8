"""What the console shows: the engine's figures and requests now, and what happened besides answers.

Each of a server's processes has its own events and tenants; the one that is asked adds up all of them.
"""

import contextlib
import sqlite3
import time
from collections import Counter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.findings import Causes, server_findings
from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.route_tools import Endpoint, json_response, siblings_answers, state_of
from quire.entrypoints.http.siblings import OWN
from quire.entrypoints.scoring import check_scores
from quire.errors import CapacityError, EngineDeadError, RequestError
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.events import Event, EventKind, merge_events, merge_totals
from quire.metrics.history import EVERY_S, HOUR_S, Slot, merge_slots
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
        history: the last minutes in slots.
        first_words: how prompts began, by request, where the log may show them.
    """

    events: list[Event]
    event_totals: dict[EventKind, int]
    tenants: dict[str, TenantFigures]
    history: list[Slot]
    first_words: dict[str, str]

    @classmethod
    def of(cls, metrics: EngineMetrics, first_words: dict[str, str]) -> "Happenings":
        """Those of this process."""
        slots = metrics.history.slots()
        return cls(metrics.events.latest(), dict(metrics.events.totals), metrics.tenants.rows, slots, first_words)

    @classmethod
    def merge(cls, parts: "list[Happenings]") -> "Happenings":
        """Those of all processes."""
        tenants = TenantTable()
        for part in parts:
            tenants.add(part.tenants)
        events = merge_events(part.events for part in parts)
        words = {name: text for part in parts for name, text in part.first_words.items()}
        slots = merge_slots(part.history for part in parts)
        return cls(events, merge_totals(part.event_totals for part in parts), tenants.rows, slots, words)


async def console_state(request: Request) -> Response:
    """`GET /console/state`: figures, the last steps, live and finished requests, events; what they mean:
    docs/observability.md. While no core answers: `problem` says why, and there are events alone."""
    server = state_of(request)
    engine: Any = server.engine
    own = Happenings.of(engine.metrics, engine.first_words)
    if OWN in request.query_params:
        return json_response(own)
    decode = msgspec.json.Decoder(Happenings).decode
    others = [decode(answer) for answer in await siblings_answers(request, STATE)]
    shown: dict[str, Any] = {
        "model": server.model_names[0],
        "version": __version__,
        "history_every_s": EVERY_S,
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


async def console_abilities(request: Request) -> Response:
    """`GET /console/abilities`: what the page can offer: the tasks of a pooling model (none: it generates), whether pairs can be
    scored, and the media that prompts may have."""
    state = state_of(request)
    model, limits = state.engine.config.model, state.engine.config.multimodal
    media = [kind for kind in model.modalities if limits is None or limits.limit_of(kind) != 0]
    shown: dict[str, Any] = {"model": state.model_names[0], "tasks": [], "scores": False, "media": media}
    if model.pooling is not None:
        shown["tasks"] = list(model.pooling.tasks)
        with contextlib.suppress(RequestError):
            check_scores(model.pooling)
            shown["scores"] = True
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
    Endpoint("/console/abilities", console_abilities, "What the console's page can offer for this model.", _GET),
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


FINDINGS = "/console/findings"
_LOOKED_AT = 16
"""The latest requests whose timelines are read: each is compared with all that are remembered."""
_OF_THE_CORE = (
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "engine_restarts_total",
)
"""Counted alike by all of a server's processes."""


async def console_findings(request: Request) -> Response:
    """`GET /console/findings`: checks of the last hour, each with its state (fine, look, wrong), what was seen, what to do."""
    engine: Any = state_of(request).engine
    seconds, figures = engine.metrics.last_hour.gains()
    if OWN in request.query_params:
        return json_response(figures)
    for answer in await siblings_answers(request, FINDINGS):
        for name, value in msgspec.json.decode(answer, type=dict[str, float]).items():
            figures[name] = max(figures[name], value) if name in _OF_THE_CORE else figures[name] + value
    causes = None
    with contextlib.suppress(CapacityError, EngineDeadError):
        state = await engine.inspect()
        figures |= {
            "num_requests_running": state["running"],
            "num_requests_waiting": state["waiting"],
            "kv_cache_usage_perc": state["kv_usage"],
        }
        causes = await _causes(engine, state)
    found = [each._asdict() for each in server_findings(figures, causes)]
    return json_response({"seconds": round(seconds, 1), "findings": found})


async def _causes(engine: Any, state: dict[str, Any]) -> Causes:
    """Of the latest requests that have ended, and those that run."""
    stalls, misses, number = Counter[str](), Counter[str](), 0
    for row in [*state["requests"], *state["finished"]][:_LOOKED_AT]:
        timeline = await engine.timeline(row["id"])
        if timeline is None or timeline["arrived_ago_s"] > HOUR_S:
            continue
        number += 1
        for event in timeline["events"]:
            if event["kind"] == "stall":
                stalls[event["detail"]["cause"]] += event["detail"]["s"]
        prefix = timeline["prefix"]
        if prefix["why"] not in ("nothing left", "not looked up yet"):
            misses[prefix["why"]] += prefix["prompt_tokens"] - prefix["hit_tokens"]
    return Causes(number, stalls, misses)


CONSOLE_FINDINGS = (
    Endpoint(FINDINGS, console_findings, "What is wrong in the last hour, and which setting changes it.", ("GET",)),
)
