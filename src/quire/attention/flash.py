"""The flash backend: FlashAttention-4 (`flash_attn.cute`, Dao et al.) over our pages.

Of that library it takes the function behind `flash_attn_varlen_func`, which also takes the tensor that results go to.
Knows that function's arguments: pages as [P, S, K, H] with any strides but the last, `page_table` and `seqused_k` by request,
`cu_seqlens_q`, windows as tokens to the left and to the right, sinks as one logit a head. Kernels are compiled by CUTLASS' own
compiler at their first use, some seconds each.
"""

import importlib
import inspect

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.attention.library import LibraryBackend
from quire.errors import ConfigError
from quire.extras import install_command

MODULE, FUNCTION = "flash_attn.cute.interface", "_flash_attn_fwd"
ARGUMENTS = (
    "q k v cu_seqlens_q seqused_k max_seqlen_q max_seqlen_k page_table softmax_scale causal softcap window_size_left "
    "window_size_right learnable_sink num_splits out"
)
"""Names of the function's arguments that we give."""


class FlashBackend(LibraryBackend):
    """FlashAttention-4 for prompts, on Hopper and Blackwell, and our own kernels where all requests compute one token: on an
    H200 those were faster, and a decoded row of 4.0.0b36 was wrong (`bench/results/h200-attention-backends.json`)."""

    name = "flash"
    package = "flash-attn-4"
    extra = "flash"
    serves_decode = False

    def __init__(self) -> None:
        super().__init__()
        self._attend = load()

    @classmethod
    def why_not(cls, request: AttentionRequest, capability: tuple[int, int]) -> str | None:
        major = capability[0]
        if major not in (9, 10, 11):
            return f"compute capability {major}.{capability[1]}: its pages need 9.0, 10 or 11"
        if major > 9 and request.head_dim > 128 and request.head_dim != 256:
            return f"heads of {request.head_dim} on compute capability {major}: up to 128, or 256"
        if request.head_dim % 16:
            return f"heads of {request.head_dim}: multiples of 16"
        return None

    def attend_pages(
        self,
        q_TNH: torch.Tensor,
        kv_cache: torch.Tensor,
        tables_BP: torch.Tensor,
        lens_B: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_TNH: torch.Tensor,
    ) -> None:
        count = metadata.num_requests
        if params.causal:
            left, right = params.window - 1 if params.window else None, 0
        else:
            left = right = params.window // 2 if params.window else None
        self._attend(
            q_TNH,
            kv_cache[0].transpose(1, 2),
            kv_cache[1].transpose(1, 2),
            cu_seqlens_q=metadata.query_start[: count + 1],
            seqused_k=metadata.seq_lens[:count],
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=min(metadata.max_seq_len, tables_BP.shape[1] * metadata.block_size),
            page_table=tables_BP,
            softmax_scale=params.scale,
            causal=params.causal,
            softcap=params.soft_cap,
            window_size_left=left,
            window_size_right=right,
            learnable_sink=params.sinks,
            num_splits=1,  # Hopper's kernel has no other; more would be chosen from lengths that only the device knows
            out=out_TNH,
        )


def load():
    """The library's function.

    Raises:
        ConfigError: it cannot be imported, or takes other arguments.
    """
    try:
        function = getattr(importlib.import_module(MODULE), FUNCTION)
        missing = [name for name in ARGUMENTS.split() if name not in inspect.signature(function).parameters]
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"attention_backend='flash': {FUNCTION} of {MODULE} cannot be imported ({type(error).__name__}: {error}); "
            f"install it anew ({install_command('flash')}), or use another backend",
            setting="attention_backend",
        ) from error
    if missing:
        raise ConfigError(
            f"attention_backend='flash': {FUNCTION} of this flash-attn-4 takes no {', '.join(missing)}; 4.0.0b36 does",
            setting="attention_backend",
        )
    return function
