"""What the console shows, as JSON for whoever looks: the engine's state now, and one request's timeline.

Asks the engine core when it is asked; knows nothing of pages in a browser.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.openai.errors import HTTPError
from quire.entrypoints.openai.route_tools import Handler, json_response, state_of
from quire.version import __version__


async def console_state(request: Request) -> Response:
    """`GET /console/state`: figures, the last steps, live and finished requests; what they mean: docs/observability.md."""
    server = state_of(request)
    engine: Any = server.engine
    shown: dict[str, Any] = {
        "model": server.model_names[0],
        "version": __version__,
        "uptime_s": round(time.time() - server.started_at, 1),
        **await engine.inspect(),
    }
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


CONSOLE_DATA: tuple[tuple[str, tuple[str, ...], Handler], ...] = (
    ("/console/state", ("GET",), console_state),
    ("/console/requests/{id:path}", ("GET",), console_request),
)
