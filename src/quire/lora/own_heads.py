"""Adapters' own heads of pooling models: the few matrices on top of the layers, as a fine-tune of a classifier has them.

A head is small: each adapter that changes it has all of it, in float32, and no product has an update beside it.
Knows names and tensors; knows nothing of slots.
"""

import dataclasses
from collections.abc import Mapping

import torch

from quire.errors import ConfigError
from quire.layers.pooling.head import LoadedLayer, PoolingHead
from quire.lora.merging import changed, changed_bias, shape_of
from quire.lora.peft_folder import PeftAdapter, Update


def take_head(adapter: PeftAdapter, head: PoolingHead) -> dict[str, torch.Tensor]:
    """Take out of an adapter what it changes of a head: the changed tensors, as `with_tensors` takes them.

    Raises:
        ConfigError: they are of another size, or changed in a way that a head cannot be.
    """
    tensors: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(head.layers):
        for name in layer.names:
            update = adapter.updates.pop(name, None)
            if update is None:
                continue
            if problem := _problem(layer, update):
                raise ConfigError(
                    f"{adapter.path} does not fit the model's head: {name} {problem}", setting="lora_path"
                )
            tensors[f"{number}.weight"] = changed(layer.weight_OI.cpu(), update)
            if layer.bias_O is not None:
                tensors[f"{number}.bias"] = changed_bias(layer.bias_O.cpu(), update)
    return tensors


def with_tensors(head: PoolingHead, tensors: Mapping[str, torch.Tensor]) -> PoolingHead:
    """A head with these tensors in the place of its own."""
    return PoolingHead(
        [
            dataclasses.replace(
                layer,
                weight_OI=tensors.get(f"{number}.weight", layer.weight_OI),
                bias_O=tensors.get(f"{number}.bias", layer.bias_O),
            )
            for number, layer in enumerate(head.layers)
        ]
    )


def _problem(layer: LoadedLayer, update: Update) -> str:
    """Why a layer cannot be changed so; empty: it can."""
    vectors, own = (update.token_rows, update.gain, update.input_gain), layer.bias_O
    wanted, given = list(layer.weight_OI.shape), shape_of(update)
    has_other_bias = update.bias is not None and (own is None or update.bias.shape != own.shape)
    reasons = {
        "can have an update, or be whole, and nothing else": update.is_bare
        or any(each is not None for each in vectors),
        f"is {wanted} in the model, and {given} in the adapter": bool(given) and given != wanted,
        "has a bias in the adapter that the model's does not have": has_other_bias,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")
