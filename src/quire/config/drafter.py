"""Whether a model can guess tokens for another one, and whether both know the same tokens.

Knows configurations and tokenizers' files. Knows no weights.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from quire.config.files import read_json_object
from quire.config.hf_config import HFConfig
from quire.config.hub.listing import HubModel
from quire.config.model import ModelConfig
from quire.config.speculative import SpeculativeConfig
from quire.errors import ConfigError
from quire.guards import is_mapping

MOST_PADDING = 1024
"""Rows behind the last token that models of one family have more or less of in their embeddings."""


def check_layout(config: SpeculativeConfig, num_stages: int) -> None:
    """Raises ConfigError: the model is laid out in a way in which none can guess for it."""
    if config.has_model and num_stages > 1:
        raise _refusal(
            f"method={config.method!r}",
            f"pipeline_parallel_size={num_stages} divides the model, and a drafter reads the whole; use tensor_parallel_size",
        )


def as_drafter(
    model: ModelConfig,
    config: SpeculativeConfig,
    path: str,
    hub: HubModel | None,
    hf_config: HFConfig,
    architecture: str,
) -> ModelConfig:
    """The settings of a drafter: those of its model, but for what its own checkpoint says."""
    return dataclasses.replace(
        model,
        model=config.model or model.model,
        path=path,
        hub=hub,
        hf_config=hf_config,
        architecture=architecture,
        quantization=config.quantization,
        revision=config.revision,
        added_tokens=0,
        hf_overrides={},
        rope_scaling=None,
        rope_theta=None,
    )


def check_drafter(drafter: ModelConfig, model: ModelConfig, config: SpeculativeConfig, num_ranks: int) -> None:
    """Raises ConfigError: the drafter's tokens are not the model's where they must be, or it cannot be laid out as asked."""
    if config.draft_tensor_parallel_size not in (None, 1, num_ranks):
        raise _refusal(
            f"draft_tensor_parallel_size={config.draft_tensor_parallel_size}",
            f"every rank has the whole drafter: 1, or tensor_parallel_size={num_ranks}, which means the same",
        )
    if config.method != "draft_model":  # a head has the model's tokens
        if model.added_tokens:
            raise _refusal(
                f"method={config.method!r}",
                f"a head has no rows for the tokens of lora_extra_vocab_size={model.added_tokens}; use draft_model or ngram",
            )
        return
    difference = differing_tokens(drafter, model)
    if difference and config.use_heterogeneous_vocab is False:
        why = f"{difference}, and use_heterogeneous_vocab is off: choose a smaller model of the same family"
        raise _refusal(f"model={config.model!r}", why)


def differing_tokens(drafter: ModelConfig, model: ModelConfig) -> str:
    """How a draft model's tokens differ from the model's; empty: they are the same."""
    if abs(drafter.vocab_size - model.own_vocab_size) > MOST_PADDING:
        return f"it has a vocabulary of {drafter.vocab_size} tokens, and {model.model!r} one of {model.own_vocab_size}"
    return _different_token(drafter.path, model.tokenizer_path or model.path)


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"speculative_config.{what} cannot be used: {why}", setting="speculative_config")


def _different_token(one: str, other: str) -> str:
    """How two folders' tokenizers differ; empty where they do not, or a folder has no tokenizer.json."""
    files = [os.path.join(folder, "tokenizer.json") for folder in (one, other)]
    if not all(map(os.path.isfile, files)):
        return ""
    first, second = (_vocabulary(file) for file in files)
    for token, number in first.items():
        if second.get(token, number) != number:
            return f"its tokenizer is another one ({token!r} is {number} there and {second[token]} here)"
    common = len(first.keys() & second.keys())
    return f"its tokenizer is another one ({common} tokens are the same)" if 2 * common < len(first) else ""


def _vocabulary(file: str) -> Mapping[str, Any]:
    model: Mapping[str, Any] = read_json_object(file, setting="speculative_config").get("model", {})
    vocabulary = model.get("vocab")
    return vocabulary if is_mapping(vocabulary) else {}
