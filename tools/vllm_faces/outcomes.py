"""Why a case of vLLM's has no result: it looks into vLLM, or the format is not there."""

from typing import Any, NoReturn


class NotBlackBox(AttributeError):
    """The case uses something of vLLM's that is not an answer's text, its reasoning, its content or its calls."""


class Absent(Exception):
    """Quire has no parser of this name."""


class Watch:
    """What happens in the case that runs now.

    Attributes:
        in_case: a case runs; before, files are imported, where nothing can be refused.
        num_read: texts that Quire's parsers have read in it, or servers that it has asked.
        errors: files that could not be imported.
    """

    in_case = False
    num_read = 0
    errors: list[dict[str, str]] = []


class _Meta(type):
    """A stand-in's attributes are stand-ins; used in a case, they end it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if Watch.in_case:
            refuse(f"{cls.__qualname__}.{name}")
        return internal(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if Watch.in_case:
            refuse(cls.__qualname__)
        return internal(f"{cls.__qualname__}()")

    def __iter__(cls) -> Any:
        if Watch.in_case:
            refuse(cls.__qualname__)
        return iter(())

    def __getitem__(cls, key: Any) -> Any:
        if Watch.in_case:
            refuse(cls.__qualname__)
        return internal(f"{cls.__qualname__}[]")


def internal(name: str) -> Any:
    """A stand-in for something within vLLM: it can be imported, subclassed and passed about, but not used in a case."""
    return _Meta(name.rpartition(".")[2] or "internal", (), {"__qualname__": name, "__module__": "vllm"})


def refuse(name: str) -> NoReturn:
    """End the case.

    Raises:
        NotBlackBox: always.
    """
    raise NotBlackBox(name)
