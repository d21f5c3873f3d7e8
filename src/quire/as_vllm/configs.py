"""vLLM's classes of configuration that Quire has under another name, or takes only as plain objects.

An object of a class that Quire does not have is its keywords. The setting
that it is given to takes them, or refuses them in words.
"""

from typing import Any

from quire.config import EngineConfig as VllmConfig

__all__ = ["VllmConfig"]

_ONLY_KEYWORDS = (
    "CompilationConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "KernelConfig",
    "MultiModalConfig",
    "ReasoningConfig",
    "WeightTransferConfig",
)


class Keywords:
    """An object of configuration: the keywords that it was made with, as attributes, too."""

    def __init__(self, **keywords: Any) -> None:
        self.__dict__.update(keywords)

    def model_dump(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """The keywords."""
        return dict(self.__dict__)


def __getattr__(name: str) -> Any:
    if name not in _ONLY_KEYWORDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = type(name, (Keywords,), {"__doc__": f"vLLM's `{name}`, as its keywords."})
    return made
