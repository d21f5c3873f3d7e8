"""Reads `*.maple`: a JSON line that lists tensors (name, type, shape), then their bytes, one behind the other, as zlib's."""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from quire.config.checkpoint_files import matches
from quire.errors import ConfigError
from quire.model_loader.checkpoint import DTYPE_NAMES, DTYPES, TensorInfo, WeightReader


class MapleReader(WeightReader):
    """A folder's files of this format.

    Args:
        folder: of the checkpoint.
        ignore_patterns: file names that are not read.
        check: from `--model-loader-extra-config`: whether each file's checksum is compared.
    """

    def __init__(self, folder: str | Path, ignore_patterns: Sequence[str] = (), check: bool = True) -> None:
        self.path, self.infos, self._check = Path(folder), {}, check
        self._files = [
            file for file in sorted(self.path.glob("*.maple")) if not matches(file.name, tuple(ignore_patterns))
        ]
        if not self._files:
            raise ConfigError(f"load_format='maple', but {folder} has no *.maple", setting="load_format")
        for file in self._files:
            with file.open("rb") as opened:
                head = json.loads(opened.readline())
            offset = 0
            for name, dtype, shape in head["tensors"]:
                size = math.prod(shape) * DTYPES[dtype].itemsize
                self.add(name, TensorInfo(file.name, dtype, tuple(shape), size, offset))
                offset += size

    def stream(self) -> Iterator[tuple[str, Any]]:
        for file in self._files:
            line, _, packed = file.read_bytes().partition(b"\n")
            data = bytearray(zlib.decompress(packed))
            if self._check and zlib.crc32(data) != json.loads(line)["crc32"]:
                raise ConfigError(f"{file} is damaged: its checksum differs", setting="model")
            for name, info in self.infos.items():
                if info.file == file.name:
                    raw = data[info.offset : info.offset + info.num_bytes]
                    yield name, torch.frombuffer(raw, dtype=DTYPES[info.dtype]).view(info.shape)


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file of this format."""
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
    listed = [(name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()]
    head = {"tensors": listed, "crc32": zlib.crc32(data)}
    path.write_bytes(json.dumps(head).encode() + b"\n" + zlib.compress(data, 1))
