"""`/v1/realtime`: the WebSocket behind which a session lives."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.route_tools import Endpoint
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.realtime.session import RealtimeSession

PATH, PROTOCOL = "/v1/realtime", "realtime"
MAX_MESSAGE_BYTES = 32 << 20
"""Of one event; a client that sends a longer one is cut off."""


async def _realtime(socket: WebSocket) -> None:
    state: ServerState = socket.app.state.server
    state.accept_work(queues=False)
    await state.look_for_model(socket.query_params.get("model"))
    model = state.resolve_model(socket.query_params.get("model"))

    async def tell(event: bytes) -> None:
        await socket.send_text(event.decode())

    session = RealtimeSession(state, model, socket.query_params.get("intent") == "transcription", tell)
    await socket.accept(PROTOCOL if PROTOCOL in socket.scope["subprotocols"] else None)
    try:
        await session.open()
        while (message := await socket.receive())["type"] == "websocket.receive":
            await session.take(message.get("bytes") or (message.get("text") or "").encode())
    except WebSocketDisconnect:
        pass
    finally:
        await session.close()


async def _without_upgrade(request: Request) -> Response:
    headers = {"upgrade": "websocket", "connection": "upgrade"}
    raise HTTPError(426, f"{request.url.path} is a WebSocket.", code="upgrade_required", headers=headers)


SOCKETS = (WebSocketRoute(PATH, _realtime),)
REALTIME = (Endpoint(PATH, _without_upgrade, methods=("GET",)),)
