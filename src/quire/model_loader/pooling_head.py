"""Reads the few matrices that a pooling model has on top of its layers. Knows files and names; applies nothing."""

import os
from collections.abc import Sequence

import torch

from quire.errors import ConfigError
from quire.layers.pooling.head import ACTIVATIONS, HeadLayer, LoadedLayer, PoolingHead
from quire.model_loader.safetensors_reader import SafetensorsReader


def load_head(
    layers: Sequence[HeadLayer], path: str, device: torch.device, *, dummy: bool = False, seed: int = 0
) -> PoolingHead:
    """Read a head's weights.

    Args:
        path: the checkpoint's folder.
        dummy: random weights from the seed; nothing is read.

    Raises:
        ConfigError: a weight is missing or has another shape, or an activation is unknown.
    """
    generator = torch.Generator().manual_seed(seed)
    readers: dict[str, SafetensorsReader] = {}
    loaded: list[LoadedLayer] = []
    for layer in layers:
        if layer.activation not in ACTIVATIONS:
            raise ConfigError(
                f"the head's activation {layer.activation!r} is not known; known: {', '.join(ACTIVATIONS)}",
                setting="model",
            )
        if dummy:
            tensors = _random(layer, generator)
        else:
            folder = os.path.join(path, layer.folder) if layer.folder else path
            if folder not in readers:
                readers[folder] = SafetensorsReader(folder)
            tensors = _read(layer, readers[folder])
        tensors = {name: tensor.to(device=device, dtype=torch.float32) for name, tensor in tensors.items()}
        loaded.append(
            LoadedLayer(
                tensors["weight"],
                tensors.get("bias"),
                ACTIVATIONS[layer.activation],
                tensors.get("norm"),
                tensors.get("norm_bias"),
                layer.norm_eps,
                () if layer.folder or layer.token_ids else layer.names,
            )
        )
    return PoolingHead(loaded)


def _random(layer: HeadLayer, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {"weight": torch.randn(layer.outputs, layer.inputs, generator=generator) / layer.inputs**0.5}
    if layer.bias:
        tensors["bias"] = torch.zeros(layer.outputs)
    if layer.norm:
        tensors["norm"] = torch.ones(layer.outputs)
    return tensors


def _read(layer: HeadLayer, reader: SafetensorsReader) -> dict[str, torch.Tensor]:
    name = _find(layer.names, "weight", reader)
    columns = reader.infos[name].shape[1:]
    if layer.token_ids:
        rows = [_tensor(reader, name, slice(token, token + 1)).float() for token in layer.token_ids]
        weight = rows[1] - rows[0] if len(rows) == 2 and layer.outputs == 1 else torch.cat(rows)
    else:
        weight = _tensor(reader, name)
    if tuple(weight.shape) != (layer.outputs, layer.inputs):
        raise ConfigError(
            f"{name} is {[weight.shape[0], *columns]}, config.json asks for [{layer.outputs}, {layer.inputs}]",
            setting="model",
        )
    tensors = {"weight": weight}
    if layer.bias:
        tensors["bias"] = _tensor(reader, _find(layer.names, "bias", reader))
    if layer.norm:
        tensors["norm"] = _tensor(reader, _find(layer.norm, "weight", reader))
        biases = [f"{name}.bias" for name in layer.norm if f"{name}.bias" in reader.infos]
        if biases:
            tensors["norm_bias"] = _tensor(reader, biases[0])
    return tensors


def _find(names: Sequence[str], suffix: str, reader: SafetensorsReader) -> str:
    wanted = [f"{name}.{suffix}" for name in names]
    for name in wanted:
        if name in reader.infos:
            return name
    raise ConfigError(
        f"{reader.path} has no {' or '.join(wanted)}, which the model's head needs: the checkpoint is not one of this "
        "architecture, or the setting convert names another use than its own",
        setting="model",
    )


def _tensor(reader: SafetensorsReader, name: str, rows: slice = slice(None)) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(reader.path / reader.infos[name].file, framework="pt") as handle:
        return handle.get_slice(name)[rows]
