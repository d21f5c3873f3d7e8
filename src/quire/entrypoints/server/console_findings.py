"""What a server finds in its last hour: figures, where requests waited, why prompts were not in the prefix cache, what to set."""

import contextlib
from collections import Counter
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.findings import Causes, server_findings
from quire.entrypoints.http.route_tools import Endpoint, json_response, siblings_answers, state_of
from quire.entrypoints.http.siblings import OWN
from quire.errors import CapacityError, EngineDeadError
from quire.metrics.last_hour import HOUR_S

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
