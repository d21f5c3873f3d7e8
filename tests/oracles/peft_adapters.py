"""Adapters that PEFT makes for tiny models, and what PEFT computes with them: the oracle of `quire.lora`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from tests.oracles.tiny_models import load_oracle


def make_adapter(base: Path, path: Path, seed: int = 0, *, scale: float = 0.3, **config: Any) -> Path:
    """Write a LoRA adapter with random numbers for a checkpoint into a folder; returns that.

    Args:
        scale: of its numbers.
        config: fields of `peft.LoraConfig`.
    """
    model = peft.get_peft_model(load_oracle(base), peft.LoraConfig(**config))
    randomize(model, seed, scale)
    model.save_pretrained(str(path))
    return path


def make_virtual(base: Path, path: Path, kind: str, seed: int = 0, *, tokens: int = 5, **config: Any) -> Path:
    """Write an adapter of virtual tokens (`PROMPT_TUNING`, `P_TUNING` or `PREFIX_TUNING`) with random numbers into a folder."""
    configs = {
        "PROMPT_TUNING": peft.PromptTuningConfig,
        "P_TUNING": peft.PromptEncoderConfig,
        "PREFIX_TUNING": peft.PrefixTuningConfig,
    }
    torch.manual_seed(seed)  # PEFT's own start values
    model = peft.get_peft_model(
        load_oracle(base), configs[kind](task_type="CAUSAL_LM", num_virtual_tokens=tokens, **config)
    )
    randomize(model, seed, 0.5)
    model.save_pretrained(str(path))
    return path


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int, scale: float) -> None:
    """Every number that training would have changed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.mul_(1 + scale * torch.rand(parameter.shape, generator=generator))
        elif parameter.requires_grad and "modules_to_save" in name:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * scale)
        elif parameter.requires_grad:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


class PeftOracle:
    """A checkpoint with one of its adapters, or with none."""

    def __init__(self, base: Path, adapter: Path | None = None) -> None:
        self.model: Any = load_oracle(base)
        if adapter is not None:
            self.model = peft.PeftModel.from_pretrained(self.model, str(adapter)).eval()

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]: of the token that follows each; virtual tokens before them have no rows here."""
        logits = self.model(torch.tensor([list(token_ids)])).logits[0, -len(token_ids) :]
        return logits.float().log_softmax(-1)
