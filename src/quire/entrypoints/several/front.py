"""The routes before several models: each request goes to the server of its model, which is woken for it; lists tell all of them.

Knows which requests name a model. What they mean is the servers' own.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.entrypoints.http.backend_link import BackendGone, exchange
from quire.entrypoints.http.errors import HTTPError, bad_request, not_ready
from quire.entrypoints.http.route_tools import Endpoint, Handler, json_response, read_bytes
from quire.entrypoints.http.siblings import merge_metrics
from quire.entrypoints.http.streaming import run_beside
from quire.entrypoints.ollama import models as ollama_models
from quire.entrypoints.ollama.conversion import LATEST, is_unload
from quire.entrypoints.ollama.protocol import OllamaChat, now
from quire.entrypoints.ollama.routes import OLLAMA_MODELS
from quire.entrypoints.several.host import ModelHost
from quire.entrypoints.several.hosted_model import HostedModel
from quire.version import __version__

_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)')
_TEXTS = ("/api/chat", "/api/generate")
_WITHOUT_STEPS = frozenset(
    ("/api/show", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens")
)
_DROPPED = frozenset((b"x-request-id", b"content-length"))


class Named(msgspec.Struct):
    """What is read of a request here: its model, and whether it only says that the model may go."""

    model: Any = None
    name: Any = None
    messages: Any = None
    prompt: Any = None
    keep_alive: Any = None


class Relay(Response):
    """A request's answer, which comes from its model's server as it is made."""

    def __init__(self, host: ModelHost, model: HostedModel, request: Request, body: bytes) -> None:
        super().__init__()
        self._host, self._model, self._request, self._body = host, model, request, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_beside(receive, self._relay(scope, send))

    async def _relay(self, scope: Scope, send: Send) -> None:
        kept = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        headers = [*kept, (b"x-request-id", str(scope["state"]["request_id"]).encode())]
        query = f"?{self._request.url.query}" if self._request.url.query else ""
        path, begun = f"{self._request.url.path}{query}", False
        try:
            async with (
                self._used(scope["path"]),
                exchange(self._model.target, scope["method"], path, headers, self._body) as answer,
            ):
                told = [(name, value) for name, value in answer.headers if name not in _DROPPED]
                await send({"type": "http.response.start", "status": answer.status, "headers": told})
                begun = True
                async with contextlib.aclosing(answer.body()) as parts:
                    async for part in parts:
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except BackendGone as error:
            if begun:
                raise  # the connection ends within the answer, which is what happened
            raise not_ready(f"{self._model.name!r} has not answered: {error}.") from None

    def _used(self, path: str) -> contextlib.AbstractAsyncContextManager[None]:
        """While its model is needed: what computes nothing a server that sleeps can answer, too."""
        asleep = self._model.state == "asleep" and path in _WITHOUT_STEPS
        return contextlib.nullcontext() if asleep else self._host.using(self._model)


class Front:
    """The handlers before some models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._began = int(time.time())

    async def work(self, request: Request) -> Response:
        """Any request whose body names its model."""
        body = await read_bytes(request)
        named = _of_form(body) if "multipart/" in request.headers.get("content-type", "") else _named(body)
        model = self._find(named.model or named.name)
        path, asks = request.url.path, named.messages or named.prompt
        if path in _TEXTS and not asks and is_unload(OllamaChat(keep_alive=named.keep_alive)):
            await self._host.put_to_sleep(model)
            return json_response(_unloaded(model.name, path))
        return Relay(self._host, model, request, body)

    def _find(self, name: Any) -> HostedModel:
        found = self._host.find(name) if name is None or isinstance(name, str) else None
        if found is None and isinstance(name, str) and name.endswith(LATEST):
            found = self._host.find(name.removesuffix(LATEST))
        if found is None:
            served = ", ".join(model.name for model in self._host.models[:20])
            message = f"model: {str(name)[:200]!r} is not served here; served: {served}."
            raise HTTPError(404, message, param="model", code="model_not_found")
        return found

    async def list_models(self, request: Request) -> Response:
        """`GET /v1/models`: those of all servers; a model without a process as far as it is known."""
        answers = await asyncio.gather(*(model.ask("/v1/models") for model in self._host.models))
        cards: list[Any] = []
        for model, answer in zip(self._host.models, answers, strict=True):
            cards += self._cards(model) if answer is None else json.loads(answer)["data"]
        return json_response({"object": "list", "data": cards})

    async def get_model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`."""
        name = request.path_params["model"]
        model = self._find(name)
        answer = await model.ask(f"/v1/models/{name}")
        return json_response(self._cards(model)[0] | {"id": name} if answer is None else json.loads(answer))

    def _cards(self, model: HostedModel) -> list[dict[str, Any]]:
        limit = None if model.measured is None else model.measured.max_model_len
        card = {"object": "model", "created": self._began, "owned_by": "quire", "root": model.entry.model}
        return [{"id": name, **card, "parent": None, "max_model_len": limit} for name in model.entry.names]

    async def list_tags(self, request: Request) -> Response:
        """`GET /api/tags`: all models."""
        return json_response({"models": await self._tags("/api/tags", with_others=True)})

    async def list_awake(self, request: Request) -> Response:
        """`GET /api/ps`: those that are awake."""
        return json_response({"models": await self._tags("/api/ps", with_others=False)})

    async def _tags(self, path: str, *, with_others: bool) -> list[Any]:
        asked = [model for model in self._host.models if with_others or model.state == "awake"]
        answers = await asyncio.gather(*(model.ask(path) for model in asked))
        rows: list[Any] = []
        for model, answer in zip(asked, answers, strict=True):
            if answer is not None:
                rows += json.loads(answer)["models"]
            elif with_others:
                rows += [ollama_models.unknown(name, self._began) for name in model.entry.names]
        return rows

    async def pull(self, request: Request) -> Response:
        """`POST /api/pull`: done at once for a model of the file."""
        named = _named(await read_bytes(request))
        self._find(named.model or named.name)
        return json_response({"status": "success"})

    async def states(self, request: Request) -> Response:
        """`GET /models`: how each model stands."""
        return json_response({"models": [model.describe() for model in self._host.models]})

    async def alive(self, request: Request) -> Response:
        """`GET /health`, `/live`, `/ready`, `/ping`: this process answers; one dead model harms no other."""
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: those of all servers."""
        answers = await asyncio.gather(*(model.ask("/metrics") for model in self._host.models))
        own, *others = [answer for answer in answers if answer is not None] or [b""]
        return Response(merge_metrics(own, others) if own else b"", media_type="text/plain; version=0.0.4")


def _named(body: bytes) -> Named:
    try:
        return msgspec.json.decode(body, type=Named)
    except msgspec.MsgspecError as error:
        raise bad_request(f"The request body is not a JSON object: {error}.", code="invalid_json") from None


def _of_form(body: bytes) -> Named:
    """What a form with a file says of its model."""
    found = _FORM_MODEL.search(body)
    return Named(model=None if found is None else found[1].decode("utf-8", "replace"))


def _unloaded(name: str, path: str) -> dict[str, Any]:
    said: dict[str, Any] = (
        {"response": ""} if path == "/api/generate" else {"message": {"role": "assistant", "content": ""}}
    )
    return {"model": name, "created_at": now(), **said, "done": True, "done_reason": "unload"}


def front_endpoints(front: Front, work_paths: Sequence[str]) -> list[Endpoint]:
    """The table of routes: work goes to its model's server, the rest is answered here."""
    get = ("GET",)
    refused = [each for each in OLLAMA_MODELS if not each.about and each.path != "/api/pull"]
    work: Handler = front.work
    own: dict[str, Handler] = {
        "/v1/models": front.list_models,
        "/v1/models/{model:path}": front.get_model,
        "/api/tags": front.list_tags,
        "/api/ps": front.list_awake,
        "/api/version": ollama_models.show_version,
        "/models": front.states,
        "/version": front.version,
        "/metrics": front.metrics,
        **dict.fromkeys(("/health", "/live", "/ready", "/ping"), front.alive),
    }
    return [
        *(Endpoint(path, work) for path in (*work_paths, "/api/show")),
        *(Endpoint(path, handler, methods=get) for path, handler in own.items()),
        Endpoint("/api/pull", front.pull),
        *refused,
    ]
