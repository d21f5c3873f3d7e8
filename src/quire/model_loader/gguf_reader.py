"""Reads a GGUF file's tensors under the names that the hub's checkpoints have, as the hub's checkpoints have them.

What the conversion to GGUF changed is changed back: the order of rows of q and k, ones that were added to norms, biases of
gates and ups that were separate. Matrices in block types come as bytes, row by row. Files are mapped; a tensor is read when it
is sliced.
"""

import dataclasses
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from quire.config.gguf.container import GGUFFile, GGUFTensor, read_header
from quire.config.gguf.families import Family, checkpoint_name
from quire.config.gguf.model_config import PLAIN, family_of
from quire.config.hf_config import HFConfig
from quire.model_loader.checkpoint import DTYPES, TensorInfo, WeightReader


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A tensor under its name in the hub's checkpoints.

    Attributes:
        expert: of a tensor with all experts', this one's part.
        other: the entry whose values alternate with this one's.
    """

    file: GGUFFile
    tensor: GGUFTensor
    expert: int | None = None
    other: "_Entry | None" = None


class GGUFReader(WeightReader):
    """The files that a configuration made of GGUF names.

    Args:
        hf: that configuration.

    Raises:
        ConfigError: a file is gone or damaged.
    """

    def __init__(self, hf: HFConfig) -> None:
        files = [read_header(str(path)) for path in hf.quantization_config.files]
        self._hf, self._family = hf, family_of(files[0])
        self._entries = _in_turn({name: entry for file in files for name, entry in _named(file, self._family)})
        self.path = Path(files[0].path)
        self.infos = {name: _whole_info(entry) for name, entry in self._entries.items()}

    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor), file by file."""
        mapped: dict[str, torch.Tensor] = {}
        for name, entry in self._entries.items():
            if entry.file.path not in mapped:
                mapped = {entry.file.path: _map(entry.file.path)}
            tensor = _view(mapped[entry.file.path], entry)
            if (other := entry.other) is not None:
                data = mapped[other.file.path] if other.file.path in mapped else _map(other.file.path)
                tensor = torch.stack((tensor, _view(data, other)), -1).flatten(-2)
            yield name, self._restored(name, tensor)

    def _restored(self, name: str, tensor: torch.Tensor) -> Any:
        """As the hub's checkpoint has it."""
        if self._family.adds_one and name.endswith("norm.weight"):
            return tensor.float() - 1
        part = name.removesuffix(".weight").removesuffix(".bias")
        heads = {"q_proj": self._hf.num_attention_heads, "k_proj": self._hf.num_key_value_heads}
        if self._family.permutes_heads and part.rpartition(".")[2] in heads:
            return heads_in_halves(tensor, heads[part.rpartition(".")[2]])
        if name.endswith("shared_expert_gate.weight"):
            return tensor.reshape(1, -1)
        return tensor


def _named(file: GGUFFile, family: Family) -> Iterator[tuple[str, _Entry]]:
    for tensor in file.tensors.values():
        name = checkpoint_name(family, tensor)
        if name is None:
            continue
        if "{expert}" not in name:
            yield name, _Entry(file, tensor)
            continue
        for expert in range(tensor.shape[0]):
            yield name.format(expert=expert), _Entry(file, tensor, expert)


def _in_turn(entries: dict[str, _Entry]) -> dict[str, _Entry]:
    """With the biases of gates and of ups as one tensor."""
    gate, up, both = (f".mlp.experts.{part}_proj_bias" for part in ("gate", "up", "gate_up"))
    for name in [name for name in entries if name.endswith(gate)]:
        before = name.removesuffix(gate)
        if before + up in entries:
            entries[before + both] = dataclasses.replace(entries.pop(name), other=entries.pop(before + up))
    return entries


def _whole_info(entry: _Entry) -> TensorInfo:
    """What a header would say of an entry, together with the one that alternates with it."""
    info = _info(entry)
    if entry.other is None:
        return info
    return dataclasses.replace(info, shape=(*info.shape[:-1], 2 * info.shape[-1]), num_bytes=2 * info.num_bytes)


def _info(entry: _Entry) -> TensorInfo:
    tensor, is_plain = entry.tensor, entry.tensor.type.name in PLAIN
    shape = tensor.shape if is_plain else (*tensor.shape[:-1], tensor.row_bytes)
    shape, num_bytes = (shape, tensor.num_bytes) if entry.expert is None else (shape[1:], tensor.num_bytes // shape[0])
    shape = (1, *shape) if "inp_shexp" in tensor.name and len(shape) == 1 else shape
    offset = tensor.offset + num_bytes * (entry.expert or 0)
    return TensorInfo(entry.file.path, tensor.type.name if is_plain else "U8", shape, num_bytes, offset)


def _map(path: str) -> torch.Tensor:
    """A file's bytes, read when they are used."""
    with open(path, "rb") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def _view(data: torch.Tensor, entry: _Entry) -> torch.Tensor:
    info = _info(entry)
    piece = data[info.offset : info.offset + info.num_bytes]
    dtype = DTYPES[info.dtype]
    # Offsets are multiples of 32 by default, but a file may say otherwise.
    aligned = piece if info.offset % dtype.itemsize == 0 else piece.clone()
    return aligned.view(dtype).view(info.shape)


class _Reordered:
    """A tensor with its rows in another order; only what is sliced is read."""

    def __init__(self, tensor: torch.Tensor, order: torch.Tensor) -> None:
        self._tensor, self._order = tensor, order

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        rows, *others = index
        dtype = self._tensor.dtype
        plain = self._tensor.view(torch.uint8) if dtype.itemsize == 1 else self._tensor
        return plain[self._order[rows]].view(dtype)[(slice(None), *others)]


def heads_in_halves(tensor: torch.Tensor, heads: int) -> _Reordered:
    """Rows 0, 2, 4 … of each head, then 1, 3, 5 …: rotation turns value i with i + half, not neighbours."""
    order = torch.arange(tensor.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)
    return _Reordered(tensor, order)
