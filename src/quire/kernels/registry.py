"""The kernel registry: every operation by name, with its implementations and the choice among them.

An implementation says on which platform it runs, how good it is (priority) and, at selection, whether it can run here.
The plain PyTorch `reference` is always there. Choice happens once, when a platform is selected; `explain` tells why.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

Predicate = Callable[[], str | None]
"""Returns None if the implementation can run here, else the reason why not."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One implementation of one operation."""

    op: str
    platform: str
    function: Callable[..., Any]
    priority: int
    unavailable: Predicate
    owner: str
    invariant: bool = True
    """Whether a row's result is the same to the bit in any batch: no reduction whose order depends on other rows."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for an operation, and why the others were passed over."""

    chosen: Kernel
    passed_over: list[tuple[Kernel, str]]


_kernels: dict[str, list[Kernel]] = {}


def kernel(
    op: str,
    *,
    platform: str,
    priority: int = 0,
    unavailable: Predicate = lambda: None,
    owner: str = "quire",
    invariant: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an implementation of `op`; `platform="any"` is for references.

    Raises:
        ValueError: the same operation, platform and priority are registered twice.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        entry = Kernel(op, platform, function, priority, unavailable, owner, invariant)
        existing = _kernels.setdefault(op, [])
        for other in existing:
            if (other.platform, other.priority) == (platform, priority):
                raise ValueError(
                    f"kernel {op!r} for platform {platform!r} with priority {priority} is registered by both "
                    f"{other.owner!r} and {owner!r}: give one another priority"
                )
        existing.append(entry)
        return function

    return register


def implementations(op: str) -> list[Kernel]:
    """Every implementation of an operation."""
    return list(_kernels.get(op, []))


def operations() -> list[str]:
    """The names of all operations."""
    return sorted(_kernels)


def choose(op: str, platform: str, *, deterministic: bool = False) -> Choice:
    """The best implementation that can run on a platform; ties are impossible by construction.

    Args:
        deterministic: only implementations whose rows do not depend on the batch.
    """
    passed_over: list[tuple[Kernel, str]] = []
    best: Kernel | None = None
    for entry in sorted(_kernels.get(op, []), key=lambda k: -k.priority):
        if entry.platform not in (platform, "any"):
            continue
        reason = entry.unavailable()
        if reason is None and deterministic and not entry.invariant:
            reason = "a row's last bits depend on the batch, and deterministic was asked for"
        if reason is not None:
            passed_over.append((entry, reason))
        elif best is None:
            best = entry
        else:
            passed_over.append((entry, f"priority {entry.priority} is below {best.priority}"))
    if best is None:
        raise LookupError(f"no implementation of kernel {op!r} can run on platform {platform!r}")
    return Choice(best, passed_over)
