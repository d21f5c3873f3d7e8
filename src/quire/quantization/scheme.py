"""What a number format is to Quire: the tensors that a checkpoint holds for a matrix, and what they become.

A format's own file maps `quantization_config` to one of few schemes for each matrix, by its name. Knows nothing of files,
ranks or products.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, TypeAlias, TypeVar

import torch

from quire.errors import ConfigError
from quire.layers.linear import WHOLE, Decoded, Stored

T = TypeVar("T")
Tensors: TypeAlias = Mapping[str, torch.Tensor]
Kind = Literal["packed", "float8", "int8", "fp8", "dense"]


@dataclasses.dataclass(frozen=True)
class Form:
    """What matrices take in a device's memory.

    Attributes:
        kind: small codes, float8 as codes, int8 with int8 inputs, float8 with float8 inputs, or the model's own type.
        bits: of a packed code.
        group: columns that share a scale, of packed codes.
        has_zeros: packed codes have a zero beside every scale.
        fits_tiles: what tiles for tensor cores may take: packed codes are whole numbers less whole zeros (in 4 bits), or places
            in a table, and groups are of adjacent columns.
        has_powers: scales are powers of two, for which kernels may take a byte.
        table: of packed codes that are places in one, its name.
    """

    kind: Kind
    bits: int = 8
    group: int = WHOLE
    has_zeros: bool = False
    fits_tiles: bool = True
    has_powers: bool = False
    table: str = ""

    def num_bytes(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """Of a matrix."""
        if self.kind == "dense":
            return rows * columns * dtype.itemsize
        if self.kind not in ("packed", "float8"):
            return rows * (columns + torch.float32.itemsize)
        groups = -(-columns // self.group)
        scale_bytes = 1 if self.has_powers else torch.float32.itemsize
        return rows * (columns * self.bits // 8 + groups * scale_bytes * (1 + self.has_zeros))

    def joined(self, other: "Form") -> "Form":
        """Of two matrices that are joined row by row."""
        if self.kind != other.kind:
            return Form("dense")
        group, is_alike = min(self.group, other.group), self.table == other.table
        return Form(
            self.kind,
            max(self.bits, other.bits) if is_alike else 8,
            group,
            self.has_zeros or other.has_zeros,
            self.fits_tiles and other.fits_tiles,
            self.has_powers and other.has_powers,
            self.table if is_alike else "",
        )


DENSE, FP8_FORM, INT8_FORM = Form("dense"), Form("fp8"), Form("int8")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One way to store a matrix.

    Attributes:
        name: for people, e.g. "int4, groups of 128".
        tensors: what the checkpoint holds, by suffix.
        decode: from those tensors (or the parts of them that belong to some rows and columns), the shape of these rows and
            columns, and the model's type, to what a kernel takes.
        form: what that takes in memory.
    """

    name: str
    tensors: Mapping[str, Stored]
    decode: Callable[[Tensors, tuple[int, int], torch.dtype], Decoded]
    form: Form


SchemeOf: TypeAlias = Callable[[str], Scheme | None]
"""How a checkpoint stores the matrix of this name (without the model's prefix); None: in a plain type."""


PREFIXES = (
    "",
    "model.",
    "model.language_model.",
    "language_model.model.",
    "transformer.",
    "gpt_neox.",
    "model.decoder.",
    "backbone.",
)


def spellings(source: str) -> list[str]:
    """A matrix's name with every prefix that checkpoints' descriptions may give it."""
    return [prefix + source for prefix in PREFIXES]


def matches(pattern: str, source: str) -> bool:
    """Whether a module's name in a checkpoint's description means this matrix: `re:` and a regular expression, a name with or
    without a prefix, or its last parts."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in spellings(source))
    return pattern == source or pattern.endswith(f".{source}") or source.endswith(f".{pattern}")


def is_within(names: Iterable[str], source: str) -> bool:
    """Whether a matrix is in one of these modules: a name in full, or any of its parts."""
    return any(
        f".{name.strip('.')}." in f".{spelling}."
        for name in names
        for spelling in (spellings(source) if "." in name else (source,))
    )


def chosen(
    default: Scheme | None,
    is_plain: Callable[[str], bool],
    by_name: Iterable[tuple[str, Scheme | None]] = (),
    is_named: Callable[[str, str], bool] = matches,
) -> SchemeOf:
    """None for plain matrices, for others the scheme of the first name that means one of them, or else the default.

    Args:
        is_named: whether a name (the first) means a matrix.
    """
    rules = list(by_name)

    def scheme_of(source: str) -> Scheme | None:
        if is_plain(source):
            return None
        return next((scheme for name, scheme in rules if is_named(name, source)), default)

    return scheme_of


def all_but(plain: Iterable[object] | None, scheme: Scheme) -> SchemeOf:
    """One scheme for all matrices but the head and those in the modules that are `plain`."""
    names = ["lm_head", *map(str, plain or ())]
    return chosen(scheme, lambda source: is_within(names, source))


def one_of(name: str, value: T, allowed: Collection[T]) -> T:
    """The value of a field of `quantization_config`. Raises ConfigError: it is none of those allowed."""
    if value not in allowed:
        raise refused(name, value, ", ".join(map(str, allowed)))
    return value


def refused(name: str, value: object, allowed: str) -> ConfigError:
    """The error for a field of `quantization_config` whose value has no scheme."""
    return ConfigError(
        f"config.json's quantization_config has {name}={value!r}, which is not supported; supported: {allowed}",
        setting="quantization",
    )
