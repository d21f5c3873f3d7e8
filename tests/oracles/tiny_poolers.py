"""Tiny random pooling checkpoints made by Transformers, and what Transformers says of a prompt, without padding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.oracles.tiny_models import make_tiny_model


def load_pooling_oracle(path: Path, architecture: str) -> Any:
    """The checkpoint as this class of Transformers, with its eager attention."""
    import transformers

    return (
        getattr(transformers, architecture)
        .from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


@torch.no_grad()
def hidden_states(oracle: Any, prompt: Sequence[int], **inputs: Any) -> torch.Tensor:
    """Float32 [T, D] after the last norm: of a bare model, or of the one inside a model with a head."""
    trunk = getattr(oracle, oracle.base_model_prefix, oracle)
    return trunk(input_ids=torch.tensor([list(prompt)]), **inputs).last_hidden_state[0].float()


@torch.no_grad()
def logits(oracle: Any, prompt: Sequence[int], **inputs: Any) -> torch.Tensor:
    """Of one prompt: [labels], or [T, labels] of a token classifier."""
    return oracle(input_ids=torch.tensor([list(prompt)]), **inputs).logits[0].float()


def pooled(hidden_TD: torch.Tensor, kind: str) -> torch.Tensor:
    """One vector, by the definition of each kind."""
    length = len(hidden_TD)
    weights = torch.arange(1, length + 1).float()
    return {
        "last": lambda: hidden_TD[-1],
        "cls": lambda: hidden_TD[0],
        "mean": lambda: hidden_TD.mean(0),
        "mean_sqrt": lambda: hidden_TD.sum(0) / length**0.5,
        "weighted_mean": lambda: (hidden_TD * weights[:, None]).sum(0) / weights.sum(),
        "max": lambda: hidden_TD.max(0).values,
    }[kind]()


__all__ = ["hidden_states", "load_pooling_oracle", "logits", "make_tiny_model", "pooled"]
