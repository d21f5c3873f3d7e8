"""The routes of those who run a server: what is served, whether it lives, what it counts and forgets.

With `QUIRE_SERVER_DEV_MODE=1` also those that reach into the engine: a client that reaches them can do anything with it, so
keep them off open networks.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.pausing import PAUSE_MODES
from quire.entrypoints.anthropic.protocol import ModelInfo, ModelPage
from quire.entrypoints.batches.routes import FILES_AND_BATCHES
from quire.entrypoints.http.errors import bad_request, not_ready, one_of
from quire.entrypoints.http.route_tools import (
    Endpoint,
    Handler,
    flag_of,
    json_response,
    read_bytes,
    read_request,
    siblings_answers,
    state_of,
)
from quire.entrypoints.http.siblings import merge_metrics
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.ollama.routes import OLLAMA_MODELS
from quire.entrypoints.openai.prompts import require_tokenizer
from quire.entrypoints.openai.protocol import ModelCard, ModelList
from quire.entrypoints.responses.handlers import KEPT
from quire.entrypoints.server.adapter_routes import ADAPTERS
from quire.entrypoints.server.console_state import CONSOLE, CONSOLE_FINDINGS
from quire.errors import EngineDeadError
from quire.patch import describe as describe_patches
from quire.version import __version__


def _model_cards(state: ServerState) -> list[ModelCard]:
    config, names = state.engine.config.model, state.model_names
    limit = config.max_model_len
    models = [ModelCard(id=name, created=state.started_at, root=config.model, max_model_len=limit) for name in names]
    return models + [
        ModelCard(
            id=served.adapter.lora_name,
            created=served.created,
            root=served.root,
            parent=served.adapter.base_model_name or names[0],
            max_model_len=limit,
        )
        for served in state.adapters.listed()
    ]


def _model_info(card: ModelCard) -> ModelInfo:
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(card.created))
    limit = card.max_model_len
    return ModelInfo(id=card.id, display_name=card.id, created_at=created_at, max_input_tokens=limit, max_tokens=limit)


def _wants_anthropics(request: Request) -> bool:
    """Whether the client speaks Anthropic's protocol, which has this path, too."""
    return "anthropic-version" in request.headers


async def list_models(request: Request) -> Response:
    """`GET /v1/models`."""
    cards = _model_cards(state_of(request))
    if _wants_anthropics(request):
        infos = [_model_info(card) for card in cards]
        return json_response(ModelPage(data=infos, first_id=infos[0].id, last_id=infos[-1].id))
    return json_response(ModelList(cards))


async def get_model(request: Request) -> Response:
    """`GET /v1/models/{model}`; a name may hold slashes."""
    state = state_of(request)
    name = state.resolve_model(request.path_params["model"])
    card = next(card for card in _model_cards(state) if card.id == name)
    return json_response(_model_info(card) if _wants_anthropics(request) else card)


async def health(request: Request) -> Response:
    """`GET /health`: 200 while the engine lives and makes progress; else 503 with the reason."""
    engine = state_of(request).engine
    try:
        await engine.check_health()
    except EngineDeadError as error:
        raise not_ready(f"The engine is not running: {error}.") from None
    return Response(status_code=200)


async def live(request: Request) -> Response:
    """`GET /live`: 200 unless the engine has died for good; also while it is starting, for the first time or again."""
    engine = state_of(request).engine_or_none
    if engine is not None and engine.errored:
        raise not_ready("The engine is not running.")
    return Response(status_code=200)


async def ready(request: Request) -> Response:
    """`GET /ready`: 200 while new requests are welcome; also while the queue is full, which lasts for moments."""
    state_of(request).accept_work(queues=False)
    return Response(status_code=200)


async def version(request: Request) -> Response:
    """`GET /version`: and what installed packages change in it."""
    return json_response({"version": __version__, **describe_patches()})


async def load(request: Request) -> Response:
    """`GET /load`: requests in flight."""
    others = await siblings_answers(request, "/load")
    total = state_of(request).in_flight + sum(msgspec.json.decode(answer)["server_load"] for answer in others)
    return json_response({"server_load": total})


async def metrics(request: Request) -> Response:
    """`GET /metrics`: Prometheus' text format."""
    registry = state_of(request).metrics
    if registry is None:
        raise not_ready("The engine is starting; there are no metrics yet.")
    body, content_type = registry.exposition()
    if others := await siblings_answers(request, "/metrics"):
        body = merge_metrics(body, others)
    return Response(body, headers={"content-type": content_type})


async def reset_prefix_cache(request: Request) -> Response:
    """`POST /reset_prefix_cache`: forget every cached prefix. Running requests keep their pages, or compute them again with
    `?reset_running_requests=true`."""
    state = state_of(request)
    state.accept_work(queues=False)
    running = flag_of(request, "reset_running_requests", False)
    return json_response({"success": await state.engine.reset_prefix_cache(running)})


