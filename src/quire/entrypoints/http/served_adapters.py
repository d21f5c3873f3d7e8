"""The adapters that a server offers under names of their own, beside the names of the model.

Knows names and folders; whether an adapter can be used is found out by the engine.
"""

import itertools
import time
from collections.abc import Sequence

from quire.adapters import LoRARequest, read_config
from quire.entrypoints.http.errors import HTTPError, bad_request


class ServedAdapters:
    """Adapters by name.

    Args:
        modules: those that the operator named at the start: `name`, `path` and perhaps `base_model_name`.

    Raises:
        ConfigError: a folder has no adapter.
    """

    def __init__(self, modules: Sequence[dict[str, str]] = ()) -> None:
        self._ids = itertools.count(1)
        self._by_name: dict[str, tuple[LoRARequest, int]] = {}
        for module in modules:
            read_config(module["path"])
            self.add(LoRARequest(module["name"], next(self._ids), module["path"], module.get("base_model_name")))

    def find(self, name: str) -> LoRARequest | None:
        """The adapter of this name."""
        found = self._by_name.get(name)
        return None if found is None else found[0]

    def listed(self) -> list[tuple[LoRARequest, int]]:
        """All of them, and since when they are served, in seconds of the epoch."""
        return list(self._by_name.values())

    def make(self, name: str, path: str, base: str | None, *, replaces: bool) -> LoRARequest:
        """An adapter that is going to be served. Raises HTTPError: its name is in use."""
        if name in self._by_name and not replaces:
            message = f"lora_name: the adapter {name!r} is served already; unload it first, or set load_inplace."
            raise bad_request(message, "lora_name", "adapter_exists")
        return LoRARequest(name, next(self._ids), path, base)

    def add(self, adapter: LoRARequest) -> None:
        """Serve it from now on."""
        self._by_name[adapter.lora_name] = adapter, int(time.time())

    def remove(self, name: str) -> None:
        """Serve it no longer; requests that run go on. Raises HTTPError, a 404: there is none of this name."""
        if self._by_name.pop(name, None) is None:
            message = f"lora_name: no adapter {name[:200]!r} is served."
            raise HTTPError(404, message, param="lora_name", code="adapter_not_found")
