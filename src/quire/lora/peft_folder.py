"""Reads an adapter as PEFT saves it: `adapter_config.json` and safetensors, to updates of the base model's matrices by name.

Knows files and names of tensors; knows nothing of our modules. Format: https://huggingface.co/docs/peft/developer_guides/checkpoint

Legend: R rank, K inputs, N outputs of a matrix.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from quire.adapters import CONFIG
from quire.errors import ConfigError

PREFIX, WEIGHTS = "base_model.model.", "adapter_model.safetensors"
MAX_RANK = 512
TRAINED_TOKENS = "TRAINABLE_TOKENS"
"""PEFT's `peft_type` of an adapter that has rows of tokens and nothing else."""

_PARTS = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "lora_embedding_A": "down",
    "lora_embedding_B": "up",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "lora_B.bias": "bias",
    "token_adapter.trainable_tokens_delta": "token_rows",
    "trainable_tokens_delta": "token_rows",
}
"""How names of tensors end, and what they are."""
_COPY = ".base_layer.weight"
"""How the copy of an embedding ends that PEFT saves with an update of it."""
NEW_ROWS_FILE, NEW_ROWS = (
    "new_embeddings.safetensors",
    {"input_embeddings": "embedding", "output_embeddings": "lm_head"},
)
"""A file beside an adapter, with its rows of new tokens: its tensors, and our modules."""
_REFUSED = {
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "megatron_config": "Megatron's layers",
    "layer_replication": "replicated layers",
}
"""Settings of PEFT that change what is computed, and that no layer here computes."""


@dataclasses.dataclass
class Update:
    """What is added to one matrix: scale * up @ down. An embedding's `down` is [R, tokens], `up` [D, R].

    Attributes:
        magnitude: [N], of DoRA: each row of the sum of matrix and update gets this length.
        whole: [N, K], in the place of the matrix; then there is no update.
        bias: [N], added to the outputs. `is_whole_bias`: it takes the place of the matrix's own.
        gain: [N], that outputs are multiplied by. input_gain: [K], that inputs are.
        token_rows: [tokens, D], in the place of an embedding's or a head's rows of these `tokens`.
        is_bare: it may be of a parameter that holds several matrices; its rank and scale are known when these are.
    """

    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    scale: float = 1.0
    magnitude: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    is_whole_bias: bool = False
    gain: torch.Tensor | None = None
    input_gain: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    tokens: tuple[int, ...] = ()
    is_bare: bool = False

    @property
    def rank(self) -> int:
        """R; 0 without an update."""
        return 0 if self.down is None else self.down.shape[-2]


@dataclasses.dataclass
class PeftAdapter:
    """An adapter's numbers on the host.

    Attributes:
        config: its adapter_config.json.
        updates: by the name of the base model's matrix.
        copies: of the base's matrices that have a row for each token, by name; they may have more tokens than the model here.
        new_rows: of tokens behind the model's own, by the module, as adapters of vLLM's older releases have them.
        virtual: a row for each virtual token, of its embedding, or of its keys and values in all layers. `is_keys`: the latter.
    """

    path: str
    config: Mapping[str, Any]
    updates: dict[str, Update]
    copies: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict[str, torch.Tensor])
    new_rows: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict[str, torch.Tensor])
    virtual: torch.Tensor | None = None
    is_keys: bool = False

    @property
    def max_rank(self) -> int:
        """Of all updates of single matrices."""
        return max((update.rank for update in self.updates.values() if not update.is_bare), default=0)


def read_lora(
    path: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]] | None = None
) -> PeftAdapter:
    """A LoRA adapter, or one of trained tokens alone.

    Args:
        tensors: in the place of the folder's.

    Raises:
        ConfigError: it needs what is not computed here, or a tensor is unknown, missing, or has another shape than its partner.
    """
    for setting, what in _REFUSED.items():
        if config.get(setting):
            raise ConfigError(f"{path}: {setting} is set in {CONFIG}, and {what} cannot be served", setting="lora_path")
    updates: dict[str, Update] = {}
    adapter = PeftAdapter(path, config, updates)
    adapter.new_rows = _new_rows(path)
    for name, tensor in tensors_of(path) if tensors is None else tensors:
        module, part = _split(path, name)
        if name.endswith(_COPY):
            adapter.copies[module.removesuffix(_COPY).removesuffix(".token_adapter")] = tensor
        if part:
            setattr(updates.setdefault(module, Update()), part, tensor)
        if part == "bias" and not name.endswith("lora_B.bias"):
            updates[module].is_whole_bias = True
    for module, update in updates.items():
        _check(adapter, module, update)
    if not updates:
        raise ConfigError(f"{path} has no tensors of an adapter", setting="lora_path")
    return adapter


def tensors_of(path: str) -> Iterable[tuple[str, torch.Tensor]]:
    """An adapter's tensors by name. Raises ConfigError: there are none, or a file is damaged."""
    file = Path(path) / WEIGHTS
    if not file.is_file():  # several files, or another name
        from quire.model_loader.safetensors_reader import SafetensorsReader  # the loader's package imports adapters

        return ((name, tensor[:]) for name, tensor in SafetensorsReader(path, [NEW_ROWS_FILE]).stream())
    return read_file(file).items()


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file by name. Raises ConfigError: it is damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is no safetensors file: {error}", setting="lora_path") from error


