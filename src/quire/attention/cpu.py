"""The CPU backend: native paged attention, prefill and decode in one call, threads over requests, heads and KV splits."""

import torch

from quire.attention.interface import AttentionRequest, Supports
from quire.attention.paged import PagedBackend
from quire.kernels import ops

NATIVE_OPS = ("paged_attention", "rope_and_cache")


class CpuBackend(PagedBackend):
    """Native kernels on a CPU."""

    name = "cpu"

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        if request.num_heads % request.num_kv_heads:
            return Supports(False, f"{request.num_heads} heads do not share {request.num_kv_heads} KV heads evenly")
        if request.kv_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return Supports(False, f"pages of {request.kv_dtype} are not float32, float16 or bfloat16")
        if request.chunk > 0 and not request.causal:
            return Supports(False, "chunks in a layer that is not causal have no kernel")
        choices = ops.choices()
        for op in NATIVE_OPS:
            choice = choices.get(op)
            if choice is None or choice.chosen.platform != "cpu":
                reasons = "; ".join(why for _, why in choice.passed_over) if choice else "no kernel was chosen yet"
                return Supports(False, f"the native kernel {op!r} was not chosen ({reasons or 'none is registered'})")
        return Supports(True, "native kernels")
