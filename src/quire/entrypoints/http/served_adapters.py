"""The adapters that a server offers under names of their own, beside the names of the model.

Knows names and folders; whether an adapter can be used is found out by the engine.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from quire.adapters import LoRARequest, check_path
from quire.config.hub import find_adapter
from quire.config.hub.listing import HubSettings
from quire.entrypoints.http.errors import HTTPError, bad_request


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
