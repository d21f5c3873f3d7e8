"""Operations of attention over a window of tokens and over compressed ones (DeepSeek-V4).

A token keeps a row of W numbers in pages [2, P, 1, S, W / 2], half of it in each plane: its key, which is its value too, and
what compressors need of it. A compressed token stands in the page of the last of its `rate` tokens, E of them in a page.

Legend: T tokens, N heads, H head size, P pages, S tokens a page, E compressed tokens a page, R rate, K chosen, V values of a
vector with its indexer's behind it, L vectors a token has for a compressor (two where windows overlap).
"""

import dataclasses

import torch

from quire.attention.interface import AttentionMetadata
from quire.kernels import ops
from quire.kernels.ops import Rope


@dataclasses.dataclass
class Compressor:
    """How R rows become one vector of `size` values.

    Attributes:
        column: of a row where its values begin, L * size of them; as many weights follow.
        bias: [R, L * size] float32, added to weights by the place in the window.
        norm: float32 [size], of an RMS norm of the result.
        first: where the result begins in a compressed token.
    """

    column: int
    size: int
    rate: int
    overlaps: bool
    bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    rope: Rope
    first: int


def rotate_last(x_TNH: torch.Tensor, rope: Rope, positions_T: torch.Tensor, backwards: bool = False) -> None:
    """Rotate the last values of each head, in place, or turn them back."""
    ops.chosen("rotate_last")(x_TNH, rope, positions_T, backwards)


def keep_rows(rows_TW: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
    """Write each token's row to its slot; slots below 0 are skipped."""
    ops.chosen("keep_rows")(rows_TW, kv_cache, metadata)


def compress(
    compressor: Compressor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    blocks_PEV: torch.Tensor,
    blocks_metadata: AttentionMetadata,
) -> None:
    """Make a compressed token of each R whose last one is of this step. Value by value it is the sum of softmax(weights) * values
    over the R; where windows overlap over the R before with their first vector besides, of which the first window has none."""
    ops.chosen("compress")(compressor, kv_cache, metadata, blocks_PEV, blocks_metadata)


def choose_blocks(
    q_TNI: torch.Tensor,
    weights_TN: torch.Tensor,
    blocks_PEV: torch.Tensor,
    metadata: AttentionMetadata,
    rate: int,
    top_k: int,
) -> torch.Tensor:
    """For each token [T, K] (int32) the `top_k` compressed tokens before it with the largest sum over heads of
    weight * relu(q . k); keys are their last values. -1 where there are fewer."""
    return ops.chosen("choose_blocks")(q_TNI, weights_TN, blocks_PEV, metadata, rate, top_k)


def window_attention(
    q_TNH: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    window: int,
    sinks_N: torch.Tensor,
    out_TNH: torch.Tensor,
    blocks_PEV: torch.Tensor | None = None,
    blocks_metadata: AttentionMetadata | None = None,
    rate: int = 0,
    chosen_TK: torch.Tensor | None = None,
) -> None:
    """Attention of each token to the `window` last tokens and to all (or the chosen) compressed ones whose last token is not
    behind it, with scores divided by sqrt(H) and a sink a head."""
    ops.chosen("window_attention")(
        q_TNH, kv_cache, metadata, window, sinks_N, out_TNH, blocks_PEV, blocks_metadata, rate, chosen_TK
    )
