"""A model with modules of its own: one layer of attention and a head. Pages, batching and sampling are Quire's.

Legend: T tokens of the step, D hidden, N heads, H head size, S positions that need logits, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import torch

from quire.attention.interface import AttentionParams, AttentionRequest
from quire.config.hf_config import HFConfig
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.errors import ConfigError
from quire.layers.interface import CausalLM, ModelContext, StepInputs
from quire.layers.parallel import ParallelPlan


class BeechModel(CausalLM):
    """x = embed(token); x = x + out(attention(qkv(x))); logits = head(x)."""

    can_replay = False

    def __init__(self, context: ModelContext) -> None:
        hf = context.hf
        self.context, self.heads = context, int(hf.num_attention_heads)
        self.hidden, self.vocab = int(hf.hidden_size), int(hf.vocab_size)
        self.head_dim = self.hidden // self.heads
        self.attention_backend = context.backend
        self.params = AttentionParams(self.heads, self.heads, self.head_dim, self.head_dim**-0.5)
        options: dict[str, Any] = {"dtype": context.dtype, "device": context.device}
        modules: dict[str, torch.nn.Module] = {
            "embed": torch.nn.Embedding(self.vocab, self.hidden, **options),
            "qkv": torch.nn.Linear(self.hidden, 3 * self.hidden, bias=False, **options),
            "out": torch.nn.Linear(self.hidden, self.hidden, bias=False, **options),
            "head": torch.nn.Linear(self.hidden, self.vocab, bias=False, **options),
        }
        self.modules = torch.nn.ModuleDict(modules).requires_grad_(False)
        self.kv_cache, self.group = torch.empty(0), 0
        self.hidden_TD = torch.empty(0)

    @classmethod
    def attention_requests(
        cls, hf: HFConfig, kv_dtype: torch.dtype, block_size: int, plan: ParallelPlan, deterministic: bool
    ) -> list[AttentionRequest]:
        if plan.size > 1:
            raise ConfigError("Beech runs on one rank", setting="tensor_parallel_size")
        heads = int(hf.num_attention_heads)
        size = int(hf.hidden_size) // heads
        return [AttentionRequest(heads, heads, size, kv_dtype, block_size, deterministic=deterministic)]

    @property
    def buffer_bytes(self) -> int:
        return self.context.max_tokens * self.hidden * 5 * self.context.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        parameters = sum(tensor.numel() for tensor in self.modules.parameters())
        return {
            "parameters": parameters,
            "weight_bytes": parameters * self.context.dtype.itemsize,
            "workspace_bytes": self.buffer_bytes,
            "hidden": self.hidden,
            "dtype": str(self.context.dtype).removeprefix("torch."),
        }

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        dtype = self.context.kv_dtype
        return [
            KVCacheSpec(
                kind=KVKind.FULL,
                block_size=self.context.block_size,
                bytes_per_token=2 * self.hidden * dtype.itemsize,
                num_kv_heads=self.heads,
                head_dim=self.head_dim,
                dtype=str(dtype).removeprefix("torch."),
            )
        ]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = dict(self.modules.named_parameters())
        for name, tensor in weights:
            if name not in missing:
                raise ConfigError(f"the checkpoint has {name!r}, which Beech does not know", setting="model")
            missing.pop(name).copy_(tensor)
        if missing:
            raise ConfigError(f"the checkpoint has no {', '.join(missing)}", setting="model")

    def bind_kv_cache(self, kv_caches: list[torch.Tensor], group_of_layer: list[int]) -> None:
        self.kv_cache, self.group = kv_caches[0], group_of_layer[0]

    @torch.no_grad()
    def forward(self, step: StepInputs) -> torch.Tensor:
        x_TD = self.modules["embed"](step.input_ids[: step.num_tokens].long())
        qkv = self.modules["qkv"](x_TD)
        mixed_TD = torch.empty_like(x_TD)
        metadata = step.attention[self.group]
        self.attention_backend.attend(qkv, self.kv_cache, metadata, self.params, mixed_TD, None)
        self.hidden_TD = x_TD + self.modules["out"](mixed_TD)
        return self.hidden_TD

    @torch.no_grad()
    def compute_logits(self, step: StepInputs) -> torch.Tensor:
        index = step.logits_index[: step.num_logits].long()
        return self.modules["head"](self.hidden_TD[index]).float()
