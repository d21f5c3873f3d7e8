"""Who guesses how a request goes on, from token ids alone; and how often the guesses were right.

A guess is made whether or not it is verified: the tokens that come show what it was worth. So a row whose guesses are wrong
costs no step anything, and one whose guesses become right is noticed. Knows tokens; knows nothing of steps.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from quire.core.token_history import TokenHistory

_LEARNING = 0.12
"""How much one more guess counts among those before it; a row's first ones count more, as if two had come before them."""
FIRST_CHANCE = 0.5
"""Of a row about which nothing is known."""


class Proposer(Protocol):
    """Guesses for one row."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """These tokens came."""

    def propose(self, most: int) -> list[int]:
        """The tokens that may come next, at most so many; empty where there is no guess."""
        ...


@runtime_checkable
class LearningProposer(Proposer, Protocol):
    """One that says how likely each guess is, and makes use of requests that have ended.

    Attributes:
        shares: of the last guess, how likely each token is, if those before it are right.
    """

    shares: list[float]

    def end(self) -> None:
        """The request has ended."""


class NgramProposer:
    """What followed the last place that has most in common with the end of the row's own tokens."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._history = TokenHistory(min_match, max_match)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._history.extend(token_ids)

    def propose(self, most: int) -> list[int]:
        return self._history.continue_end(most)


class RepeatingProposer:
    """The last token, again and again: where guesses are accepted at random, whatever they are."""

    def __init__(self) -> None:
        self._last: list[int] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._last = [*token_ids[-1:]] or self._last

    def propose(self, most: int) -> list[int]:
        return self._last * most


class RowGuesses:
    """One row's guesses, and what they are worth.

    Args:
        most: guesses that are made at a time.
        chance: how often guesses of other rows were right, as a beginning.

    Attributes:
        num_seen: tokens that the proposer knows.
        guess: what may come behind these.
        shares: how likely each guess is by the proposer's own account; empty where it gives none.
        chance: how likely a guess is right whose predecessors are; of what the proposer says, how much it is worth.
    """

    __slots__ = ("_learning", "_most", "_num_learned", "_proposer", "chance", "guess", "num_seen", "shares")

    def __init__(self, proposer: Proposer, most: int, chance: float = FIRST_CHANCE) -> None:
        self._proposer, self._most = proposer, most
        self._learning = proposer if isinstance(proposer, LearningProposer) else None
        self.num_seen = self._num_learned = 0
        self.guess: list[int] = []
        self.shares: list[float] = []
        self.chance = chance

    def take(self, token_ids: Sequence[int]) -> None:
        """More tokens are known: the guess is compared with them, and a new one is not made yet."""
        self._learn(token_ids)
        self.guess = []
        self._proposer.extend(token_ids)
        self.num_seen += len(token_ids)

    def propose(self) -> None:
        """Make a guess behind all tokens."""
        self.guess = self._proposer.propose(self._most)
        if self._learning is not None:
            self.shares = self._learning.shares

    def end(self, token_ids: Sequence[int]) -> None:
        """These tokens were the last ones."""
        if self._learning is not None:
            self._learning.extend(token_ids)
            self._learning.end()

    def _learn(self, token_ids: Sequence[int]) -> None:
        for guessed, token_id, share in zip(self.guess, token_ids, self.shares or itertools.repeat(1.0), strict=False):
            is_right = guessed == token_id
            self._num_learned += 1
            self.chance += max(_LEARNING, 1.0 / (self._num_learned + 2)) * (is_right - share * self.chance)
            if not is_right:
                return
