"""A model's own buffers: allocated once at their largest size, and handed out as slices that always start at the same address.

So a step allocates nothing, and a step that was recorded with one number of tokens can be replayed with another.
Legend: T tokens, S logits rows, D hidden, V vocabulary; a wide row holds qkv or gate and up, a narrow one attention's output
or the activation.
"""

import functools

import torch

from quire.kernels import ops
from quire.kernels.types import ExpertScratch, Routing

MAX_CACHED_VIEWS = 512


class TokenViews:
    """The buffers of a step of `count` tokens; `beside_TD` is for the second of two mixers side by side. Wide and narrow buffers
    are shared by a layer's two halves, one after the other."""

    def __init__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        normed: torch.Tensor,
        beside: torch.Tensor,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        count: int,
    ) -> None:
        self.residual_TD, self.delta_TD, self.normed_TD = residual[:count], delta[:count], normed[:count]
        self.beside_TD, self._wide, self._narrow, self._tokens = beside[:count], wide, narrow, count
        self._shaped: dict[tuple[bool, int], torch.Tensor] = {}

    def wide(self, columns: int) -> torch.Tensor:
        """A contiguous [T, columns] for qkv or for gate and up."""
        return self._shape(True, columns)

    def narrow(self, columns: int) -> torch.Tensor:
        """A contiguous [T, columns] for attention's output or the activation."""
        return self._shape(False, columns)

    def side_by_side(self, *columns: int) -> list[torch.Tensor]:
        """Contiguous [T, columns], one after the other in the wide buffer."""
        parts = self._wide[: self._tokens * sum(columns)].split([self._tokens * count for count in columns])
        return [part.view(self._tokens, count) for part, count in zip(parts, columns, strict=True)]

    def _shape(self, is_wide: bool, columns: int) -> torch.Tensor:
        view = self._shaped.get((is_wide, columns))
        if view is None:
            flat = self._wide if is_wide else self._narrow
            view = self._shaped[is_wide, columns] = flat[: self._tokens * columns].view(self._tokens, columns)
        return view


class Workspace:
    """All buffers of one model on one rank.

    Attributes:
        inputs: the vectors of all layers [max_T, layers * width]. streams: the residual streams [max_T, streams, D].
        logits: [max_S, V].
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_logits: int,
        hidden: int,
        wide: int,
        narrow: int,
        projected: int = 0,
        inputs: int = 0,
        streams: int = 0,
        sampled: int = 0,
        has_beside: bool = False,
        vocab: int,
        ranks: int = 1,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def buffer(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_tokens, self.max_logits = max_tokens, max_logits
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._residual, self._delta, self._normed = (buffer(max_tokens, hidden) for _ in range(3))
        self._wide, self._narrow = buffer(max_tokens * wide), buffer(max_tokens * narrow)
        self._beside = buffer(max_tokens if has_beside else 0, hidden)
        self._projected = buffer(max(max_tokens, max_logits) * projected)
        self.inputs = buffer(max_tokens, inputs)
        self.streams = buffer(max_tokens, streams, hidden)
        self._gathered = buffer(max_logits, hidden)
        self._sampled = buffer(max_logits * sampled)
        self.logits = buffer(max_logits, vocab, dtype=torch.float32)
        self._share = -(-vocab // ranks)
        num_shares = 0 if ranks == 1 else ranks + (vocab % ranks > 0)
        self._shares = buffer(num_shares * max_logits * self._share, dtype=torch.float32)
        self._experts: dict[tuple[int, int, int, int], ExpertScratch] = {}
        # Kept, since making slices costs more than a small kernel.
        others = (self._delta, self._normed, self._beside, self._wide, self._narrow)
        views = functools.lru_cache(MAX_CACHED_VIEWS)
        self.tokens = views(functools.partial(TokenViews, self._residual, *others))
        """The buffers of a step of so many tokens."""
        self.samples = views(functools.partial(TokenViews, self._gathered, *others))
        """Those of so many tokens that need logits: a residual of their own, the rest shared with all tokens'."""

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        buffers = (buffer for buffer in vars(self).values() if isinstance(buffer, torch.Tensor))
        experts = sum(scratch.num_bytes for scratch in self._experts.values())
        return experts + sum(buffer.nbytes for buffer in buffers)

    def experts(self, routing: Routing, intermediate: int, hidden: int = 0) -> ExpertScratch:
        """Room for mixtures of this shape, made on the first call; `hidden` is what experts give, if not the model's."""
        hidden, choice = hidden or self._hidden, ops.choices().get("moe_experts")
        shape = (routing.num_experts, routing.top_k, intermediate, hidden)
        if shape not in self._experts:
            self._experts[shape] = ExpertScratch(
                capacity=self.max_tokens,
                num_experts=routing.num_experts,
                top_k=routing.top_k,
                hidden=hidden,
                intermediate=intermediate,
                dtype=self._dtype,
                device=self._device,
                has_pairs=choice is None or choice.chosen.needs_scratch,
            )
        return self._experts[shape]

    def sampled(self, count: int, columns: int) -> torch.Tensor:
        """A contiguous [S, columns] for the rows of the wide buffer that belong to tokens that need logits."""
        return self._sampled[: count * columns].view(count, columns)

    def projected(self, count: int, columns: int) -> torch.Tensor:
        """Embeddings, or what the head reads, [count, columns] where these are not as wide as the model."""
        return self._projected[: count * columns].view(count, columns)

    def shares(self, count: int, ranks: int) -> torch.Tensor:
        """Each rank's logits [R, S, W], W being a rank's share of the vocabulary, rounded up."""
        return self._shares[: ranks * count * self._share].view(ranks, count, self._share)

    def narrow_share(self, count: int, columns: int) -> torch.Tensor:
        """A contiguous [S, columns], less than a share wide, beside `shares`; where shares are not even."""
        return self._shares[-count * self._share :][: count * columns].view(count, columns)
