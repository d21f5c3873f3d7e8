"""Finds the adapter that a client names and the server does not know yet: resolvers are asked, once for all who wait.

Nothing else waits: resolvers are asked beside the event loop's other work, and an adapter is loaded beside the steps.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from quire.adapters import LoRARequest
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.served_adapters import Served, ServedAdapters
from quire.errors import ConfigError, RequestError
from quire.logger import init_logger
from quire.lora.resolver import LoRAResolver

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM

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
