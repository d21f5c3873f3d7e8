"""A sequence of tokens in which earlier occurrences of its end are found: how it went on there is a guess of how it goes on now.

Runs of `min_match` tokens are hashed, and all places of a hash are chained, the latest first, as LZ77 does it. A token costs one
entry in two arrays of integers. Knows token ids alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FIRST_BITS = 8
_FEW = 8
"""Tokens up to which a loop is faster than vector operations."""
MAX_PLACES = 16
"""Earlier places that are looked at for the longest match."""


class TokenHistory:
    """Tokens, and where runs of them occurred.

    Args:
        min_match: tokens that an earlier place must have in common with the end.
        max_match: tokens that are compared at most; a place with so many is as good as any.
        capacity: tokens that it has room for from the start; more room is made where it is needed.

    Attributes:
        count: tokens so far.
    """

    __slots__ = ("_arrays", "_bits", "_heads", "_max_match", "_min_match", "_previous", "_tokens", "count")

    def __init__(self, min_match: int, max_match: int, capacity: int = 1 << _FIRST_BITS) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._bits = (capacity - 1).bit_length()
        self.count = 0
        self._allocate(np.zeros(capacity, dtype=np.int32))

    def _allocate(self, tokens: IntArray) -> None:
        """Names for so many tokens. Single entries are read and written through memory views: an array takes three times as
        long for one of them. Places are ends of runs: the index behind a run's last token. 0 is none."""
        self._arrays = (tokens, np.zeros(len(tokens) + 1, dtype=np.int32), np.zeros(1 << self._bits, dtype=np.int32))
        self._tokens, self._previous, self._heads = (array.data for array in self._arrays)

    def extend(self, token_ids: Sequence[int]) -> None:
        """More tokens."""
        start, end = self.count, self.count + len(token_ids)
        while end > len(self._tokens):
            self._grow()
        self._arrays[0][start:end] = token_ids
        self.count = end
        if end - start <= _FEW:
            for place in range(max(start + 1, self._min_match), end + 1):
                name = self._name(place)
                self._previous[place] = self._heads[name]
                self._heads[name] = place
        else:
            self._chain(start + 1)

    def continue_end(self, most: int) -> list[int]:
        """What followed the earlier place that has most in common with the end, the latest of several; at most `most` tokens,
        empty where there is no such place."""
        places, _ = self.find(self, 1)
        return self.continuation(places[0], most) if places else []

    def find(self, other: "TokenHistory", enough: int = MAX_PLACES) -> tuple[list[int], int]:
        """Among the last places that may be like the end of `other` (or of this history itself), those that have most in common
        with it, the latest first; and how many tokens that is. So many places are `enough`, if none can have more in common."""
        end, tokens, wanted = other.count, self._tokens, other._tokens
        if end < self._min_match or not self.count:
            return [], 0
        place = self._previous[end] if other is self else self._heads[self._hash(wanted[end - self._min_match : end])]
        found: list[int] = []
        longest, limit = self._min_match, min(end, self._max_match)
        last = wanted[end - longest : end]
        for _ in range(MAX_PLACES):
            if place == 0:
                break
            if tokens[max(place - longest, 0) : place] == last:
                length, most_common = longest, min(limit, place)
                while length < most_common and tokens[place - 1 - length] == wanted[end - 1 - length]:
                    length += 1
                if length > longest:
                    found, longest, last = [], length, wanted[end - length : end]
                found.append(place)
                if longest == limit and len(found) == enough:
                    break
            place = self._previous[place]
        return found, longest if found else 0

    def tokens(self, start: int, end: int) -> list[int]:
        """The tokens from `start` on, before `end`."""
        return self._tokens[start:end].tolist()

    def continuation(self, place: int, most: int) -> list[int]:
        """The tokens from a place on; a copy that reaches the end goes on with itself, as a text that goes in circles does."""
        copied = self._tokens[place : min(place + most, self.count)].tolist()
        period = len(copied)
        while len(copied) < most:
            copied += copied[len(copied) - period :][: most - len(copied)]
        return copied

    def _grow(self) -> None:
        """Twice the room, and twice as many names."""
        self._bits += 1
        self._allocate(np.concatenate((self._arrays[0], np.zeros_like(self._arrays[0]))))
        self._chain(1)

    def _name(self, place: int) -> int:
        """The hash of the run that ends at a place."""
        return self._hash(self._tokens[place - self._min_match : place])

    def _hash(self, run: "memoryview[int]") -> int:
        value = 0
        for token in run.tolist():
            value = (value * _FACTOR + token) & _MASK
        return ((value * _FACTOR) & _MASK) >> (64 - self._bits)

    def _names(self, first: int) -> npt.NDArray[np.int64]:
        """The hashes of all runs that end at `first` and later."""
        factor = np.uint64(_FACTOR)
        values = np.zeros(self.count + 1 - first, dtype=np.uint64)
        for offset in range(self._min_match):
            begin = first - self._min_match + offset
            values = values * factor + self._arrays[0][begin : begin + len(values)].astype(np.uint64)
        return ((values * factor) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _chain(self, first: int) -> None:
        """Enter all places from `first` on."""
        first = max(first, self._min_match)
        if first > self.count:
            return
        names = self._names(first)
        order = np.argsort(names, kind="stable")
        places, names = (order + first).astype(np.int32), names[order]
        is_new = np.ones(len(names), dtype=np.bool_)
        is_new[1:] = names[1:] != names[:-1]
        before = np.concatenate(([0], places[:-1])).astype(np.int32)
        _, previous, heads = self._arrays
        previous[places] = np.where(is_new, heads[names], before)
        is_last = np.concatenate((is_new[1:], [True]))
        heads[names[is_last]] = places[is_last]
