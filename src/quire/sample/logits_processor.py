"""Custom logits processors: what a user may put between the model and the sampler.

Two kinds. Per request: callables in `SamplingParams.logits_processors` (in-process engines only), each
`(output_token_ids, logits) -> logits` or `(prompt_token_ids, output_token_ids, logits) -> logits` on one row. Per engine:
subclasses of `LogitsProcessor`, given as classes or as class paths in the engine argument `logits_processors`, or by plugins.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from quire.logger import init_logger
from quire.plugins import LOGITS_PROCESSORS_GROUP, load_plugins
from quire.plugins.registry import import_class
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quire.config import EngineConfig

logger = init_logger(__name__)


class LogitsProcessor(abc.ABC):
    """Edits the logits of the rows that it takes an interest in. One instance serves the whole engine.

    A failure ends only the rows that cause it: a failing `add_row` ends that request, and after a failing `apply` the
    rows are offered again one at a time.
    """

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        """Made once in each worker, after the model was loaded."""

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError for parameters (often `extra_args`) that cannot work; called for each new request."""

    @abc.abstractmethod
    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        """A request got this row; True if its logits are wanted. `output_token_ids` grows as tokens are sampled."""

    @abc.abstractmethod
    def remove_row(self, row: int) -> None:
        """The row's request has ended or gives way; called only for rows that were wanted."""

    @abc.abstractmethod
    def apply(self, logits_NV: torch.Tensor, rows_N: np.ndarray) -> torch.Tensor:
        """Edited logits of these rows, float32, in the same shape; may edit in place and return its argument."""


def load_logits_processors(
    specs: Iterable[str | type[Any]], config: EngineConfig, device: torch.device, is_pin_memory: bool = False
) -> list[LogitsProcessor]:
    """Make the engine's processors from classes or class paths (`module:Class` or `module.Class`).

    Raises:
        ConfigError: a path that cannot be imported, or something that is not a LogitsProcessor.
    """
    found = [import_class(spec, "logits_processors", LogitsProcessor) for spec in specs]
    return [processor(config, device, is_pin_memory) for processor in found]


def load_plugin_processors(
    config: EngineConfig, device: torch.device, is_pin_memory: bool = False
) -> list[LogitsProcessor]:
    """The processors of installed plugins. One that cannot be made is named in the log and left out."""
    loaded: list[LogitsProcessor] = []
    for name, target in load_plugins(LOGITS_PROCESSORS_GROUP).items():
        try:
            loaded += load_logits_processors([target], config, device, is_pin_memory)
        except Exception:
            logger.exception("The logits processor %r cannot be made and is left out", name)
    return loaded


RowProcessor = Callable[[list[int], list[int], Any], Any]
"""(prompt token ids, output token ids, logits [V]) -> logits [V]."""


def adapt_callable(function: Callable[..., Any]) -> RowProcessor:
    """Bring both forms of a per-request processor to the one with three arguments.

    Raises:
        ValueError: it takes neither two nor three positional arguments.
    """
    positional = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = sum(parameter.default is parameter.empty for parameter in positional)
    if required == 3:
        return function
    if required == 2:
        return lambda _prompt, output, logits: function(output, logits)
    raise ValueError(
        "a logits processor takes (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits); "
        f"{function!r} takes {required} arguments"
    )
