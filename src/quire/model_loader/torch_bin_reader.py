"""Reads `pytorch_model*.bin`: only when the user asks (`load_format="pt"`), and only tensors (`weights_only=True`).

These files are pickles. PyTorch's restricted unpickler makes nothing but tensors and plain containers of them, but its
parser is a larger surface than safetensors' header, so nothing chooses this by itself. Tensors of the torchao library, which are
several in one, come under the names that the library gives these in safetensors; of the library nothing is run, or needed.
Knows files; knows nothing of models.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from quire.config.checkpoint_files import PICKLED_INDEX_NAME, pickled_files
from quire.errors import ConfigError
from quire.model_loader.checkpoint import DTYPE_NAMES, TensorInfo, WeightReader, list_files, read_index

_LIBRARY = "torchao."
_KINDS = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
"""Tensors of the library whose parts `quantization/torchao.py` knows."""


class _Parts(torch.Tensor):
    """Replaces a tensor of the library; its attributes are the tensors that it is made of."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a tensor that stands for its parts")


class _Fact:
    """Replaces any other object of the library: these say how it would compute, and config.json says the same."""

    def __init__(self, *args: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class TorchBinReader(WeightReader):
    """A folder's pickled weights: one file, or several with or without an index.

    Files are memory-mapped where their format allows it (zip files of torch 1.6 and later).

    Args:
        path: the folder.
        ignore_patterns: file names (shell patterns) that are not read.

    Raises:
        ConfigError: no such files, or one that holds something else than tensors.
    """

    def __init__(self, path: str | Path, ignore_patterns: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self._tensors: dict[str, torch.Tensor] = {}
        self.infos = {}
        weight_map = read_index(self.path, PICKLED_INDEX_NAME, ignore_patterns)
        for file in list_files(self.path, weight_map, pickled_files, ignore_patterns):
            for name, tensor in _read(self.path / file).items():
                dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
                self.add(name, TensorInfo(file, dtype, tuple(tensor.shape), tensor.nbytes, 0))
                self._tensors[name] = tensor

    def stream(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor), each handed over once."""
        while self._tensors:
            name = next(iter(self._tensors))
            yield name, self._tensors.pop(name)


def _stand_ins(file: Path) -> list[Any]:
    """For the library's types in a file."""
    try:
        names = [name for name in get_unsafe_globals_in_checkpoint(str(file)) if name.startswith(_LIBRARY)]
    except ValueError:  # a file from before torch 1.6, and so from before the library
        return []
    other = [name for name in names if name.endswith("Tensor") and name.rpartition(".")[2] not in _KINDS]
    if other:
        raise ConfigError(
            f"{file} holds tensors of the type {', '.join(other)}, which is not supported; supported: {', '.join(_KINDS)}",
            setting="model",
        )
    return [(_Parts if name.endswith("Tensor") else _Fact, name) for name in names]


def _parts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor by its name, or its parts by theirs."""
    if not isinstance(tensor, _Parts):
        return {name: tensor}
    module, _, kind = name.rpartition(".")
    parts = {part: value for part, value in vars(tensor).items() if isinstance(value, torch.Tensor)}
    return {f"{module}._{kind}_{part}": value for part, value in parts.items()}


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            with safe_globals(_stand_ins(file)):
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:  # files from before torch 1.6 are no zip files and cannot be mapped
            if "mmap" not in str(error):
                raise
            content = torch.load(file, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except Exception as error:  # the unpickler raises whatever a damaged file makes it meet
        first = (str(error).splitlines() or ["no message"])[0]
        raise ConfigError(
            f"{file} holds something else than tensors, or is damaged ({type(error).__name__}: {first}); nothing of it was "
            f"run. Convert it to safetensors where you trust it",
            setting="model",
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ConfigError(f"{file} is not a table of tensors by name", setting="model")
    return {part: value for name, tensor in content.items() for part, value in _parts(str(name), tensor).items()}
