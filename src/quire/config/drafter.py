"""Whether a model can guess tokens for another one: both must know the same tokens.

Knows configurations and tokenizers' files. Knows no weights.
"""

import os
from collections.abc import Mapping
from typing import Any

from quire.config.files import read_json_object
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


def check_drafter(drafter: ModelConfig, model: ModelConfig, config: SpeculativeConfig, num_ranks: int) -> None:
    """Raises ConfigError: the drafter's tokens are not the model's, or it cannot be laid out as asked."""
    if config.draft_tensor_parallel_size not in (None, 1, num_ranks):
        raise _refusal(
            f"draft_tensor_parallel_size={config.draft_tensor_parallel_size}",
            f"every rank has the whole drafter: 1, or tensor_parallel_size={num_ranks}, which means the same",
        )
    if config.method != "draft_model":  # a head has the model's tokens
        return
    name = f"model={config.model!r}"
    if abs(drafter.vocab_size - model.vocab_size) > MOST_PADDING:
        raise _refusal(
            name,
            f"it has a vocabulary of {drafter.vocab_size} tokens, and {model.model!r} one of {model.vocab_size}: a drafter "
            "needs the same tokenizer; choose a smaller model of the same family",
        )
    other = _different_token(drafter.path, model.tokenizer_path)
    if other:
        raise _refusal(name, f"its tokenizer is another one ({other}): choose a smaller model of the same family")


def _refusal(what: str, why: str) -> ConfigError:
    return ConfigError(f"speculative_config.{what} cannot be used: {why}", setting="speculative_config")


def _different_token(one: str, other: str) -> str:
    """A token that two folders' tokenizers number differently; empty where there is none, or a folder has no tokenizer.json."""
    files = [os.path.join(folder, "tokenizer.json") for folder in (one, other)]
    if not other or not all(map(os.path.isfile, files)):
        return ""
    first, second = (_vocabulary(file) for file in files)
    for token, number in first.items():
        if second.get(token, number) != number:
            return f"{token!r} is {number} there and {second[token]} here"
    return ""


def _vocabulary(file: str) -> Mapping[str, Any]:
    model: Mapping[str, Any] = read_json_object(file, setting="speculative_config").get("model", {})
    vocabulary = model.get("vocab")
    return vocabulary if is_mapping(vocabulary) else {}
