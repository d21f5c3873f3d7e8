"""What Ollama's clients ask about models: which are served, what they can do; and the wishes that a server does not fulfil.

A server has its models from its operator: none comes, goes or changes by a request.
"""

import datetime
import hashlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.entrypoints.http.errors import HTTPError, bad_request
from quire.entrypoints.http.route_tools import json_response, read_bytes, state_of
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.ollama.conversion import served_name
from quire.entrypoints.ollama.protocol import (
    NDJSON,
    PROTOCOL_VERSION,
    ListedModel,
    Loaded,
    LoadedModel,
    ModelDetails,
    OllamaModel,
    Shown,
    Tags,
    at,
)
from quire.guards import is_dict
from quire.platforms import current_platform
from quire.version import __version__

_FOREVER = datetime.timedelta(days=365 * 100)
_WEIGHTS = (".safetensors", ".gguf", ".bin")


async def list_tags(request: Request) -> Response:
    """`GET /api/tags`."""
    state = state_of(request)
    return json_response(Tags([ListedModel(**_listed(state, name)) for name in _names(state)]))


async def list_loaded(request: Request) -> Response:
    """`GET /api/ps`: the same models, which stay as long as the server runs."""
    state = state_of(request)
    config = state.engine.config
    on_host = current_platform(config.device.device).capabilities().computes_on_host.value
    expires = at(datetime.datetime.now(datetime.UTC) + _FOREVER)
    rows = [_listed(state, name) for name in _names(state)]
    length = config.model.max_model_len
    loaded = [
        LoadedModel(**row, expires_at=expires, size_vram=0 if on_host else row["size"], context_length=length)
        for row in rows
    ]
    return json_response(Loaded(loaded))


async def show_version(request: Request) -> Response:
    """`GET /api/version`: of the protocol; `quire` is the server's own."""
    return json_response({"version": PROTOCOL_VERSION, "quire": __version__})


async def show_model(request: Request) -> Response:
    """`POST /api/show`."""
    state, _ = await _named(request)
    model = state.engine.config.model
    template = getattr(state.engine.get_tokenizer(), "chat_template", None)
    sampling = [f"{key} {value}" for key, value in model.default_sampling.items()]
    shown = Shown(
        modelfile=f"FROM {model.model}",
        parameters="\n".join(sampling),
        template=template if isinstance(template, str) else "",
        details=_details(state),
        model_info=_model_info(state),
        capabilities=_capabilities(state),
        modified_at=_modified(state),
    )
    return json_response(shown)


async def pull_model(request: Request) -> Response:
    """`POST /api/pull`: done at once for a model that is served; no other one is fetched."""
    try:
        await _named(request)
    except HTTPError as error:
        if error.status != 404:
            raise
        why = "This server fetches no models; `quire run MODEL` fetches and serves one."
        raise HTTPError(404, f"{error.detail.message} {why}", param="model", code="model_not_found") from None
    asked = state_of(request).decoder.decode(await read_bytes(request), OllamaModel)
    if asked.stream is False:
        return json_response({"status": "success"})
    lines = b"".join(msgspec.json.encode({"status": status}) + b"\n" for status in ("pulling manifest", "success"))
    return Response(lines, media_type=NDJSON.decode())


def refuse(what: str, instead: str) -> Callable[[Request], Awaitable[Response]]:
    """A route that says in clear words that it does nothing, and what does."""

    async def handler(request: Request) -> Response:
        raise bad_request(f"{what} by a request; {instead}.", code="not_supported")

    return handler


async def _named(request: Request) -> tuple[ServerState, str]:
    state = state_of(request)
    return state, served_name(state, state.decoder.decode(await read_bytes(request), OllamaModel))


def _names(state: ServerState) -> list[str]:
    return [*state.model_names, *(served.adapter.lora_name for served in state.adapters.listed())]


def _listed(state: ServerState, name: str) -> dict[str, Any]:
    model = state.engine.config.model
    commit = "" if model.hub is None else model.hub.listing.commit
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(state),
        "size": _size(Path(model.path)),
        "digest": hashlib.sha256(f"{name}@{commit or model.path}".encode()).hexdigest(),
        "details": _details(state),
    }


def unknown(name: str, since: int) -> ListedModel:
    """A model that has not been looked at yet."""
    digest, when = hashlib.sha256(name.encode()).hexdigest(), at(datetime.datetime.fromtimestamp(since, datetime.UTC))
    details = ModelDetails(format="safetensors", family="", families=[], quantization_level="")
    return ListedModel(name=name, model=name, modified_at=when, size=0, digest=digest, details=details)


def _modified(state: ServerState) -> str:
    try:
        changed = Path(state.engine.config.model.path).stat().st_mtime
    except OSError:
        changed = time.time() if not state.started_at else state.started_at
    return at(datetime.datetime.fromtimestamp(changed, datetime.UTC))


def _size(path: Path) -> int:
    """Bytes of the weights."""
    files = [path] if path.is_file() else [each for each in path.glob("*") if each.suffix in _WEIGHTS]
    return sum(file.stat().st_size for file in files if file.is_file())


def _details(state: ServerState) -> ModelDetails:
    model = state.engine.config.model
    family = str(model.hf_config.get("model_type") or model.architecture.lower())
    kind = "gguf" if model.path.endswith(".gguf") else "safetensors"
    return ModelDetails(format=kind, family=family, families=[family], quantization_level=_number_format(model))


def _number_format(model: Any) -> str:
    config: Any = model.hf_config.get("quantization_config")
    method = config.get("quant_method") if is_dict(config) or hasattr(config, "get") else None
    return str(model.quantization or method or model.dtype)


def _model_info(state: ServerState) -> dict[str, Any]:
    model = state.engine.config.model
    config, family = model.hf_text_config, _details(state).family
    named = {
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
    }
    known = {f"{family}.{name}": config.get(field) for name, field in named.items()}
    info = {"general.architecture": family, "general.basename": state.model_names[0]}
    info |= {f"{family}.context_length": model.max_model_len, f"{family}.vocab_size": model.vocab_size}
    return info | {name: value for name, value in known.items() if value is not None}


def _capabilities(state: ServerState) -> list[str]:
    model = state.engine.config.model
    if model.pooling is not None:
        return ["embedding"] if model.pooling.embeds else []
    formats = state.formats
    offered = {
        "completion": True,
        "tools": formats.tools is not None or formats.is_harmony,
        "thinking": formats.reasoning is not None or formats.is_harmony,
        "vision": "image" in model.modalities,
    }
    return [name for name, is_there in offered.items() if is_there]