def _new_rows(path: str) -> dict[str, torch.Tensor]:
    file = Path(path) / NEW_ROWS_FILE
    tensors = read_file(file) if file.is_file() else {}
    if unknown := tensors.keys() - NEW_ROWS:
        raise ConfigError(f"{file} has {min(unknown)!r}; it may have {' and '.join(NEW_ROWS)}", setting="lora_path")
    return {NEW_ROWS[name]: rows for name, rows in tensors.items()}


def _split(path: str, name: str) -> tuple[str, str]:
    """The base model's matrix that a tensor belongs to, and which field of its update it is; no field: it says nothing new."""
    if not name.startswith(PREFIX):
        raise ConfigError(f"{path}: tensor {name!r} does not begin with {PREFIX!r}", setting="lora_path")
    within = name.removeprefix(PREFIX)
    for ending, part in _PARTS.items():
        if within.endswith(f".{ending}"):
            return within.removesuffix(f".{ending}"), part
    if within.endswith((_COPY, ".original_module.weight")):  # PEFT saves copies of what is the base's
        return within, ""
    within = within.replace(".base_layer.bias", ".bias")
    module, _, kind = within.rpartition(".")
    if kind in ("weight", "bias") and ".lora_" not in within:
        return re.sub(r"\.modules_to_save(\.default)?(?=\.|$)", "", module), {"weight": "whole", "bias": "bias"}[kind]
    known = ", ".join(_PARTS)
    raise ConfigError(f"{path}: tensor {name!r} is unknown; known endings are {known}", setting="lora_path")


def _check(adapter: PeftAdapter, module: str, update: Update) -> None:
    """Check an update's parts against one another and the configuration, and complete its scale."""
    refuse = functools.partial(_refuse, adapter, module)
    down, up = update.down, update.up
    if update.token_rows is not None:
        given = "token_indices" if adapter.config["peft_type"] == TRAINED_TOKENS else "trainable_token_indices"
        update.tokens = _trained_tokens(adapter.config.get(given), module)
        if any(each is not None for each in (down, up, update.whole, update.bias)):
            refuse("has trained tokens beside something else")
        if update.token_rows.shape[0] != len(update.tokens):
            refuse(f"has rows for {update.token_rows.shape[0]} tokens, and {given} {len(update.tokens)}")
        return
    if update.whole is not None or (down is None and up is None):
        if down is not None or up is not None or update.magnitude is not None:
            refuse("has both an update and a whole matrix")
        return
    if down is None or up is None:
        refuse(f"has {'lora_B' if down is None else 'lora_A'} alone, without its partner")
        return
    if down.ndim != 2 or up.ndim != 2 or down.shape[0] != up.shape[1]:
        refuse(f"lora_A is {list(down.shape)} and lora_B {list(up.shape)}: they must be [rank, in] and [out, rank]")
    if update.magnitude is not None:
        update.magnitude = update.magnitude.flatten()
    elif adapter.config.get("target_parameters"):
        own_rank = pattern_value(adapter.config.get("rank_pattern") or {}, module, adapter.config.get("r"))
        update.is_bare = module.endswith(".base_layer") or update.rank != own_rank
    if bool(adapter.config.get("use_dora")) != (update.magnitude is not None):
        refuse(
            f"use_dora is {adapter.config.get('use_dora')} in {CONFIG}, and lora_magnitude_vector is "
            f"{'missing' if update.magnitude is None else 'there'}"
        )
    if not update.is_bare:
        complete_scale(adapter, module, update)


def _refuse(adapter: PeftAdapter, module: str, why: str) -> None:
    raise ConfigError(f"{adapter.path}: {module}: {why}", setting="lora_path")


def _trained_tokens(given: Any, module: str) -> tuple[int, ...]:
    """The tokens whose rows of a module were trained: given for all modules, or by the end of their names."""
    if isinstance(given, Mapping):
        by_name: Mapping[str, Any] = given
        given = next((ids for name, ids in by_name.items() if f".{module}".endswith(f".{name}")), ())
    return tuple(given or ())


def complete_scale(adapter: PeftAdapter, module: str, update: Update) -> None:
    """An update's scale, as the configuration has it for a module. Raises ConfigError: its rank is another one."""
    refuse = functools.partial(_refuse, adapter, module)
    rank, config = update.rank, adapter.config
    expected = pattern_value(config.get("rank_pattern") or {}, module, config.get("r", rank))
    if rank != expected:
        refuse(f"has rank {rank}, and {CONFIG} says {expected}")
    if not 1 <= rank <= MAX_RANK:
        refuse(f"has rank {rank}; 1 to {MAX_RANK} can be served")
    alpha = pattern_value(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", rank))
    update.scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def pattern_value(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that a module's name ends with, as PEFT matches `rank_pattern` and `alpha_pattern`."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
