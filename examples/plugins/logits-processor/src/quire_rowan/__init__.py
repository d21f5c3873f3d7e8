"""A logits processor of the engine: requests turn it on with `extra_args={"rowan": [token ids]}` (`vllm_xargs` over HTTP)."""

from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.sample.logits_processor import LogitsProcessor
from quire.sampling_params import SamplingParams


class Processor(LogitsProcessor):
    """Forbids the token ids that a request names."""

    def __init__(self, config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.vocab_size = config.model.vocab_size
        self.banned: dict[int, list[int]] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        wanted: Any = (params.extra_args or {}).get("rowan", [])
        if not isinstance(wanted, list) or not all(isinstance(item, int) for item in wanted):
            raise ValueError(f"rowan is {wanted!r}; it must be a list of token ids")

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        ids = (params.extra_args or {}).get("rowan", [])
        if ids:
            self.banned[row] = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        return bool(ids)

    def remove_row(self, row: int) -> None:
        del self.banned[row]

    def apply(self, logits_NV: torch.Tensor, rows_N: np.ndarray) -> torch.Tensor:
        for logits_V, row in zip(logits_NV, rows_N.tolist(), strict=True):
            logits_V[self.banned[row]] = float("-inf")
        return logits_NV
