"""What a drawn case of an operation is, how it is drawn, carried to a device and compared: what the files of draws share.

A case builds arguments on the CPU from a seed; an implementation runs on copies on its device, whose weights were packed by the
platform's own kernels; the reference on float32 copies of the same numbers on the CPU (bit-exact operations get the same).
Legend: T rows, N outputs, K inputs, V vocabulary.
"""

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from quire.kernels import ops
from quire.kernels.types import (
    ExpertScratch,
    ExpertWeights,
    Fp8Scratch,
    HeadWeight,
    Int8Weight,
    LinearWeight,
    PackedWeight,
    Routing,
)

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
"""Of ||ours - reference|| / ||reference||, by the type of the numbers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Value = TypeVar("Value")


@dataclasses.dataclass
class Case:
    """Arguments of an operation; `outputs` are those that it writes."""

    arguments: list[Any]
    outputs: tuple[int, ...]
    dtype: torch.dtype
    exact: bool = False
    """Results are integers, or the same to the bit."""
    plain: list[Any] | None = None
    """The reference's arguments, where those are in a kernel's own layout."""
    reference: Callable[..., Any] | None = None
    """In the place of the operation's own."""
    pages: tuple[int, ...] = ()
    """Arguments that are pages: they keep their type where activations have another one than weights."""
    rows: int | None = None
    """Rows of the outputs that the step has; what stands behind them does not matter."""
    tolerance: float = 0.0
    """In the place of the type's."""
    why: str = ""
    """Why that is wider."""

    def limit(self, tolerance: float = 0.0) -> float:
        """The largest error that passes; `tolerance`: what a kernel declares of itself."""
        return 0.0 if self.exact else max(tolerance, self.tolerance or TOLERANCES[self.dtype])

    def has_float8(self) -> bool:
        """Whether anything in it is float8, which devices without it are not given."""
        return any(tensor.dtype is torch.float8_e4m3fn for tensor in _tensors(self.arguments))

    def with_activations(self, dtype: torch.dtype) -> "Case":
        """The same case where rows between layers have a type of their own; weights and pages keep theirs."""

        def converted(place: int, value: Any) -> Any:
            is_row = isinstance(value, torch.Tensor) and value.dtype is self.dtype and place not in self.pages
            return moved(value, "cpu", self.dtype, dtype) if is_row else value

        return dataclasses.replace(self, arguments=[converted(*pair) for pair in enumerate(self.arguments)])


@dataclasses.dataclass
class ExpertMatrices:
    """Experts of codes, one matrix after another, as a checkpoint has them.

    Attributes:
        more: other fields of `ExpertWeights`.
    """

    gate_up: list[PackedWeight]
    down: list[PackedWeight]
    more: dict[str, Any]
    is_gated: bool

    def packed(self) -> ExpertWeights:
        """By the platform's kernels.

        Raises:
            NotSupported: they have no layout for such codes.
        """
        gate_up = ops.pack_expert_codes(list(self.gate_up), is_gated=self.is_gated)
        down = ops.pack_expert_codes(list(self.down), is_gated=False)
        if gate_up is None or down is None:
            raise NotSupported("the platform packs no experts of such codes: their values serve")
        shapes = gate_up.shape_only(), down.shape_only()
        return ExpertWeights(*shapes, gate_up_codes=gate_up, down_codes=down, **self.more)


class NotSupported(Exception):
    """A platform's kernels do not take such a case, and say so before they are used."""


def packed(value: Any) -> Any:
    """What a platform's kernels take in the place of a plain weight."""
    if isinstance(value, ExpertMatrices):
        return value.packed()
    if type(value) is LinearWeight and value.data is not None:
        return ops.pack_linear(value.data, value.bias)
    if type(value) is HeadWeight and value.data is not None:
        return ops.pack_heads(value.data)
    if type(value) is ExpertWeights:
        return ops.pack_experts(value)
    if type(value) is PackedWeight:
        return ops.pack_codes(value)
    return ops.pack_int8(value) if type(value) is Int8Weight else value


class Shapes(random.Random):
    """Draws the sizes of case `number` of a draw: a GPU's, or so small that the interpreter computes them in a moment."""

    is_small = False
    number = 0

    def of(self, usual: Sequence[Value], small: Sequence[Value]) -> Value:
        """One of these or of those."""
        return self.choice(small if self.is_small else usual)

    def turn(self, values: Sequence[Value]) -> Value:
        """One after the other, from case to case."""
        return values[self.number % len(values)]

    def chance(self, share: float) -> bool:
        """Yes, that often."""
        return self.random() < share

    def rows(self) -> int:
        """Rows (tokens) of a step."""
        return self.of((1, 2, 3, 7, 8, 16, 17, 33, 64, 130, 256, 300, 700), (1, 3, 17))

    def width(self) -> int:
        """Columns of a row."""
        return self.of((64, 96, 512, 1024, 1000, 2048, 4096), (64, 96))


