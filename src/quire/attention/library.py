"""What backends have in common whose attention is another library's: our kernels write keys and values into our pages, and
hand these over as they lie, with a page table by request.

Knows which steps a library serves; the others go to our own kernels, and so do those that it refuses when it sees them. Knows no
library. A library is used when a user names it.
Legend: T tokens, B requests, N query heads, K KV heads, H head size, S tokens a page, P pages.
"""

import abc
import importlib.metadata

import torch

from quire.attention.interface import AttentionMetadata, AttentionParams, AttentionRequest, Supports
from quire.attention.triton import TritonBackend
from quire.extras import install_command
from quire.kernels.types import Rope
from quire.logger import init_logger

logger = init_logger(__name__)

REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)
"""What libraries raise, before they launch anything, at steps that they have no kernel for."""


def capability() -> tuple[int, int]:
    """Of the GPU; (0, 0) where there is none."""
    from quire.kernels.triton.launch import compute_capability

    return compute_capability()


class LibraryBackend(TritonBackend):
    """Attention by a library.

    Attributes:
        package: the distribution that has it. `extra`: of ours that installs it.
        serves_decode: the library computes the steps in which every request computes one token; otherwise the other steps
            (prompts, alone or beside decoding).
    """

    package: str
    extra: str
    serves_decode: bool
    only_when_named = True

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    @abc.abstractmethod
    def why_not(cls, request: AttentionRequest, capability: tuple[int, int]) -> str | None:
        """Why the library cannot serve such a layer on such a GPU; None if it can."""

    @abc.abstractmethod
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
        """The library's attention.

        Args:
            q_TNH: queries; tokens may lie apart.
            tables_BP: page ids of each request (`metadata.rows` is done with).
            lens_B: as `metadata.seq_lens`, but 1 for requests that the step does not have.
        """

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        ours = super().supports(request)
        if not ours.yes:
            return ours
        try:
            version = importlib.metadata.version(cls.package)
        except importlib.metadata.PackageNotFoundError:
            return Supports(False, f"{cls.package} is not installed: {install_command(cls.extra)}")
        refused = (
            ("latents", request.kind == "mla"),
            ("slopes (ALiBi)", request.has_alibi),
            ("chunks", request.chunk > 0),
            ("images whose tokens see one another", request.sees_items),
            ("--deterministic", request.deterministic),
            (f"pages of {str(request.kv_dtype).removeprefix('torch.')}", request.kv_dtype.itemsize != 2),
        )
        why = next((what for what, is_asked in refused if is_asked), None)
        why = f"{why}: our own kernels only" if why else cls.why_not(request, capability())
        return Supports(why is None, why or f"{cls.package} {version}")

    def _is_served(self, metadata: AttentionMetadata) -> bool:
        return (metadata.max_query_len == 1) == self.serves_decode

    def begin_step(self, metadata: AttentionMetadata) -> None:
        from quire.kernels.triton.attention.page_tables import gather_tables

        if not self._is_served(metadata):
            return
        key = (metadata.block_table.data_ptr(), metadata.rows.data_ptr())
        if key not in self._tables:
            shape, device = (metadata.rows.shape[0], metadata.block_table.shape[1]), metadata.rows.device
            tables_BP = torch.zeros(shape, dtype=torch.int32, device=device)
            self._tables[key] = (tables_BP, torch.ones(shape[0], dtype=torch.int32, device=device))
        gather_tables(metadata, *self._tables[key])

    def forward(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
    ) -> None:
        if not self._is_served(metadata) or qkv.dtype != kv_cache.dtype:
            super().forward(qkv, kv_cache, metadata, params, out)
            return
        if not metadata.num_requests or not metadata.num_tokens:
            return
        shape = (qkv.shape[0], params.num_heads, params.head_dim)
        q_TNH = qkv[:, : params.num_heads * params.head_dim].view(shape)
        tables_BP, lens_B = self._tables[metadata.block_table.data_ptr(), metadata.rows.data_ptr()]
        count = metadata.num_requests
        try:
            self.attend_pages(q_TNH, kv_cache, tables_BP[:count], lens_B[:count], metadata, params, out.view(shape))
        except REFUSALS as error:
            logger.warning_once(
                "%s computes no such step (%s: %s), our own kernels do: heads of %d, %d a KV head, pages of %d tokens",
                self.package,
                type(error).__name__,
                error,
                params.head_dim,
                params.num_heads // params.num_kv_heads,
                metadata.block_size,
            )
            super().forward(qkv, kv_cache, metadata, params, out)

    def attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
        rope: Rope | None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        if self._is_served(metadata):
            self.rope_and_cache(qkv, kv_cache, metadata, params, rope, q_norm, k_norm, eps)
            self.forward(qkv, kv_cache, metadata, params, out)
        else:
            super().attend(qkv, kv_cache, metadata, params, out, rope, q_norm, k_norm, eps)
