"""Adds the route `GET /spruce` to the server. It stands behind the same keys as all others.

An installed package opens no route by itself: the operator names the plugin, `QUIRE_PLUGINS=spruce quire serve`.
"""

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.http.route_tools import Endpoint, json_response
from quire.entrypoints.http.state import ServerState


def endpoints(state: ServerState) -> Sequence[Endpoint]:
    """The routes. `state.engine` is there once the server is ready."""

    async def hello(request: Request) -> Response:
        model = state.engine.config.model
        return json_response({"model": model.model, "tokens": model.max_model_len})

    return [Endpoint("/spruce", hello, "Says which model this is.", methods=("GET",))]
