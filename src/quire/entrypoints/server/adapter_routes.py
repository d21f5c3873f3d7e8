"""Routes that load and unload adapters of a server that runs. An adapter is tried before it is served.

With several processes (`--api-server-count`) the one that is asked tells the others.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire import envs
from quire.adapters import LoRARequest, read_config
from quire.entrypoints.http.errors import HTTPError, bad_request
from quire.entrypoints.http.route_tools import Endpoint, read_request, state_of, tell_siblings
from quire.entrypoints.http.served_adapters import ServedAdapters
from quire.errors import ConfigError, RequestError


class LoadAdapter(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/load_lora_adapter`. `load_inplace` replaces an adapter that is served under this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None
    lora_int_id: int | None = None


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: int | None = None


def _served(request: Request) -> ServedAdapters:
    state = state_of(request)
    if state.engine.config.lora is None:
        raise bad_request("Adapters are off; start the server with --enable-lora.", code="adapters_off")
    if not envs.QUIRE_ALLOW_RUNTIME_LORA_UPDATING:
        message = "Adapters cannot be changed here; the operator allows it with QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1."
        raise HTTPError(403, message, code="not_allowed")
    return state.adapters


async def load_adapter(request: Request) -> Response:
    """`POST /v1/load_lora_adapter`: serve an adapter from a folder of the server's machine."""
    served, asked = _served(request), await read_request(request, LoadAdapter, queues=False)
    state = state_of(request)
    if asked.lora_name in state.model_names:
        raise bad_request("lora_name: the model has this name.", "lora_name", "adapter_exists")
    if asked.lora_int_id is not None:  # another process of this server has tried it
        served.add(LoRARequest(asked.lora_name, asked.lora_int_id, asked.lora_path, asked.base_model_name))
        return PlainTextResponse("added")
    adapter = served.make(asked.lora_name, asked.lora_path, asked.base_model_name, replaces=asked.load_inplace)
    try:
        read_config(adapter.lora_path)
        await state.engine.add_lora(adapter)
    except (ConfigError, RequestError) as error:
        raise bad_request(str(error), "lora_path", "bad_adapter") from error
    served.add(adapter)
    asked.lora_int_id, asked.load_inplace = adapter.lora_int_id, True
    await tell_siblings(request, asked)
    return PlainTextResponse(f"Success: LoRA adapter '{adapter.lora_name}' added successfully.")


async def unload_adapter(request: Request) -> Response:
    """`POST /v1/unload_lora_adapter`: serve an adapter no longer; requests that run go on."""
    served, asked = _served(request), await read_request(request, UnloadAdapter, queues=False)
    served.remove(asked.lora_name)
    await tell_siblings(request, asked)
    return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


ADAPTERS = (
    Endpoint(
        "/v1/load_lora_adapter",
        load_adapter,
        "Serve an adapter from a folder of the server's machine (QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1).",
    ),
    Endpoint("/v1/unload_lora_adapter", unload_adapter, "Serve an adapter no longer."),
)
