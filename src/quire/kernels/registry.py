"""The kernel registry: every operation by name, with its implementations and the choice among them.

`@operation` on a plain PyTorch function declares an operation: the function's signature and docstring are the contract, and
its body is the reference that every other implementation is compared with. Callers import the name that it decorates, which
calls the implementation that was chosen. A platform's implementation is registered with `@kernel`: it says how good it is
(priority) and, at selection, whether it can run here. `select` chooses once, before a model is built; `explain` tells why.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from quire.plugins.registry import BUILT_IN_OWNER, current_owner

P = ParamSpec("P")
R = TypeVar("R")

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
    needs_scratch: bool = True
    """Whether it uses all scratch memory that the operation has for kernels; the reference does not."""
    tolerance: float = 0.0
    """The relative error that it has by design, where it rounds more than its types do; `quire conformance` allows it."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for an operation, and why the others were passed over."""

    chosen: Kernel
    passed_over: list[tuple[Kernel, str]]


_kernels: dict[str, list[Kernel]] = {}
_dispatchers: dict[str, Any] = {}
_choices: dict[str, Choice] = {}


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Declare an operation by its reference; callers get a function that calls the chosen implementation.

    Until `select` is called that is the reference.
    """
    name = function.__name__
    kernel(name, platform="any", needs_scratch=False)(function)
    # A partial without arguments forwards a call in C: 20 ns less than a Python function that looks the implementation up.
    dispatcher = functools.partial(function)
    _dispatchers[name] = functools.update_wrapper(dispatcher, function)
    return cast(Callable[P, R], dispatcher)


def reference(operation: Callable[P, R]) -> Callable[P, R]:
    """The plain PyTorch function that declares an operation, whatever was chosen."""
    return cast(Any, operation).__wrapped__


def use(choices: Mapping[str, Choice]) -> None:
    """Have operations call these implementations, and their references where none is named."""
    _choices.clear()
    _choices.update(choices)
    for name, dispatcher in _dispatchers.items():
        function = choices[name].chosen.function if name in choices else dispatcher.__wrapped__
        dispatcher.__setstate__((function, (), {}, vars(dispatcher)))


def select(platform: str, *, deterministic: bool = False, shares: Collection[str] = ()) -> None:
    """Choose an implementation for every operation; called once by the platform, before a model is built.

    Args:
        deterministic: only implementations whose rows do not depend on the batch.
        shares: platforms whose kernels this one runs too, where they say that they can.
    """
    use({op: choose(op, platform, deterministic=deterministic, shares=shares) for op in operations()})


def choices() -> dict[str, Choice]:
    """What was chosen, by operation."""
    return dict(_choices)


def is_native(op: str) -> bool:
    """Whether an implementation of the platform's own was chosen, rather than the plain PyTorch reference."""
    choice = _choices.get(op)
    return choice is not None and choice.chosen.platform != "any"


def explain() -> dict[str, Any]:
    """What was chosen, by operation, as plain values; and why the others were passed over."""
    return {
        op: {
            "chosen": choice.chosen.platform,
            "function": f"{choice.chosen.function.__module__}.{choice.chosen.function.__qualname__}",
            "priority": choice.chosen.priority,
            "owner": choice.chosen.owner,
            "passed_over": [{"platform": other.platform, "why": why} for other, why in choice.passed_over],
        }
        for op, choice in sorted(_choices.items())
    }


def kernel(
    op: str,
    *,
    platform: str,
    priority: int = 0,
    unavailable: Predicate = lambda: None,
    owner: str | None = None,
    invariant: bool = True,
    needs_scratch: bool = True,
    tolerance: float = 0.0,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an implementation of `op`, whose signature is the declaration's.

    Args:
        owner: who registers, for messages; None: Quire for its own modules, else the plugin that is being loaded, or the program.

    Raises:
        ValueError: the same operation, platform and priority are registered twice.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        who = owner or (BUILT_IN_OWNER if function.__module__.startswith("quire.") else current_owner())
        entry = Kernel(op, platform, function, priority, unavailable, who, invariant, needs_scratch, tolerance)
        existing = _kernels.setdefault(op, [])
        for other in existing:
            if (other.platform, other.priority) == (platform, priority):
                raise ValueError(
                    f"kernel {op!r} for platform {platform!r} with priority {priority} is registered by both "
                    f"{other.owner!r} and {who!r}: give one another priority"
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


def choose(op: str, platform: str, *, deterministic: bool = False, shares: Collection[str] = ()) -> Choice:
    """The best implementation that can run on a platform; the platform's own goes before a shared one of the same priority.

    Args:
        deterministic, shares: as of `select`.
    """
    passed_over: list[tuple[Kernel, str]] = []
    best: Kernel | None = None
    for entry in sorted(_kernels.get(op, []), key=lambda k: (-k.priority, k.platform != platform)):
        if entry.platform not in (platform, *shares, "any"):
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