async def tokenizer_info(request: Request) -> Response:
    """`GET /tokenizer_info`: what the tokenizer is, and its chat template."""
    state = state_of(request)
    tokenizer: Any = require_tokenizer(state.engine.get_tokenizer(), "tokenizer")
    config = state.engine.config.model
    info: dict[str, Any] = {
        "tokenizer_class": type(tokenizer).__name__,
        "name_or_path": config.tokenizer,
        "vocab_size": len(tokenizer),
        "model_max_length": config.max_model_len,
        **tokenizer.special_tokens,
        "additional_special_tokens": list(tokenizer.additional_special_tokens),
        "added_tokens": dict(sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])),
        "chat_template": tokenizer.chat_template,
    }
    return json_response(info)


class ProfileRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /start_profile`, which may be empty."""

    profile_prefix: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{0,64}$")] = ""
    delay_iterations: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_iterations: Annotated[int, msgspec.Meta(ge=0)] | None = None


async def start_profile(request: Request) -> Response:
    """`POST /start_profile`: profile the workers' steps from now on."""
    engine = _profiled_engine(request)
    body = await read_bytes(request)
    asked = state_of(request).decoder.decode(body, ProfileRequest) if body else ProfileRequest()
    await engine.start_profile(
        asked.profile_prefix, delay_iterations=asked.delay_iterations, max_iterations=asked.max_iterations
    )
    return json_response({"success": True})


async def stop_profile(request: Request) -> Response:
    """`POST /stop_profile`: end the profile; tells the files that were written, on the server's machine."""
    return json_response({"success": True, "files": await _profiled_engine(request).stop_profile()})


def _profiled_engine(request: Request) -> Any:
    engine = state_of(request).engine
    if engine.config.observability.profiler is None:
        setting = '{"profiler": "torch", "torch_profiler_dir": FOLDER}'
        message = f"Profiles are off; start the server with --profiler-config '{setting}'."
        raise bad_request(message, "profiler_config", "profiler_off")
    return engine


_GET = ("GET",)
OPERATIONS = (
    Endpoint("/v1/models", list_models, "The served models.", _GET, answer=ModelList),
    Endpoint("/v1/models/{model:path}", get_model, "One served model.", _GET, answer=ModelCard),
    *OLLAMA_MODELS,
    *KEPT,
    *FILES_AND_BATCHES,
    Endpoint("/health", health, "200 while the engine lives and makes progress; needs no key.", _GET),
    Endpoint("/live", live, "200 unless the engine has died, also while it starts; needs no key.", _GET),
    Endpoint("/ready", ready, "200 while new requests are welcome.", _GET),
    Endpoint("/ping", health, "The same as /health, under another name.", ("GET", "POST")),
    Endpoint("/version", version, "The server's version.", _GET),
    Endpoint("/load", load, "Requests in flight.", _GET),
    Endpoint("/metrics", metrics, "Prometheus metrics.", _GET),
    Endpoint("/tokenizer_info", tokenizer_info, "What the tokenizer is, and its chat template.", _GET),
    Endpoint("/reset_prefix_cache", reset_prefix_cache, "Forget every cached prefix."),
    Endpoint(
        "/start_profile",
        start_profile,
        "Profile the workers' steps from now on, as --profiler-config says; 400 without it.",
    ),
    Endpoint("/stop_profile", stop_profile, "End the profile; tells the files that were written."),
    *ADAPTERS,
    *CONSOLE,
    *CONSOLE_FINDINGS,
)


StructT = TypeVar("StructT", bound=msgspec.Struct)

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


class InitTransfer(msgspec.Struct, kw_only=True):
    """Body of `POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any]


class UpdateWeights(msgspec.Struct, kw_only=True):
    """Body of `POST /update_weights`."""

    update_info: dict[str, Any]


class ReloadWeights(msgspec.Struct, kw_only=True):
    """Body of `POST /reload_weights`, which may be empty."""

    weights_path: str | None = None
    weight_version: str | None = None


class FinishUpdate(msgspec.Struct, kw_only=True):
    """Body of `POST /finish_weight_update`, which may be empty."""

    weight_version: str | None = None


class NewVersion(msgspec.Struct, kw_only=True):
    """Body of `POST /update_weight_version`."""

    weight_version: str


async def sleep(request: Request) -> Response:
    """`POST /sleep?level=1&mode=abort`: give memory back (0: none; 2: the weights are forgotten) until `/wake_up`."""
    level = one_of(request.query_params.get("level", "1"), _LEVELS, "level")
    await _engine(request).sleep(int(level), _mode(request))
    return Response(status_code=200)


async def pause(request: Request) -> Response:
    """`POST /pause?mode=abort&clear_cache=true`: schedule nothing until `/resume`. What runs is ended (`abort`), ends first
    (`wait`), or is frozen (`keep`); new requests wait."""
    await _engine(request).pause_generation(mode=_mode(request), clear_cache=flag_of(request, "clear_cache", True))
    return json_response({"status": "paused"})