Draw = Callable[[Shapes, torch.dtype], Case]
draws: dict[str, Draw] = {}
"""By operation; behind its name may follow what they are: `op, kind`."""


rounds_of: dict[str, int] = {}
"""How many cases of a draw are checked."""


def draw(op: str, rounds: int = 6) -> Callable[[Draw], Draw]:
    """A function that draws arguments for an operation."""

    def register(function: Draw) -> Draw:
        draws[op], rounds_of[op] = function, rounds
        return function

    return register


def draw_case(name: str, number: int, seed: int = 0, *, is_small: bool = False) -> Case:
    """Case `number` of a draw, whose dtype follows from the number."""
    rng = Shapes(f"{seed} {number}")
    rng.number, rng.is_small = number, is_small
    torch.manual_seed(1000 * seed + number)
    return draws[name](rng, DTYPES[number % len(DTYPES)])


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Random numbers."""
    return (torch.randn(shape) * scale).to(dtype)


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for an output: whatever is left as it was is no number."""
    return torch.full(shape, float("nan"), dtype=dtype)


def columns(rng: Shapes, t: int, *widths: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    """Matrices side by side in wider rows, of which some columns are nobody's."""
    before = rng.choice((0, 8, 3))
    wide = normal(t, before + sum(widths) + rng.choice((0, 5)), dtype=dtype, scale=scale)
    return wide[:, before : before + sum(widths)].split(widths, dim=1)


def weight_of(n: int, k: int, dtype: torch.dtype, biased: bool) -> LinearWeight:
    """A matrix."""
    weight = normal(n, k, dtype=dtype, scale=k**-0.5)
    return LinearWeight(n, k, dtype, weight, bias=normal(n) if biased else None)


def moved(value: Any, device: str, dtype: torch.dtype | None, to: torch.dtype = torch.float32) -> Any:
    """A copy on a device; floats of `dtype` become `to`, float32 for the reference; None: all keep their types."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return _cloned(value.detach(), device, to if dtype is not None and value.dtype == dtype else value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device, dtype, to) for part in value)
    if isinstance(value, dict):
        return {name: moved(part, device, dtype, to) for name, part in value.items()}
    if isinstance(value, ExpertScratch | Fp8Scratch):
        clone = copy.copy(value)
        vars(clone).update({name: moved(part, device, dtype, to) for name, part in vars(value).items()})
        return clone
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Routing):
        parts = {
            field.name: moved(getattr(value, field.name), device, dtype, to) for field in dataclasses.fields(value)
        }
        clone = dataclasses.replace(value, **parts)
        if isinstance(clone, LinearWeight) and dtype is not None:
            clone.dtype = to
        return clone
    return value


def _whole(value: torch.Tensor) -> torch.Tensor:
    """All of the memory that a tensor is a view of, up to its last value: what lies between its rows or pages, too."""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((value.storage_offset() + last + 1,), (1,), 0)


def _cloned(value: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """A copy in memory of the same form: rows and pages may have strides of their own, and planes may be one."""
    if value.is_contiguous() or not value.numel():
        return value.to(device, dtype, copy=True)
    return _whole(value).to(device, dtype, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())


def error_of(case: Case, ours: Any, expected: Any) -> float:
    """How far an output is off, with what lies between its rows: relative, or a count of values where those are exact."""
    pairs = zip(_tensors(ours), _tensors(expected), strict=True)
    return max(_error(case, mine, theirs) for mine, theirs in pairs)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value[:0] if value.is_meta else value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _error(case: Case, ours: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_contiguous() and expected.numel():
        ours, expected = _whole(ours), _whole(expected)
    else:
        ours, expected = ours[: case.rows], expected[: case.rows]
    ours = ours.cpu()  # a copy from a device keeps no strides
    if not ours.dtype.is_floating_point:
        return float((ours != expected).sum())
    ours, expected = ours.double(), expected.double()
    finite = torch.isfinite(expected)
    are_unlike = ~torch.isclose(ours, expected, rtol=0, atol=0, equal_nan=True)
    if case.exact:
        return float(are_unlike.sum())
    if are_unlike[~finite].any() or not torch.isfinite(ours[finite]).all():
        return float("inf")
    return float((ours - expected)[finite].norm() / expected[finite].norm().clamp(min=1e-9))
