"""A checkpoint's tensors as every reader shows them: what there is, known before any is read, then one pass over them.

Knows files and number types; knows nothing of models.
"""

import abc
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.config.checkpoint_files import check_shards, matches, shards_of
from quire.errors import ConfigError, refusing

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Safetensors' names of number types."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor.

    Attributes:
        dtype: a name of `DTYPES`, or another that the file has.
        offset: its first byte in the file.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int


class WeightReader(abc.ABC):
    """The weights of one checkpoint.

    Attributes:
        path: its folder or file.
        infos: every tensor by name.
    """

    path: Path
    infos: dict[str, TensorInfo]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.num_bytes for info in self.infos.values())

    @abc.abstractmethod
    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor or what can be sliced as one), each to be used before the next one is asked for."""

    def add(self, name: str, info: TensorInfo) -> None:
        """Take note of a tensor.

        Raises:
            ConfigError: another file has one of this name.
        """
        if name in self.infos:
            raise ConfigError(
                f"{self.path}: tensor {name!r} is in both {self.infos[name].file} and {info.file}; remove one, or name it in "
                f"ignore_patterns",
                setting="model",
            )
        self.infos[name] = info


class OwnMemory:
    """A tensor, or what can be sliced as one, whose slices are copies."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        return self._tensor[index].clone()


def list_files(
    folder: Path,
    weight_map: dict[str, str],
    of_folder: Callable[[Sequence[str], Sequence[str], str], list[str]],
    ignore_patterns: Sequence[str],
) -> list[str]:
    """The files of an index, or of a folder without one, which `of_folder` chooses."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return sorted(set(weight_map.values())) or of_folder(names, ignore_patterns, str(folder))


def read_index(folder: Path, index_name: str, ignore_patterns: Sequence[str]) -> dict[str, str]:
    """The file of every tensor; empty without an index.

    Raises:
        ConfigError: the index is damaged, or names a file that is missing.
    """
    index = folder / index_name
    if not index.is_file():
        return {}
    with refusing(ValueError, setting="model", what=f"{index} is not an index with a weight_map"):
        content = json.loads(index.read_bytes())
    files = shards_of(content, index_name, str(folder))
    check_shards(files, {file for file in files if (folder / file).is_file()}, index_name, str(folder))
    return {name: file for name, file in content["weight_map"].items() if not matches(file, ignore_patterns)}
