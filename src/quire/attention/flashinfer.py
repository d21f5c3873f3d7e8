"""The flashinfer backend: steps that only decode go to FlashInfer's kernels that read lengths and pages on the device.

These are `trtllm_batch_decode_with_kv_cache`'s: XQA on compute capability 9 and 12, TensorRT-LLM's on 10. They take pages as
[P, K, S, H], windows as tokens to the left, and sinks as float32. FlashInfer's other kernels
(`BatchPrefillWithPagedKVCacheWrapper`,
`BatchDecodeWithPagedKVCacheWrapper`) want a plan for every step, which is made on the host from lengths; a step that was
captured as a graph has no place for it. So prompts stay with our own kernels.
Knows those arguments. Kernels come from `flashinfer-jit-cache` or are compiled by nvcc at their first use.
"""

import functools
import importlib

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest
from quire.attention.library import LibraryBackend
from quire.errors import ConfigError
from quire.extras import install_command

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends; zero before its first use."""
XQA_PAGES = (16, 32, 64, 128)
TRTLLM_HEADS = (64, 128, 256)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class FlashInferBackend(LibraryBackend):
    """FlashInfer where all requests compute one token, our own kernels elsewhere."""

    name = "flashinfer"
    package = "flashinfer-python"
    extra = "flashinfer"
    serves_decode = True

    def __init__(self) -> None:
        super().__init__()
        self._sinks: dict[int, torch.Tensor] = {}
        try:
            self._decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        except (ImportError, AttributeError, OSError) as error:
            raise ConfigError(
                f"attention_backend='flashinfer': trtllm_batch_decode_with_kv_cache of flashinfer.decode cannot be imported "
                f"({type(error).__name__}: {error}); install it anew ({install_command('flashinfer')}), or use another backend",
                setting="attention_backend",
            ) from error

    @classmethod
    def why_not(cls, request: AttentionRequest, capability: tuple[int, int]) -> str | None:
        major = capability[0]
        if major not in (9, 10, 12):
            return f"compute capability {major}.{capability[1]}: its kernels need 9.0, 10 or 12"
        if request.soft_cap > 0 or not request.causal:
            return f"{'soft caps' if request.soft_cap > 0 else 'attention to both sides'}: our own kernels only"
        if request.block_size not in XQA_PAGES:
            return f"pages of {request.block_size} tokens: 16, 32, 64 or 128"
        if major == 10 and request.head_dim not in TRTLLM_HEADS:
            return f"heads of {request.head_dim} on compute capability 10: {', '.join(map(str, TRTLLM_HEADS))}"
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
        self._decode(
            q_TNH[:count].contiguous(),  # XQA knows no distance between tokens
            (kv_cache[0], kv_cache[1]),
            _workspace(q_TNH.device),
            tables_BP,
            lens_B,
            min(metadata.max_seq_len, tables_BP.shape[1] * metadata.block_size),
            bmm1_scale=params.scale,
            bmm2_scale=1.0,
            window_left=params.window - 1 if params.window else -1,
            out=out_TNH[:count],
            sinks=self._float_sinks(params),
            kv_layout="HND",
            # A kernel of theirs may end before the one before it has, which those after it rely on (`kernels/triton/launch.py`).
            enable_pdl=False,
        )

    def _float_sinks(self, params: AttentionParams) -> torch.Tensor | None:
        sinks = params.sinks
        if sinks is None or sinks.dtype == torch.float32:
            return sinks
        key = sinks.data_ptr()
        if key not in self._sinks:
            self._sinks[key] = sinks.float()
        return self._sinks[key]
