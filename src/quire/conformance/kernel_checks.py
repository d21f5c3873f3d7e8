"""Every kernel that a platform registers beside its plain PyTorch reference, on drawn shapes.

Each implementation runs twice on every case: what was launched before may be launched another way.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from quire.conformance import cases
from quire.conformance.cases.case import Case, NotSupported, draw_case, draws, error_of, moved, packed, rounds_of
from quire.conformance.contract import Failed, NotClaimed, Subject, check, other_kernels
from quire.kernels import registry

QUICK_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Target:
    """Whose kernels, and where they run.

    Attributes:
        activations: the type of rows between layers; None: the weights' own.
        slack: what allowed errors are multiplied with.
    """

    platform: str
    device: str
    activations: torch.dtype | None = None
    has_float8: bool = True
    slack: float = 1.0


@dataclasses.dataclass
class Verdict:
    """On one implementation.

    Attributes:
        error: the largest, relative.
        skipped: why it was not given a case, the last time.
    """

    kernel: registry.Kernel
    num_cases: int = 0
    error: float = 0.0
    failure: str = ""
    skipped: str = ""

    @property
    def name(self) -> str:
        """Where it is written."""
        function = self.kernel.function
        return f"{function.__module__}.{function.__qualname__}"


def check_draw(
    name: str, target: Target, rounds: Sequence[int] | None = None, seed: int = 0, *, is_small: bool = False
) -> list[Verdict]:
    """A verdict on every implementation of a draw's operation that the platform has. Its kernels must be selected.

    Args:
        rounds: numbers of the cases; None: as many as the draw asks for.
    """
    kernels = registry.implementations(name.partition(",")[0])
    reference = next(entry.function for entry in kernels if entry.platform == "any")
    verdicts = [Verdict(entry) for entry in kernels if entry.platform == target.platform and not entry.unavailable()]
    for number in range(rounds_of[name]) if rounds is None else rounds:
        case = draw_case(name, number, seed, is_small=is_small)
        if case.has_float8() and not target.has_float8:
            for verdict in verdicts:
                verdict.skipped = "the platform claims no float8"
            continue
        plain = case.arguments if case.plain is None else case.plain
        expected = [moved(argument, "cpu", None if case.exact else case.dtype) for argument in plain]
        # An oracle that is a kernel of the platform's own (an operation is often several others) would prove nothing.
        with other_kernels():
            (case.reference or reference)(*expected)
        if target.activations is not None:
            case = case.with_activations(target.activations)
        for verdict in verdicts:
            _judge(verdict, case, number, expected, target)
    return verdicts


def _judge(verdict: Verdict, case: Case, number: int, expected: list[Any], target: Target) -> None:
    limit = case.limit(verdict.kernel.tolerance) * target.slack
    try:
        error = _largest_error(case, verdict.kernel.function, expected, target.device)
    except NotSupported as why:
        verdict.skipped = str(why)
        return
    except Exception as exception:
        error, why = float("inf"), f"{type(exception).__name__}: {exception}"[:300]
    else:
        why = f"off by {error:.1e}, allowed is {limit:.1e}"
    verdict.num_cases += 1
    verdict.error = max(verdict.error, error)
    if not error <= limit:
        verdict.failure = verdict.failure or f"case {number} ({str(case.dtype).removeprefix('torch.')}): {why}"


def _largest_error(case: Case, function: Any, expected: list[Any], device: str) -> float:
    errors: list[float] = []
    for _ in range(2):
        ours = [packed(moved(argument, device, None)) for argument in case.arguments]
        function(*ours)
        errors += [error_of(case, ours[index], expected[index]) for index in case.outputs]
    return max(errors)


def check_kernel(name: str, subject: Subject) -> str:
    """One draw, as a check."""
    activation = subject.capabilities.activation_dtype.value
    target = Target(
        subject.platform.name,
        str(subject.device),
        None if activation == "model" else getattr(torch, activation),
        subject.capabilities.fp8.value,
    )
    rounds = range(QUICK_ROUNDS) if subject.is_quick else None
    with subject.kernels():
        verdicts = check_draw(name, target, rounds, subject.seed, is_small=subject.is_quick)
    if not verdicts:
        raise NotClaimed("the platform registers no kernel of its own: the plain PyTorch one serves")
    if failed := [verdict for verdict in verdicts if verdict.failure]:
        limits = "an error of at most what its types allow, against the reference in float32"
        raise Failed(
            f"{len(failed)} of {len(verdicts)} kernels differ", limits, "; ".join(_told(each) for each in failed)
        )
    if not any(verdict.num_cases for verdict in verdicts):
        raise NotClaimed(verdicts[0].skipped)
    return "; ".join(_told(verdict) for verdict in verdicts)


def _told(verdict: Verdict) -> str:
    return f"{verdict.name}: {verdict.failure or f'off by {verdict.error:.0e} in {verdict.num_cases} cases'}"


PREPARES = ("pack_", "expert_matrices")
"""Operations that hand out weights in a layout of the platform's own: the products that take these are drawn."""


@check(
    "kernels/registered", "every operation has a kernel that can run, and every kernel of the platform's own has cases"
)
def check_registered(subject: Subject) -> str:
    """The registry's choices."""
    with subject.kernels():
        choices = registry.choices()
    if set(choices) != set(registry.operations()):
        missing = sorted(set(registry.operations()) - set(choices))
        raise Failed("operations without a kernel", "a choice for every operation (`ops.select`)", ", ".join(missing))
    own = [op for op, choice in choices.items() if choice.chosen.platform == subject.platform.name]
    drawn = {name.partition(",")[0] for name in draws}
    if unknown := [op for op in own if op not in drawn and not op.startswith(PREPARES)]:
        raise Failed(
            "kernels that nothing is drawn for",
            "a draw for each (quire.conformance.cases.case.draw)",
            ", ".join(sorted(unknown)),
        )
    return f"{len(own)} of {len(choices)} operations have a kernel of the platform's own"


def label(draw: str) -> str:
    """A draw's name in a check's: `op, kind of case` is `op.kind-of-case`."""
    return draw.replace(", ", ".").replace(" ", "-")


def _register() -> None:
    cases.load()
    places = [f"{cases.__name__}.{module}" for module in cases.DRAWN_IN]
    for name in sorted(draws, key=lambda name: (places.index(draws[name].__module__), name)):
        about = f"kernels of {name.partition(',')[0]} give what the reference gives"
        check(f"kernels/{label(name)}", about)(functools.partial(check_kernel, name))


_register()
