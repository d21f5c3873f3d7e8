"""Newlines of two texts that meet: one token where a tokenizer has one for so many, as if it had read both at once."""

from collections.abc import Callable

MOST = 32
"""Newlines that one token may stand for."""


class Newlines:
    """Joins token ids of texts.

    Args:
        encode: a text's token ids.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        found = {count: encode("\n" * count) for count in range(1, MOST + 1)}
        self._tokens = {count: token_ids for count, token_ids in found.items() if len(token_ids) == 1}
        self._counts = {token_ids[0]: count for count, token_ids in self._tokens.items()}

    def join(self, left: list[int], right: list[int]) -> list[int]:
        """One behind the other."""
        if left and right and left[-1] in self._counts and right[0] in self._counts:
            count = self._counts[left[-1]] + self._counts[right[0]]
            if count in self._tokens:
                return [*left[:-1], *self._tokens[count], *right[1:]]
        return [*left, *right]
