"""The adapters that a server offers under names of their own, and how one is found that a client names and nobody knows yet.

Resolvers are asked once for all who wait. Nothing else waits: they are asked beside the event loop's other work, and an adapter
is loaded beside the steps. Knows names and folders; whether an adapter can be used is found out by the engine.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.adapters import LoRARequest, check_path
from quire.config.hub import find_adapter
from quire.config.hub.listing import HubSettings
from quire.entrypoints.http.errors import HTTPError, bad_field, bad_request
from quire.errors import ConfigError, RequestError
from quire.logger import init_logger
from quire.lora.resolver import LoRAResolver

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM


class Served(NamedTuple):
    """An adapter that is served. `created`: since when, in seconds of the epoch. `root`: its folder or hub id, as given."""

    adapter: LoRARequest
    created: int
    root: str


class ServedAdapters:
    """Adapters by name.

    Args:
        modules: those that the operator named at the start: `name`, `path` and perhaps `base_model_name`.
        hub: how a hub is asked where a path is a hub id.

    Raises:
        ConfigError: a folder has no adapter, or a hub does not have it.
    """

    def __init__(self, modules: Sequence[dict[str, str]] = (), hub: HubSettings | None = None) -> None:
        self._last_id = 0
        self._by_name: dict[str, Served] = {}
        for module in modules:
            folder = find_adapter(module["path"], hub)
            check_path(folder)
            adapter = self.make(module["name"], folder, module.get("base_model_name"), replaces=False)
            self.add(adapter, module["path"])

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name."""
        found = self._by_name.get(name)
        return None if found is None else found.adapter

    def listed(self) -> list[Served]:
        """All of them."""
        return list(self._by_name.values())

    def make(self, name: str, path: str, base: str | None, *, replaces: bool) -> LoRARequest:
        """An adapter that is going to be served. Raises HTTPError: its name is in use."""
        if name in self._by_name and not replaces:
            message = f"lora_name: the adapter {name!r} is served already; unload it first, or set load_inplace."
            raise bad_request(message, "lora_name", "adapter_exists")
        self._last_id += 1
        return LoRARequest(name, self._last_id, path, base)

    def add(self, adapter: LoRARequest, root: str = "") -> Served:
        """Serve it from now on."""
        self._last_id = max(self._last_id, adapter.lora_int_id)
        served = self._by_name[adapter.lora_name] = Served(adapter, int(time.time()), root or adapter.lora_path)
        return served

    def remove(self, name: str) -> LoRARequest:
        """Serve it no longer; requests that run go on. Raises HTTPError, a 404: there is none of this name."""
        served = self._by_name.pop(name, None)
        if served is None:
            message = f"lora_name: no adapter {name[:200]!r} is served."
            raise HTTPError(404, message, param="lora_name", code="adapter_not_found")
        return served.adapter


logger = init_logger(__name__)

AT_ONCE = 8
"""Names that resolvers are asked about at a time."""
UNKNOWN_FOR_S = 10.0
"""A name that no resolver knows is not asked about again for so long."""
MOST_UNKNOWN = 1024


class AdapterFinder:
    """Asks resolvers.

    Args:
        engine: tries what they find.
        served: has what the server knows.
        resolvers: by name, in the order in which they are asked.
        tell: is told of each adapter that was found, when it is served.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        served: ServedAdapters,
        resolvers: Mapping[str, LoRAResolver],
        tell: Callable[[Served], Awaitable[None]],
    ) -> None:
        self._engine, self._served, self._resolvers, self._tell = engine, served, resolvers, tell
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def look_for(self, name: str) -> None:
        """Have the adapter of this name served, if a resolver knows it. Raises HTTPError: one does, and it cannot be used."""
        if not self._resolvers or time.monotonic() < self._unknown.get(name, 0.0):
            return
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.create_task(self._ask(name))
            task.add_done_callback(lambda _: self._asking.pop(name, None))
        await asyncio.shield(task)  # others wait for it, too

    async def _ask(self, name: str) -> None:
        problem = ""
        async with self._places:
            for resolver_name, resolver in self._resolvers.items():
                try:
                    found = await resolver.resolve_lora(self._engine.config.model.model, name)
                    if found is not None:
                        await self._serve(name, found)
                        return
                except (ConfigError, RequestError) as error:
                    problem = str(error)
                except Exception:
                    logger.exception("The LoRA resolver %r failed with the name %r", resolver_name, name[:200])
        if problem:
            raise bad_field("model", f"the adapter was found and cannot be used: {problem}", "bad_adapter")
        self._unknown[name] = time.monotonic() + UNKNOWN_FOR_S
        while len(self._unknown) > MOST_UNKNOWN:
            self._unknown.popitem(last=False)

    async def _serve(self, name: str, found: LoRARequest) -> None:
        adapter = self._served.make(name, found.lora_path, found.base_model_name, replaces=True)
        await self._engine.add_lora(adapter)
        await self._tell(self._served.add(adapter))
