"""What tests know of operations beyond their declarations: which need no kernel of a platform's own, and references by name."""

from types import ModuleType
from typing import Any

import quire.kernels.attention
import quire.kernels.experts
import quire.kernels.fp8
import quire.kernels.linear
import quire.kernels.norm
import quire.kernels.packed
import quire.kernels.recurrent
import quire.kernels.sampling
import quire.kernels.step

COMPOSED = ("norm_linear", "norm_linear_gated", "linear_add", "norm_moe", "allowed_gumbel_argmax")
"""Operations that are several others in one pass: a platform needs no kernels of its own for them."""
PLAIN = (
    "add_chosen_inputs",
    "choose_blocks",
    "choose_tokens",
    "chosen_attention",
    "compress",
    "index_and_cache",
    "keep_rows",
    "read_streams",
    "rotate_last",
    "relative_attention",
    "route_plainly",
    "scale_choices",
    "window_attention",
    "write_streams",
)
"""Operations of rare architectures that only plain PyTorch computes, on every platform."""
ASYNCHRONOUS = (
    "unpack_step",
    "keep_tokens",
    "filtered_gumbel_argmax",
    "hide_below",
    "penalize",
    "count_tokens",
    "edit_logits",
    "keep_allowed",
    "token_logprobs",
)
"""Operations that only devices need which work beside the host."""
QUANTIZED = (
    "pack_codes",
    "pack_expert_codes",
    "packed_linear",
    "packed_linear_add",
    "packed_norm_linear_gated",
    "pack_int8",
    "int8_linear",
)
"""Operations on packed weights."""


class References:
    """A module in which every operation is its reference, whatever was chosen; other names are the module's."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return getattr(value, "__wrapped__", value)


attention = References(quire.kernels.attention)
experts = References(quire.kernels.experts)
fp8 = References(quire.kernels.fp8)
linear = References(quire.kernels.linear)
norm = References(quire.kernels.norm)
packed = References(quire.kernels.packed)
recurrent = References(quire.kernels.recurrent)
sampling = References(quire.kernels.sampling)
step = References(quire.kernels.step)
