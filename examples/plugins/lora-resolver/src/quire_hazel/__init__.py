"""A LoRA resolver: a JSON file, which HAZEL_TABLE names, says in which folder the adapter of a name lies: {"NAME": "FOLDER"}."""

import json
import os
from pathlib import Path

from quire.adapters import LoRARequest
from quire.lora.resolver import LoRAResolver, LoRAResolverRegistry


class Resolver(LoRAResolver):
    """Reads the table anew for each name that the server does not know yet."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        table = json.loads(Path(os.environ["HAZEL_TABLE"]).read_text(encoding="utf-8"))
        folder = table.get(lora_name)
        return None if folder is None else LoRARequest(lora_name, 1, folder, base_model_name)


def register() -> None:
    """Quire calls this in each of its processes."""
    LoRAResolverRegistry.register_resolver("hazel", Resolver())
