"""Kinds of adapters beside LoRA, each read to the same numbers: (IA)3, vectors that steer a model's residual, virtual tokens.

Knows files and names of tensors; knows nothing of our modules. Methods: https://arxiv.org/abs/2205.05638 for (IA)3, and
https://arxiv.org/abs/2310.01405 for vectors, which are in llama.cpp's files: `direction.N` is added to what layer N gives.
"""

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.adapters import VIRTUAL, read_config, virtual_tokens_of
from quire.config.gguf.container import read_header
from quire.errors import ConfigError
from quire.lora.peft_folder import PREFIX, TRAINED_TOKENS, PeftAdapter, Update, read_file, read_lora, tensors_of

CONTROL = "CONTROL_VECTOR"
"""Our word in the place of PEFT's `peft_type`."""
_NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_adapter(path: str) -> PeftAdapter:
    """An adapter of any kind, from its folder, or from the file of a control vector.

    Raises:
        ConfigError: there is none, it is damaged, or its kind cannot be served.
    """
    if Path(path).is_file():
        return _read_control(path, {})
    config = read_config(path)
    kind = config["peft_type"]
    if kind not in _READERS:
        raise ConfigError(f"{path}: peft_type is {kind!r}; {', '.join(_READERS)} can be served", setting="lora_path")
    return _READERS[kind](path, config)


def _read_ia3(path: str, config: Mapping[str, Any]) -> PeftAdapter:
    updates: dict[str, Update] = {}
    for name, vector in tensors_of(path):
        if not (name.startswith(PREFIX) and name.endswith(".ia3_l")) or vector.ndim != 2 or 1 not in vector.shape:
            known = f"{PREFIX}….ia3_l of shape [out, 1] or [1, in]"
            raise ConfigError(
                f"{path}: tensor {name!r} {list(vector.shape)} is unknown; known are {known}", setting="lora_path"
            )
        module, flat = name.removeprefix(PREFIX).removesuffix(".ia3_l"), vector.flatten().float()
        updates[module] = Update(input_gain=flat) if vector.shape[0] == 1 else Update(gain=flat)
    return _of_updates(path, config, updates)


def _read_control(path: str, config: Mapping[str, Any]) -> PeftAdapter:
    """A file, or a folder whose `adapter_config.json` may have a `scale`."""
    vectors = _gguf_vectors(path) if path.endswith(".gguf") else _safetensors_vectors(path)
    updates: dict[str, Update] = {}
    for name, vector in vectors.items():
        number = name.removeprefix("direction.")
        if name == number or not number.isdecimal() or vector.ndim != 1:
            raise ConfigError(f"{path}: {name!r} {list(vector.shape)} is no vector direction.N", setting="lora_path")
        updates[f"layers.{number} residual"] = Update(bias=vector.float(), scale=float(config.get("scale", 1.0)))
    return _of_updates(path, config, updates)


def _read_virtual(path: str, config: Mapping[str, Any]) -> PeftAdapter:
    """Prompt tuning, P-tuning and prefix tuning, all of which PEFT saves as a row of numbers for each virtual token."""
    tensors, count = dict(tensors_of(path)), virtual_tokens_of(config)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    rows = tensors.get("prompt_embeddings")
    if rows is None or len(tensors) > 1 or rows.ndim != 2 or len(rows) != count:
        raise ConfigError(
            f"{path} has tensors {shapes}; it must have 'prompt_embeddings' alone, with {count} rows (num_virtual_tokens)",
            setting="lora_path",
        )
    if config.get("num_transformer_submodules") not in (None, 1):
        raise ConfigError(f"{path}: its virtual tokens are of an encoder and a decoder", setting="lora_path")
    is_keys = config["peft_type"] == "PREFIX_TUNING"
    return PeftAdapter(path, config, {}, virtual=rows.float(), is_keys=is_keys)


def _of_updates(path: str, config: Mapping[str, Any], updates: dict[str, Update]) -> PeftAdapter:
    if not updates:
        raise ConfigError(f"{path} has no tensors of an adapter", setting="lora_path")
    return PeftAdapter(path, config, updates)


def _safetensors_vectors(path: str) -> dict[str, torch.Tensor]:
    return dict(tensors_of(path)) if Path(path).is_dir() else read_file(Path(path))


def _gguf_vectors(path: str) -> dict[str, torch.Tensor]:
    vectors: dict[str, torch.Tensor] = {}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for tensor in read_header(path).tensors.values():
            dtype = _NUMBERS.get(tensor.type.name)
            if dtype is None:
                raise ConfigError(
                    f"{path}: {tensor.name} is {tensor.type.name}; {', '.join(_NUMBERS)} can be read",
                    setting="lora_path",
                )
            piece = bytearray(data[tensor.offset : tensor.offset + tensor.num_bytes])
            vectors[tensor.name] = torch.frombuffer(piece, dtype=dtype).view(tensor.shape)
    return vectors


_READERS: dict[str, Callable[[str, Mapping[str, Any]], PeftAdapter]] = {
    "LORA": read_lora,
    TRAINED_TOKENS: read_lora,
    "IA3": _read_ia3,
    CONTROL: _read_control,
    **dict.fromkeys(VIRTUAL, _read_virtual),
}
