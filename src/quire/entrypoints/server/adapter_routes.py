"""Routes that load and unload adapters of a server that runs. An adapter is tried before it is served.

With several processes (`--api-server-count`) the one that is asked tells the others.
"""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire import envs
from quire.adapters import LoRARequest, check_path
from quire.config.hub import find_adapter
from quire.entrypoints.http.errors import HTTPError, bad_request
from quire.entrypoints.http.route_tools import Endpoint, read_request, state_of, tell_siblings
from quire.entrypoints.http.siblings import OWN
from quire.entrypoints.http.state import LOAD_ADAPTER, ServerState
from quire.errors import ConfigError, RequestError


class LoadAdapter(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`. `load_inplace` replaces an adapter that is served under this name;
    `is_3d_lora_weight` is accepted for compatibility. Processes of one server say `lora_int_id` and `root`."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    lora_int_id: int | None = None
    is_3d_lora_weight: bool = False
    root: str = ""


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def _open_state(request: Request) -> ServerState:
    """The server's state. Raises HTTPError: adapters are off, or may not be changed."""
    state = state_of(request)
    if state.engine.config.lora is None:
        raise bad_request("Adapters are off; start the server with --enable-lora.", code="adapters_off")
    if not envs.QUIRE_ALLOW_RUNTIME_LORA_UPDATING:
        message = "Adapters cannot be changed here; the operator allows it with QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1."
        raise HTTPError(403, message, code="not_allowed")
    return state


async def load_adapter(request: Request) -> Response:
    """`POST /v1/load_lora_adapter`: serve an adapter from a folder of the server's machine, or from a hub."""
    state, asked = _open_state(request), await read_request(request, LoadAdapter, queues=False)
    served = state.adapters
    if not asked.lora_name or not asked.lora_path:
        raise bad_request("Both 'lora_name' and 'lora_path' must be given.", "lora_name")
    if asked.lora_name in state.model_names:
        raise bad_request("lora_name: the model has this name.", "lora_name", "adapter_exists")
    if asked.lora_int_id is not None and OWN in request.query_params:  # another process of this server has tried it
        adapter = LoRARequest(asked.lora_name, asked.lora_int_id, asked.lora_path, asked.base_model_name)
        served.add(adapter, asked.root)
        return PlainTextResponse("added")
    before = served.find(asked.lora_name)
    adapter = await _try(state, asked)
    await state.tell_of_adapter(served.add(adapter, asked.lora_path))
    if before is not None:
        await state.engine.remove_lora(before.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.lora_name}' added successfully.")


async def _try(state: ServerState, asked: LoadAdapter) -> LoRARequest:
    """The adapter, loaded. Raises HTTPError: its name is taken, there is none (404), or it cannot be used (400)."""
    state.adapters.make(asked.lora_name, asked.lora_path, asked.base_model_name, replaces=asked.load_inplace)
    try:
        folder = await asyncio.to_thread(find_adapter, asked.lora_path, state.hub)
        check_path(folder)
    except ConfigError as error:
        raise HTTPError(404, f"{error}.", param="lora_path", code="adapter_not_found") from error
    adapter = state.adapters.make(asked.lora_name, folder, asked.base_model_name, replaces=asked.load_inplace)
    try:
        await state.engine.add_lora(adapter)
    except RequestError as error:
        raise bad_request(str(error), "lora_path", "bad_adapter") from error
    return adapter


async def unload_adapter(request: Request) -> Response:
    """`POST /v1/unload_lora_adapter`: serve an adapter no longer; requests that run go on."""
    state, asked = _open_state(request), await read_request(request, UnloadAdapter, queues=False)
    if not asked.lora_name:
        raise bad_request("'lora_name' must be given.", "lora_name")
    adapter = state.adapters.remove(asked.lora_name)
    await tell_siblings(request, asked)
    if OWN not in request.query_params:
        await state.engine.remove_lora(adapter.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


ADAPTERS = (
    Endpoint(
        LOAD_ADAPTER,
        load_adapter,
        "Serve an adapter from a folder of the server's machine, or a hub (QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1).",
    ),
    Endpoint("/v1/unload_lora_adapter", unload_adapter, "Serve an adapter no longer."),
)
