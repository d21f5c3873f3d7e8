"""How to pool: one pooling request's parameters, checked when they are made."""

import copy
from typing import Any, Self

import msgspec

from quire import param_checks as checks

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")


class PoolingParams(
    msgspec.Struct, omit_defaults=True, repr_omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """Pooling parameters of one request.

    Attributes:
        task: `embed`, `classify`, `token_embed` or `token_classify`; None lets the engine choose.
        dimensions: keep only so many dimensions of an embedding (for models trained so).
        use_activation: apply the pooler's activation; None means as the model says.

    Raises:
        RequestError: a value of the wrong type or out of range; `param` names it.
    """

    task: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            checks.refuse("task", self.task, f"one of {', '.join(POOLING_TASKS)}, or null")
        if self.dimensions is not None:
            allowed = "a whole number from 1, or null"
            self.dimensions = checks.whole("dimensions", self.dimensions, 1, (1 << 31) - 1, allowed)
        activation: Any = self.use_activation
        if activation is not None:
            checks.flag("use_activation", activation)

    def clone(self) -> Self:
        """A copy."""
        return copy.copy(self)
