"""A rank's finished weights in files, and back: `load_format="sharded_state"`.

What is kept is what layers use: sliced for the rank, rounded and packed as the platform's kernels want it. Reading it needs no
assembling, but only the same version of Quire, model, formats, ranks and kernels can: a fingerprint says so. Weights in a number
format are kept in the layout that all kernels know, and packed when they are read. Knows weights and files; knows nothing of
how they came to be.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch

from quire.config.checkpoint_files import description_files
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.types import LinearWeight
from quire.layers.assembly import NormWeight, Weight
from quire.layers.decoder import Decoder
from quire.quantization import join
from quire.version import __version__

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_BYTES = 5 << 30
_TENSOR, _LIST = "tensor", "list"


def fingerprint(model: Decoder) -> dict[str, str]:
    """What must be equal where a state is saved and where it is loaded; each by itself, so that an error can name it."""
    packing = {op: choice.chosen.platform for op, choice in ops.choices().items() if op.startswith(("pack", "fp8"))}
    parts: dict[str, Any] = {
        "quire": __version__,
        "model": hashlib.blake2b(repr(model.spec).encode(), digest_size=16).hexdigest(),
        "dtype": str(model.dtype),
        "quantization": model.linear_method.name,
        "rank": f"{model.plan.rank} of {model.plan.size}",
        "kernels": json.dumps(packing, sort_keys=True),
    }
    return {name: str(value) for name, value in parts.items()}


def save_state(
    model: Decoder,
    weights: Iterable[tuple[str, Weight]],
    folder: str,
    pattern: str = PATTERN,
    max_bytes: int = MAX_BYTES,
) -> list[str]:
    """Write finished weights, each as it comes; returns the files' names.

    Args:
        pattern: of file names, with `{rank}` and `{part}`.
        max_bytes: a file is closed when it holds so much.

    Raises:
        ConfigError: the pattern lacks a part, or there are such files already.
    """
    if "{rank}" not in pattern or "{part}" not in pattern:
        raise ConfigError(f"pattern={pattern!r} must contain {{rank}} and {{part}}", setting="pattern")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    there = sorted(target.glob(pattern.format(rank=model.plan.rank, part="*")))
    if there:
        raise ConfigError(f"{there[0]} exists already; name an empty folder", setting="path")
    files: list[str] = []
    tensors: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}

    def write() -> None:
        from safetensors.torch import save_file

        name = pattern.format(rank=model.plan.rank, part=len(files))
        save_file(tensors, target / name, fingerprint(model) | {"weights": json.dumps(described)})
        files.append(name)
        tensors.clear()
        described.clear()

    for name, weight in weights:
        described[name] = _describe(name, weight, tensors)
        if sum(tensor.nbytes for tensor in tensors.values()) >= max_bytes:
            write()
    if described:
        write()
    return files


def load_state(model: Decoder, folder: str, pattern: str = PATTERN) -> Iterator[tuple[str, Weight]]:
    """The weights of this rank, as they were saved.

    Raises:
        ConfigError: no files of this rank, or ones that were saved by another version, model, format, rank or kernels.
    """
    from safetensors import safe_open

    files = sorted(Path(folder).glob(pattern.format(rank=model.plan.rank, part="*")))
    if not files:
        raise ConfigError(
            f"load_format='sharded_state', but {folder} has no {pattern.format(rank=model.plan.rank, part='*')}: save it "
            f"with LLM.save_sharded_state and the same tensor_parallel_size",
            setting="load_format",
        )
    mine = fingerprint(model)
    for file in files:
        with safe_open(file, framework="pt", device=str(model.device)) as handle:
            saved: dict[str, str] = handle.metadata() or {}
            other = [
                f"{name}={saved.get(name)!r} (here {value!r})"
                for name, value in mine.items()
                if saved.get(name) != value
            ]
            if other:
                raise ConfigError(
                    f"{file} was saved with {'; '.join(other)}: save it again here", setting="load_format"
                )
            for name, description in json.loads(saved["weights"]).items():
                yield name, _restore(name, description, handle)


def copy_description(source: str, folder: str) -> None:
    """Copy what a model needs besides its weights (configuration, tokenizer, templates); what is there already stays."""
    names = [file.relative_to(source).as_posix() for file in sorted(Path(source).rglob("*")) if file.is_file()]
    for name in description_files(names):
        target = Path(folder) / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(source) / name, target)


def _describe(name: str, weight: Weight, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A weight as plain values; its tensors go to `tensors`."""
    if isinstance(weight, torch.Tensor):
        tensors[name] = weight.contiguous()
        return {"class": _TENSOR}
    if isinstance(weight, list):  # experts, one by one
        return {"class": _LIST, _LIST: [_describe(f"{name}:{i}", each, tensors) for i, each in enumerate(weight)]}
    values: dict[str, Any] = {"class": type(weight).__name__}
    for field in dataclasses.fields(weight):
        value = getattr(weight, field.name)
        if isinstance(value, torch.Tensor):
            tensors[f"{name}:{field.name}"] = value.contiguous()
            values[field.name] = {_TENSOR: f"{name}:{field.name}"}
        elif field.name == "layout" and value is not None:
            raise ValueError(f"{name} is in a kernel's own layout")
        elif isinstance(value, torch.dtype):
            values[field.name] = {"dtype": str(value).removeprefix("torch.")}
        else:
            values[field.name] = value
    return values


def _restore(name: str, description: dict[str, Any], handle: Any, is_ready: bool = True) -> Weight:
    kind = description.pop("class")
    if kind == _TENSOR:
        return handle.get_tensor(name)
    if kind == _LIST:
        experts = [_restore(f"{name}:{i}", each, handle, False) for i, each in enumerate(description[_LIST])]
        return cast(list[LinearWeight], experts)
    values: dict[str, Any] = {}
    for field, value in description.items():
        if isinstance(value, dict):
            (what, of), *_ = value.items()
            values[field] = handle.get_tensor(of) if what == _TENSOR else getattr(torch, of)
        else:
            values[field] = value
    weight = _classes()[kind](**values)
    return join.ready(weight) if is_ready and isinstance(weight, LinearWeight) else weight


def _classes() -> dict[str, Any]:
    """Every class that a finished weight may have, by name."""
    found: dict[str, Any] = {NormWeight.__name__: NormWeight}
    waiting: list[type] = [LinearWeight]
    while waiting:
        kind = waiting.pop()
        found[kind.__name__] = kind
        waiting += kind.__subclasses__()
    return found
