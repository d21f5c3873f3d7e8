"""Which of several ranks that share a model encodes which items of prompts, and how all of them get all embeddings.

All ranks are told of the same items in the same order, so each knows by itself what the others do. Knows items and ranks; knows
no encoder.

Legend: R ranks, E rows of items, D columns of an embedding.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from quire.distributed.communicator import Communicator
from quire.media import EMBEDS, MediaItem


class ItemShares:
    """The items that one of the ranks encodes and the others have not been given yet.

    Args:
        communicator: these ranks; a single one encodes everything.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._loads: dict[str, list[int]] = {}
        self._apart: dict[str, tuple[int, int]] = {}  # who encodes it, and its rows

    def divide(self, items: Sequence[MediaItem]) -> None:
        """Give each new item to the rank that has had the fewest rows of its kind, the largest ones first."""
        new = [item for item in items if item.key not in self._apart and EMBEDS not in item.tensors]
        for item in sorted(new, key=lambda item: -item.num_embeds) if self._communicator.size > 1 else ():
            loads = self._loads.setdefault(item.modality, [0] * self._communicator.size)
            rank = loads.index(min(loads))
            loads[rank] += item.num_embeds
            self._apart[item.key] = rank, item.num_embeds

    def is_mine(self, key: str) -> bool:
        """Whether this rank encodes an item."""
        own = self._communicator.rank
        return self._apart.get(key, (own, 0))[0] == own

    def drop(self, keys: Iterable[str]) -> None:
        """These are not needed any more."""
        for key in keys:
            self._apart.pop(key, None)

    def gather(
        self, keys: Iterable[str], embeddings: Mapping[str, torch.Tensor], like: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The embeddings [E, D] of those of the items that only one rank has. All ranks call it for the same items.

        Args:
            embeddings: what this rank has encoded.
            like: of their type, width and device.
        """
        apart = [(key, *self._apart.pop(key)) for key in keys if key in self._apart]
        if not apart:
            return {}
        shares = [
            [(key, rows) for key, owner, rows in apart if owner == rank] for rank in range(self._communicator.size)
        ]
        longest = max(sum(rows for _, rows in share) for share in shares)
        own_ED, all_RED = like.new_zeros(longest, like.shape[1]), like.new_empty(len(shares), longest, like.shape[1])
        mine = [embeddings[key] for key, _ in shares[self._communicator.rank]]
        if mine:
            own_ED[: sum(map(len, mine))] = torch.cat(mine)
        self._communicator.all_gather(own_ED, all_RED)
        found: dict[str, torch.Tensor] = {}
        for share, rows_ED in zip(shares, all_RED, strict=True):
            parts = rows_ED[: sum(rows for _, rows in share)].split([rows for _, rows in share])
            found |= {key: part.clone() for (key, _), part in zip(share, parts, strict=True)}
        return found
