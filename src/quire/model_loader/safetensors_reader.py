"""Reads a checkpoint's safetensors: what is there (from headers alone), then the tensors in one pass, file by file.

Files are memory-mapped and tensors sliced lazily: a rank touches only its part, and nothing is held twice. Knows files;
knows nothing of models. Format: https://huggingface.co/docs/safetensors
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.config.checkpoint_files import INDEX_NAME, safetensors_files
from quire.errors import ConfigError
from quire.model_loader.checkpoint import DTYPES, TensorInfo, WeightReader, list_files, read_index

MAX_HEADER_BYTES = 100 << 20
SPAN_BYTES = 128 << 20
"""A file is mapped anew after this much of it was read: pages of a mapping count as the process's own memory until it ends."""


class SafetensorsReader(WeightReader):
    """A folder's weights: one file, or several with or without an index.

    Args:
        path: the folder.
        ignore_patterns: file names (shell patterns) that are not read.

    Raises:
        ConfigError: no weights, only pickled ones, a missing shard, or a damaged file.
    """

    def __init__(self, path: str | Path, ignore_patterns: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self.infos = {}
        weight_map = read_index(self.path, INDEX_NAME, ignore_patterns)
        for file in list_files(self.path, weight_map, safetensors_files, ignore_patterns):
            for name, info in _read_header(self.path / file).items():
                if weight_map and weight_map.get(name, file) != file:
                    continue
                self.add(name, info)
        absent = sorted(set(weight_map) - set(self.infos))
        if absent:
            raise ConfigError(
                f"{self.path / INDEX_NAME} names {len(absent)} tensors that are not in their files, first {absent[0]!r}",
                setting="model",
            )

    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, lazily read slices), in the order in which they lie on the disk. A slice is to be used before the next
        one is asked for."""
        from safetensors import SafetensorError, safe_open

        spans = list(self._spans())
        for number, (file, names) in enumerate(spans):
            for ahead, wanted in spans[number + 1 : number + 2]:
                self._read_ahead(ahead, wanted)
            try:
                with safe_open(self.path / file, framework="pt") as handle:
                    for name in names:
                        yield name, handle.get_slice(name)
            except SafetensorError as error:
                raise _damaged(self.path / file, str(error)) from error

    def _read_ahead(self, file: str, names: list[str]) -> None:
        """Let the system fetch a stretch from the disk while the one before it is used."""
        first, last = self.infos[names[0]], self.infos[names[-1]]
        if hasattr(os, "posix_fadvise"):
            descriptor = os.open(self.path / file, os.O_RDONLY)
            try:
                size = last.offset + last.num_bytes - first.offset
                os.posix_fadvise(descriptor, first.offset, size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)

    def _spans(self) -> Iterator[tuple[str, list[str]]]:
        """Stretches of a file, (file, names in their order on the disk), of about `SPAN_BYTES` each."""
        by_file: dict[str, list[tuple[int, str]]] = {}
        for name, info in self.infos.items():
            by_file.setdefault(info.file, []).append((info.offset, name))
        for file, entries in by_file.items():
            entries.sort()
            span: list[str] = []
            begin = entries[0][0]
            for offset, name in entries:
                if span and offset - begin >= SPAN_BYTES:
                    yield file, span
                    span, begin = [], offset
                span.append(name)
            yield file, span


def _damaged(file: Path, why: str) -> ConfigError:
    return ConfigError(f"{file} is not a whole safetensors file ({why}); download it again", setting="model")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in its header twice")
    return values


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _damaged(file, f"header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length), object_pairs_hook=_unique)
            infos = {
                name: TensorInfo(
                    file=file.name,
                    dtype=str(entry["dtype"]),
                    shape=tuple(int(n) for n in entry["shape"]),
                    num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
                    offset=8 + length + int(entry["data_offsets"][0]),
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _damaged(file, repr(error)) from error
    for name, info in infos.items():
        if info.dtype in DTYPES and math.prod(info.shape) * DTYPES[info.dtype].itemsize != info.num_bytes:
            why = f"{name} has {info.num_bytes} bytes for {info.dtype} {list(info.shape)}"
            raise _damaged(file, why)
    end = max((info.offset + info.num_bytes for info in infos.values()), default=0)
    if end > size:
        raise _damaged(file, f"tensors end at byte {end} of {size}")
    return infos
