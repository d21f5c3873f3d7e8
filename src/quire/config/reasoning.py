"""How a model's reasoning is read and limited, for all requests; the names are vLLM's."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.config.checks import TEXT, read_object, setting


@dataclasses.dataclass(frozen=True)
class ReasoningConfig:
    """The value of `--reasoning-config`.

    Attributes:
        reasoning_parser: name of the format, if `--reasoning-parser` names none.
        reasoning_start_str: the marker that begins the reasoning; empty means the format's own.
        reasoning_end_str: the text that is forced when a `thinking_token_budget` is spent. It may begin with words that lead over
            to the answer. Empty means the format's end marker.
    """

    reasoning_parser: str = setting("", TEXT)
    reasoning_start_str: str = setting("", TEXT)
    reasoning_end_str: str = setting("", TEXT)


def read_reasoning_config(
    given: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None = None
) -> ReasoningConfig:
    """Read `--reasoning-config`; the object of structured outputs may name the format, too.
    Raises ConfigError for an unknown key, or a value that is not a string."""
    named = {"reasoning_parser": (structured_outputs or {}).get("reasoning_parser")}
    return read_object(ReasoningConfig, "reasoning_config", {**named, **(given or {})})
