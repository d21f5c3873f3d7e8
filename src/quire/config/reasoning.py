"""How a model's reasoning is read and limited, for all requests; the names are vLLM's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ReasoningConfig:
    """What `--reasoning-config` says.

    Attributes:
        reasoning_parser: name of the format, where `--reasoning-parser` names none.
        reasoning_start_str: the marker that begins the reasoning; empty: the format's own.
        reasoning_end_str: what is written where a `thinking_token_budget` is spent. It may begin with words that lead over to
            the answer. Empty: the format's end marker.
    """

    reasoning_parser: str = ""
    reasoning_start_str: str = ""
    reasoning_end_str: str = ""


def read_reasoning_config(
    given: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None = None
) -> ReasoningConfig:
    """The settings of a JSON object; the one of structured outputs may name the format, too.
    Raises ConfigError: an unknown key, or a value that is no text."""
    named = {"reasoning_parser": (structured_outputs or {}).get("reasoning_parser") or ""}
    setting, values = "reasoning_config", named | dict(given or {})
    known = [field.name for field in dataclasses.fields(ReasoningConfig)]
    if unknown := sorted(set(values) - set(known)):
        message = f"{setting} has {', '.join(map(repr, unknown))}; allowed: {', '.join(known)}"
        raise ConfigError(message, setting=setting)
    for name, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{setting}.{name}={value!r} must be text", setting=setting)
    return ReasoningConfig(**values)
