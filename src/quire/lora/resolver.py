"""LoRA resolvers: who is asked where an adapter lies that nobody has named to the server. The names are vLLM's.

A plugin registers one with `LoRAResolverRegistry.register_resolver(NAME, RESOLVER)`. Imports no torch: frontends ask resolvers.
"""

import abc
from collections.abc import Iterable

from quire.adapters import LoRARequest
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
