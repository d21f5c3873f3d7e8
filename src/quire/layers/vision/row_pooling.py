"""A few rows of an encoder become one: their mean attends them.

Legend: X rows, C their columns, E embeddings, G rows of an embedding, N heads, H head size.
"""

from collections.abc import Iterator

import torch

from quire.layers.modules import Module, ModuleBuilder, RowBlock
from quire.layers.tower import TowerPart
from quire.models.sight import Pooled


class Pooling(TowerPart):
    """The matrices of it.

    Args:
        columns: of what it reads.
    """

    def __init__(self, pooled: Pooled, columns: int) -> None:
        super().__init__()
        self._pooled, self._columns = pooled, columns

    def modules(self, builder: ModuleBuilder) -> Iterator[Module]:
        """Three matrices."""
        pooled, columns = self._pooled, self._columns
        asked, kept = (RowBlock(heads * pooled.head_dim, 1) for heads in (pooled.heads, pooled.kv_heads))
        yield builder.linear("pool_q", (asked,), columns, bias=pooled.bias)
        yield builder.linear("pool_kv", (kept, kept), columns, bias=pooled.bias)
        yield builder.linear("pool_out", (RowBlock(pooled.outputs, 1),), asked.rows, bias=pooled.bias)

    def __call__(self, given_EGC: torch.Tensor, is_there_EG: torch.Tensor) -> torch.Tensor:
        """The rows [E, outputs] of groups; rows that are not there are zeros."""
        mean_EC = given_EGC.sum(1) / is_there_EG.sum(1, keepdim=True).clamp(min=1).to(given_EGC.dtype)
        shape = (*is_there_EG.shape, 2, self._pooled.kv_heads, self._pooled.head_dim)
        k_ENGH, v_ENGH = self.multiply("pool_kv", given_EGC.flatten(0, 1)).view(shape).permute(2, 0, 3, 1, 4)
        q_ENH = self.multiply("pool_q", mean_EC).view(len(mean_EC), self._pooled.heads, 1, -1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            q_ENH, k_ENGH, v_ENGH, is_there_EG[:, None, None], enable_gqa=True
        )
        return self.multiply("pool_out", attended.flatten(1))
