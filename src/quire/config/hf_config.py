"""A checkpoint's config.json as attributes: no Transformers, no torch, no code from the checkpoint."""

from collections.abc import Iterator
from typing import Any

from quire.guards import is_dict


class HFConfig:
    """Read-only attribute access to a config.json; nested objects become `HFConfig` too.

    A missing name is an AttributeError that lists what there is; use `get` for optional ones.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            value = self._values[name]
        except KeyError:
            raise AttributeError(f"config.json has no {name!r}; it has {', '.join(sorted(self._values))}") from None
        return HFConfig(value) if is_dict(value) else value

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default` where it is missing or null."""
        value = self._values.get(name)
        if value is None:
            return default
        return HFConfig(value) if is_dict(value) else value

    def __getitem__(self, key: str | int) -> Any:
        """The value of a key that is no name, such as a label's number. Raises KeyError."""
        value = self._values[str(key)]
        return HFConfig(value) if is_dict(value) else value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def to_dict(self) -> dict[str, Any]:
        """A copy of the values."""
        return dict(self._values)

    def __eq__(self, other: object) -> bool:
        return self._values == other._values if isinstance(other, HFConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it holds dicts

    def __repr__(self) -> str:
        return f"HFConfig({self._values!r})"
