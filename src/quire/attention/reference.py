"""The reference backend: plain PyTorch over pages, on any device. Serves every kind of layer that there is, slowly."""

from quire.attention.interface import AttentionRequest, Supports
from quire.attention.paged import PagedBackend


class ReferenceBackend(PagedBackend):
    """Whatever `paged_attention` was chosen; without a faster one, the plain PyTorch kernel."""

    name = "reference"

    @classmethod
    def supports(cls, request: AttentionRequest) -> Supports:
        if request.num_heads % request.num_kv_heads:
            return Supports(False, f"{request.num_heads} heads do not share {request.num_kv_heads} KV heads evenly")
        return Supports(True, "plain PyTorch runs everywhere")
