"""Which of several replicas takes a request: the one that has the least left to compute with it.

A replica's load is the tokens of prompts that it has not begun to answer, and a weight for each request that it answers. A
prompt adds the tokens that the replica is not known to have cached. So a shared prefix goes where it was computed, until
waiting there would cost more than computing it elsewhere. Knows prompts as chains of keys; knows no tokens, sockets or HTTP.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from quire.request import TokenIds

PIECE_TOKENS = 64
"""Prompts of tokens are compared in pieces of so many."""
ANSWERING_TOKENS = 64
"""A request that is being answered counts as so many tokens of a waiting prompt: it takes a token of each step, for a while."""


def chain_of(pieces: Iterable[bytes], root: object = None) -> list[int]:
    """The keys of a prompt's prefixes: one behind each piece, that depends on all pieces before it and on `root`."""
    keys: list[int] = []
    key = hash(root)
    for piece in pieces:
        key = hash((key, piece))
        keys.append(key)
    return keys


def keys_of(token_ids: TokenIds, root: object = None) -> list[int]:
    """The keys of a prompt of tokens, which is compared in pieces of `PIECE_TOKENS`."""
    data, size = memoryview(token_ids).cast("B"), PIECE_TOKENS * token_ids.itemsize
    return chain_of((bytes(data[start : start + size]) for start in range(0, len(data) - size + 1, size)), root)


@dataclasses.dataclass(slots=True)
class Load:
    """What a replica has to do.

    Attributes:
        num_tokens: of prompts that it has not begun to answer.
        num_requests: that have not ended.
    """

    num_tokens: int = 0
    num_requests: int = 0

    @property
    def cost(self) -> int:
        """In tokens of a prompt."""
        return self.num_tokens + ANSWERING_TOKENS * self.num_requests


@dataclasses.dataclass(slots=True)
class Assignment:
    """Where a request is. Attributes: waiting: its share of the replica's `num_tokens`; `replica`: its number."""

    replica: int
    waiting: int


class ReplicaChooser:
    """Chooses replicas, and keeps count of what was given to them.

    Args:
        num_replicas: numbered from 0.
        max_keys: prefixes that are remembered, of all replicas together; the least recently used are forgotten.
        by_prefix: whether cached prefixes count.

    Attributes:
        loads: by the replica's number.
    """

    def __init__(self, num_replicas: int, max_keys: int = 1 << 16, *, by_prefix: bool = True) -> None:
        self.loads = [Load() for _ in range(num_replicas)]
        self._max_keys, self._by_prefix = max(1, max_keys), by_prefix
        self._holders: collections.OrderedDict[int, int] = collections.OrderedDict()
        """The replicas that have computed a prefix, as bits."""
        self._last = num_replicas - 1

    def choose(self, keys: Sequence[int], piece_tokens: int, num_tokens: int, usable: Iterable[int]) -> Assignment:
        """The replica for a prompt, which counts as given to it.

        Args:
            keys: of its prefixes, `piece_tokens` apart.
            num_tokens: the prompt's length.
            usable: replicas that may be chosen; at least one.
        """
        cached = self._cached_pieces(keys) if self._by_prefix else [0] * len(self.loads)
        count = len(self.loads)

        def cost(replica: int) -> tuple[int, int]:
            left = max(1, num_tokens - cached[replica] * piece_tokens)
            return self.loads[replica].cost + left, (replica - self._last - 1) % count

        replica = self._last = min(usable, key=cost)
        return self.give(replica, keys, max(1, num_tokens - cached[replica] * piece_tokens))

    def give(self, replica: int, keys: Sequence[int], num_tokens: int) -> Assignment:
        """A replica gets a prompt, of which it must compute `num_tokens`."""
        load = self.loads[replica]
        load.num_tokens += num_tokens
        load.num_requests += 1
        if self._by_prefix:
            self._remember(replica, keys)
        return Assignment(replica, num_tokens)

    def begin_answer(self, assignment: Assignment) -> None:
        """A request's first token has come: its prompt waits no more."""
        self.loads[assignment.replica].num_tokens -= assignment.waiting
        assignment.waiting = 0

    def end(self, assignment: Assignment) -> None:
        """A request has ended, or leaves the replica."""
        self.begin_answer(assignment)
        self.loads[assignment.replica].num_requests -= 1

    def forget(self, replica: int) -> None:
        """A replica has lost its cache."""
        kept = ~(1 << replica)
        for key in [key for key, holders in self._holders.items() if holders & ~kept]:
            if holders := self._holders[key] & kept:
                self._holders[key] = holders
            else:
                del self._holders[key]

    def _cached_pieces(self, keys: Sequence[int]) -> list[int]:
        """How many of a prompt's pieces, from its beginning, each replica has."""
        pieces = [0] * len(self.loads)
        remaining = (1 << len(self.loads)) - 1
        for number, key in enumerate(keys, 1):
            remaining &= self._holders.get(key, 0)
            if not remaining:
                break
            for replica in range(len(self.loads)):
                if remaining >> replica & 1:
                    pieces[replica] = number
        return pieces

    def _remember(self, replica: int, keys: Sequence[int]) -> None:
        """The beginning of a prompt is used last, so that it is forgotten last."""
        holders = self._holders
        for key in reversed(keys):
            holders[key] = holders.get(key, 0) | 1 << replica
            holders.move_to_end(key)
        while len(holders) > self._max_keys:
            holders.popitem(last=False)