async def abort_requests(request: Request) -> Response:
    """`POST /abort_requests`: end requests, named by their ids or their answers'; unknown ones are passed over."""
    body = await read_request(request, AbortRequests, queues=False)
    return json_response({"num_aborted": await _engine(request).abort_named(body.request_ids)})


def _mode(request: Request) -> str:
    return one_of(request.query_params.get("mode", "abort"), PAUSE_MODES, "mode")


async def wake_up(request: Request) -> Response:
    """`POST /wake_up?tags=weights&tags=kv_cache&tags=scheduling`: undo `/sleep`; without tags, all of it."""
    tags = [one_of(tag, _TAGS, "tags") for tag in request.query_params.getlist("tags")]
    await _engine(request).wake_up(tags or None)
    return Response(status_code=200)


async def collective_rpc(request: Request) -> Response:
    """`POST /collective_rpc`: call a method of every worker; what is not JSON in the results comes as text."""
    call = await read_request(request, RemoteCall, queues=False)
    results = await _engine(request).collective_rpc(call.method, call.timeout, call.args, call.kwargs)
    return Response(msgspec.json.encode({"results": results}, enc_hook=str), media_type="application/json")


def _engine(request: Request) -> Any:
    return state_of(request).engine


def _changes_weights(
    kind: type[StructT], change: Callable[[Any, StructT], Awaitable[None]], *, may_be_empty: bool = False
) -> Handler:
    """A route that changes weights; it tells which there are afterwards."""

    async def handler(request: Request) -> Response:
        body = await read_bytes(request)
        asked = kind() if may_be_empty and not body else state_of(request).decoder.decode(body, kind)
        await change(_engine(request), asked)
        return json_response(await _engine(request).weight_info())

    return handler


def _asks(ask: Callable[[Any], Awaitable[Any]]) -> Handler:
    """A route that calls a verb of the engine and tells what it gives, if anything."""

    async def handler(request: Request) -> Response:
        answer = await ask(_engine(request))
        return Response(status_code=200) if answer is None else json_response(answer)

    return handler


async def _resume(engine: Any) -> dict[str, str]:
    await engine.resume_generation()
    return {"status": "resumed"}


async def _world_size(engine: Any) -> dict[str, int]:
    """Devices that the model is spread over."""
    return {"world_size": engine.config.parallel.world_size}


async def _fact(name: str, value: Awaitable[Any]) -> dict[str, Any]:
    return {name: await value}


DEV_ROUTES = (
    Endpoint("/sleep", sleep),
    Endpoint("/wake_up", wake_up),
    Endpoint("/is_sleeping", _asks(lambda engine: _fact("is_sleeping", engine.is_sleeping())), methods=_GET),
    Endpoint("/pause", pause),
    Endpoint("/resume", _asks(_resume)),
    Endpoint("/is_paused", _asks(lambda engine: _fact("is_paused", engine.is_paused())), methods=_GET),
    Endpoint("/abort_requests", abort_requests),
    # the KV cache's memory is given back until `/wake_up?tags=kv_cache`; running requests are frozen
    Endpoint("/release_kv_cache_memory", _asks(lambda engine: engine.release_kv_cache_memory())),
    Endpoint("/get_world_size", _asks(_world_size), methods=_GET),
    Endpoint("/server_info", _asks(lambda engine: engine.explain()), methods=_GET),
    Endpoint("/collective_rpc", collective_rpc),
    Endpoint(
        "/init_weight_transfer_engine",
        _changes_weights(InitTransfer, lambda engine, asked: engine.init_weight_transfer_engine(asked.init_info)),
    ),
    Endpoint("/shutdown_weight_transfer_engine", _asks(lambda engine: engine.shutdown_weight_transfer_engine())),
    Endpoint("/start_weight_update", _asks(lambda engine: engine.start_weight_update())),
    Endpoint(
        "/update_weights",
        _changes_weights(UpdateWeights, lambda engine, asked: engine.update_weights(asked.update_info)),
    ),
    Endpoint(
        "/finish_weight_update",
        _changes_weights(
            FinishUpdate, lambda engine, asked: engine.finish_weight_update(asked.weight_version), may_be_empty=True
        ),
    ),
    Endpoint(
        "/reload_weights",
        _changes_weights(
            ReloadWeights,
            lambda engine, asked: engine.reload_weights(asked.weights_path, weight_version=asked.weight_version),
            may_be_empty=True,
        ),
    ),
    Endpoint(
        "/update_weight_version",
        _changes_weights(NewVersion, lambda engine, asked: engine.update_weight_version(asked.weight_version)),
    ),
    Endpoint("/weight_info", _asks(lambda engine: engine.weight_info()), methods=_GET),
)
CLOSED_PATHS = frozenset(endpoint.path for endpoint in (*OPERATIONS, *DEV_ROUTES))
"""What a line of a batch may not ask for."""
