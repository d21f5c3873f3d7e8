"""What the patches put in the place of Quire's own. Imported when a target has been imported, never before."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quire.errors import Explained

MAX_STEP_TOKENS = 1024
_steps: dict[int, int] = {}


def with_small_steps(original: Callable[..., Any], platform: Any) -> Any:
    """The platform's capabilities with a smaller step."""
    capabilities = original(platform)
    sizes = tuple(min(size, MAX_STEP_TOKENS) for size in capabilities.max_num_batched_tokens.value)
    small = Explained(sizes, "the patch example-small-steps")
    return dataclasses.replace(capabilities, max_num_batched_tokens=small)


def count_step(original: Callable[..., Any], worker: Any, *args: Any) -> Any:
    """Execute a step, and count it."""
    _steps[id(worker)] = _steps.get(id(worker), 0) + 1
    return original(worker, *args)


def step_count(self: Any) -> int:
    """The steps that a worker has executed."""
    return _steps.get(id(self), 0)
