"""LoRA resolvers: who is asked where an adapter lies that nobody has named to the server. The names are vLLM's.

A plugin registers one with `LoRAResolverRegistry.register_resolver(NAME, RESOLVER)`. Imports no torch: frontends ask resolvers.
"""

import abc
import asyncio
import re
from collections.abc import Iterable
from pathlib import Path

from quire import envs
from quire.adapters import CONFIG, LoRARequest, read_config
from quire.config.hub import find_adapter
from quire.config.hub.listing import HubSettings
from quire.plugins.registry import Registry


class LoRAResolver(abc.ABC):
    """Finds adapters by their names."""

    @abc.abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Where the adapter of a name lies; None: it is not known here. The server gives it a number of its own.

        Args:
            base_model_name: the model as `quire serve` was given it.
            lora_name: as a client wrote it: any text.
        """


class _Resolvers(Registry[LoRAResolver]):
    def register_resolver(self, resolver_name: str, resolver: LoRAResolver | str, *, override: bool = False) -> None:
        """Add a resolver, or its path `module:attribute`. Raises ConfigError: the name is taken."""
        self.register(resolver_name, resolver, override=override)

    def get_supported_resolvers(self) -> Iterable[str]:
        """The names of all resolvers."""
        return set(self)

    def get_resolver(self, resolver_name: str) -> LoRAResolver:
        """A resolver by its name. Raises ConfigError: there is none."""
        return self.entry(resolver_name).load(self.kind, self.setting)


LoRAResolverRegistry = _Resolvers("LoRA resolver", "lora_resolver")
"""All resolvers that plugins and programs have added."""


_PART = r"[\w@=+-][\w.@=+-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})*")
"""Names that stay below a folder: parts that do not begin with a dot."""


class FilesystemResolver(LoRAResolver):
    """An adapter's name is its folder within one folder.

    Args:
        lora_cache_dir: that folder.
    """

    def __init__(self, lora_cache_dir: str) -> None:
        self.lora_cache_dir = lora_cache_dir

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not _NAME.fullmatch(lora_name):
            return None
        return await asyncio.to_thread(_of_folder, Path(self.lora_cache_dir) / lora_name, base_model_name, lora_name)


class HfHubResolver(LoRAResolver):
    """An adapter's name is a repository, `owner/name`, or a folder in one, `owner/name/folder`.

    Args:
        repositories: those that may be asked for.
        hub: how the hub is asked.
    """

    def __init__(self, repositories: Iterable[str], hub: HubSettings) -> None:
        self._repositories, self._hub = frozenset(repositories), hub

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        if not _NAME.fullmatch(lora_name) or "/".join(lora_name.split("/")[:2]) not in self._repositories:
            return None
        folder = await asyncio.to_thread(find_adapter, lora_name, self._hub)
        return await asyncio.to_thread(_of_folder, Path(folder), base_model_name, lora_name)


def _of_folder(folder: Path, base: str, name: str) -> LoRARequest | None:
    """The adapter in a folder; None: there is none, or one of another model, as its file says."""
    if not (folder / CONFIG).is_file():
        return None
    its_base = read_config(str(folder)).get("base_model_name_or_path")
    if its_base and Path(str(its_base)).name != Path(base).name:
        return None
    return LoRARequest(name, 1, str(folder), its_base)


def active_resolvers(hub: HubSettings) -> dict[str, LoRAResolver]:
    """By name, whom to ask, in this order: those that plugins have added, then Quire's own that the environment turns on."""
    found = {name: LoRAResolverRegistry.get_resolver(name) for name in LoRAResolverRegistry}
    if folder := envs.QUIRE_LORA_RESOLVER_CACHE_DIR:
        found["lora_filesystem_resolver"] = FilesystemResolver(folder)
    if repositories := envs.QUIRE_LORA_RESOLVER_HF_REPO_LIST:
        found["lora_hf_hub_resolver"] = HfHubResolver(repositories, hub)
    return found
