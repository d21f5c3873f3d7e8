"""`LoRARequest` under the path by which programs written for vLLM import it. It is plain data: see `quire.adapters`."""

from quire.adapters import LoRARequest

__all__ = ["LoRARequest"]
