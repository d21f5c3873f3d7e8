"""The GGUF container: a file's header, checked against the file's size before it is used.

Knows the container (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3) and the sizes of number
types. Knows nothing of what the values mean.
"""

import dataclasses
import math
import mmap
import os
import struct
from typing import Any

from quire.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 1 << 20
MAX_STRING_BYTES = 64 << 20
MAX_DIMS = 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class TensorType:
    """A number type: so many values take so many bytes."""

    name: str
    values: int
    num_bytes: int


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: the slowest dimension first, in values.
        offset: in the file.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Of the fastest dimension."""
        return self.shape[-1] // self.type.values * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A file's header."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads values one after another; never beyond the end."""

    def __init__(self, data: mmap.mmap, path: str) -> None:
        self._data, self._path, self.at = data, path, 0

    def damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self._path} is not a whole GGUF file: {why} at byte {self.at}", setting="model")

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise self.damaged(f"{count} bytes are missing")
        self.at += count
        return self._data[self.at - count : self.at]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize("<" + code)
        return struct.unpack(f"<{count}{code}", self.take(size * count))

    def integer(self, code: str, what: str, most: int) -> int:
        (value,) = self.scalars(code, 1)
        if value > most:
            raise self.damaged(f"{what} is {value}, more than {most}")
        return int(value)

    def string(self) -> str:
        size = self.integer("Q", "a string's length", MAX_STRING_BYTES)
        return self.take(size).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise self.damaged(f"a value of unknown type {kind}")
        return self.scalars(SCALARS[kind], 1)[0]

    def _array(self) -> list[Any]:
        kind, count = self.integer("I", "an array's type", 12), self.integer("Q", "an array's length", 1 << 32)
        if kind in SCALARS:
            return list(self.scalars(SCALARS[kind], count))
        if kind != STRING:
            raise self.damaged("an array of arrays")
        if count * 8 > len(self._data) - self.at:
            raise self.damaged(f"{count} strings do not fit")
        return [self.string() for _ in range(count)]


def read_header(path: str) -> GGUFFile:
    """A file's metadata and where its tensors lie.
    Raises ConfigError: it is not a GGUF file of a known version, is shorter than it says, or has an unknown number type."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data, path), os.path.getsize(path))
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read: {error}", setting="model") from error


def _read(path: str, cursor: _Cursor, size: int) -> GGUFFile:
    if cursor.take(4) != MAGIC:
        raise cursor.damaged("it does not begin with GGUF")
    (version,) = cursor.scalars("I", 1)
    if version not in VERSIONS:
        raise cursor.damaged(f"version {version} is not one of {', '.join(map(str, VERSIONS))} (little-endian)")
    count = cursor.integer("Q", "the number of tensors", MAX_ENTRIES)
    entries = cursor.integer("Q", "the number of values", MAX_ENTRIES)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.integer("I", "a value's type", 12))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    found = [_read_tensor(cursor) for _ in range(count)]
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in found:
        placed = dataclasses.replace(tensor, offset=start + tensor.offset)
        if placed.offset + placed.num_bytes > size:
            raise cursor.damaged(f"tensor {placed.name} ends at byte {placed.offset + placed.num_bytes} of {size},")
        if placed.name in tensors:
            raise cursor.damaged(f"tensor {placed.name} is there twice,")
        tensors[placed.name] = placed
    return GGUFFile(path, metadata, tensors)


def _read_tensor(cursor: _Cursor) -> GGUFTensor:
    name = cursor.string()
    dims = cursor.integer("I", f"the number of {name}'s dimensions", MAX_DIMS)
    shape = tuple(cursor.integer("Q", f"a dimension of {name}", 1 << 40) for _ in range(dims))[::-1]
    kind = cursor.integer("I", f"{name}'s type", 1 << 16)
    offset = cursor.integer("Q", f"{name}'s offset", 1 << 48)
    if kind not in TYPES:
        raise cursor.damaged(f"tensor {name} has the unknown type {kind}")
    if not shape or 0 in shape or shape[-1] % TYPES[kind].values:
        raise cursor.damaged(f"tensor {name} has shape {list(shape)}, in blocks of {TYPES[kind].values}")
    return GGUFTensor(name, TYPES[kind], shape, offset)
