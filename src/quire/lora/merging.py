"""One adapter added to the weights while they are read (`--merge-lora`): the fine-tuned model, as fast as its base.

Sums are made in float32 before a number format of our own, if one is asked for, rounds them. Knows names and tensors of a
checkpoint; knows nothing of slots.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from quire.adapters import read_config
from quire.config.engine import LoadConfig
from quire.config.hub import find_adapter
from quire.config.hub.listing import HubSettings
from quire.errors import ConfigError
from quire.layers.assembly import Sliceable
from quire.layers.decoder import Decoder
from quire.layers.linear import COLUMNS, ROWS
from quire.layers.weights import CheckpointTensor, canonical_name
from quire.lora.peft_folder import PeftAdapter, Update, read_lora

SETTING = "merge_lora"


def merged(
    model: Decoder, load: LoadConfig, tensors: Iterable[tuple[str, Sliceable]]
) -> Iterator[tuple[str, Sliceable]]:
    """A checkpoint's tensors, those that the adapter `load.merge_lora` changes as it changes them.

    Raises:
        ConfigError: the adapter does not fit, or the sum cannot be made; lists all targets that are at fault.
    """
    assert load.merge_lora is not None
    path = find_adapter(load.merge_lora, HubSettings(cache=load.download_dir, token=load.hf_token))
    config = read_config(path)
    if config["peft_type"] != "LORA":
        raise ConfigError(f"{path}: peft_type is {config['peft_type']!r}; LORA can be merged", setting=SETTING)
    adapter = read_lora(path, config)
    weights, biases = _targets(model, adapter)
    for name, tensor in tensors:
        canonical = canonical_name(name, model.sources, model.spec)
        if canonical in weights:
            yield name, _merge(tensor, weights.pop(canonical), model.sources[canonical])
        elif canonical in biases:
            stored: Any = tensor[:]
            yield name, changed_bias(stored, biases.pop(canonical))
        else:
            yield name, tensor
    if weights or biases:
        left = ", ".join(sorted([*weights, *biases])[:10])
        raise ConfigError(f"{path} changes tensors that the checkpoint does not have: {left}", setting=SETTING)


def _targets(model: Decoder, adapter: PeftAdapter) -> tuple[dict[str, Update], dict[str, Update]]:
    """The updates by the names of the checkpoint's matrices and of its biases."""
    weights, biases, wrong = dict[str, Update](), dict[str, Update](), list[str]()
    for name, update in adapter.updates.items():
        weight, bias = (canonical_name(f"{name}.{suffix}", model.sources, model.spec) for suffix in ("weight", "bias"))
        source = model.sources.get(weight)
        problem = _problem(model, source, update, has_bias=bias in model.sources)
        if problem:
            wrong.append(f"{name} {problem}")
        if update.whole is not None or update.down is not None:
            weights[weight] = update
        if update.bias is not None:
            biases[bias] = update
    if wrong:
        more = f" … and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ConfigError(
            f"{adapter.path} cannot be merged ({len(wrong)} targets): {'; '.join(wrong[:10])}{more}", setting=SETTING
        )
    return weights, biases


def _problem(model: Decoder, source: CheckpointTensor | None, update: Update, *, has_bias: bool) -> str:
    """Why an update cannot be merged; empty: it can."""
    hint = " (the checkpoint is quantized)" if any(each.is_decoded for each in model.sources.values()) else ""
    reasons = {
        "is of a parameter that holds several matrices: serve the adapter beside the model (enable_lora)": update.is_bare,
        "has trained tokens: serve the adapter beside the model (enable_lora)": update.token_rows is not None,
        f"is not a plain matrix of this model{hint}": source is None,
    }
    if source is not None:
        is_table = source.module.name == "embedding"
        wanted = [source.rows, *([] if source.columns is None else [source.module.columns])]
        given = shape_of(update)
        given = (
            given[::-1] if is_table and update.whole is None else given
        )  # an update of it is made the other way round
        reasons |= {
            "is quantized in the checkpoint: the sum would be rounded again, so serve the adapter beside it (enable_lora)": (
                source.is_decoded
            ),
            "is one of several experts' matrices": source.is_stack,
            "is the head, too, which the sum would change with it": model.spec.tied_embeddings and is_table,
            "has a bias, and the model's matrix has none": update.bias is not None and not has_bias,
            f"is {wanted} in the model, and {given} in the adapter": bool(given) and given != wanted,
        }
    return next((why for why, is_so in reasons.items() if is_so), "")


def shape_of(update: Update) -> list[int]:
    """Of what an update is added to, or replaces; empty: of nothing but a bias."""
    if update.whole is not None:
        return list(update.whole.shape)
    return [] if update.down is None or update.up is None else [update.up.shape[0], update.down.shape[1]]


def _merge(tensor: Sliceable, update: Update, source: CheckpointTensor) -> torch.Tensor:
    """A tensor of the checkpoint, in its own layout, in float32."""
    stored: Any = tensor[:]
    is_table = source.module.name == "embedding" and update.whole is None  # an update of it is made the other way round
    is_transposed = is_table or (bool(source.stored.axes) and source.stored.axes == (COLUMNS, ROWS))
    changed_NK = changed(stored.T if is_transposed else stored, update)
    return changed_NK.T.contiguous() if is_transposed else changed_NK


def changed(weight_NK: torch.Tensor, update: Update) -> torch.Tensor:
    """A matrix as an adapter changes it, in float32."""
    if update.whole is not None:
        return update.whole.float()
    if update.down is None or update.up is None:
        return weight_NK.float()
    changed_NK = weight_NK.float() + update.scale * (update.up.float() @ update.down.float())
    if update.magnitude is not None:
        changed_NK *= (update.magnitude.float() / changed_NK.norm(dim=1))[:, None]
    return changed_NK


def changed_bias(bias_N: torch.Tensor, update: Update) -> torch.Tensor:
    """The same of its bias."""
    if update.bias is None:
        return bias_N.float()
    if update.is_whole_bias or update.whole is not None:
        return update.bias.float()
    return bias_N.float() + update.scale * update.bias.float()
