"""Guesses from all texts at hand (Oliaro et al., 2024, "SuffixDecoding"): a request's own tokens, and what others have answered.

A guess goes on as most of the earlier places do that have the most tokens in common with the request's end, and from each token
on with those of them that agree with it. The share that agrees says how likely the guess is, so that one of many ways to go on is
not followed far. The longer what they have in common, the longer the guess.

Places are found as `TokenHistory` finds them, 12 bytes a token. Knows tokens; what a guess is worth in the end is measured
elsewhere.
"""

import collections
from bisect import bisect_right
from collections.abc import Sequence

from quire.config.speculative import SpeculativeConfig
from quire.core import token_history
from quire.core.token_history import TokenHistory

MIN_MATCH = 2
MOST_SHARED = 1 << 18
"""Tokens of answers in a generation: 3 MB."""
LONGEST_TEXT = 1 << 12
"""Tokens of an answer that are kept, its last ones: taking it in holds up no step."""
_SEPARATOR = -1


class _Generation:
    """Answers, one after the other, and which of them have helped."""

    def __init__(self, depth: int) -> None:
        self.history = TokenHistory(MIN_MATCH, depth, MOST_SHARED)
        self.starts: list[int] = []
        self.used: set[int] = set()

    def add(self, token_ids: Sequence[int]) -> None:
        self.starts.append(self.history.count)
        self.history.extend([*token_ids, _SEPARATOR])

    def text(self, number: int) -> list[int]:
        end = self.starts[number + 1] if number + 1 < len(self.starts) else self.history.count
        return self.history.tokens(self.starts[number], end - 1)


class SharedTexts:
    """What requests have answered, as far as there is room: in two generations, the older of which goes when the younger one is
    full. Of those that go, the ones that have helped since stay in the new one.

    Args:
        most_texts: answers that are kept at most.
        depth: tokens that are compared at most.
    """

    def __init__(self, most_texts: int, depth: int) -> None:
        self._most, self._depth = most_texts // 2, depth
        self.generations = [_Generation(depth), _Generation(depth)] if self._most else []

    def add(self, token_ids: Sequence[int]) -> None:
        """A request has answered this."""
        if not self.generations or len(token_ids) <= MIN_MATCH:
            return
        token_ids = token_ids[-LONGEST_TEXT:]
        young, old = self.generations
        if young.history.count + len(token_ids) >= MOST_SHARED or len(young.starts) >= self._most:
            kept = [old.text(number) for number in sorted(old.used)][-self._most // 2 :]
            young, old = self.generations = [_Generation(self._depth), young]
            for text in kept:
                if young.history.count + len(text) < MOST_SHARED // 2:
                    young.add(text)
        young.add(token_ids)

    def use(self, generation: _Generation, place: int) -> None:
        """The answer at this place has helped."""
        generation.used.add(bisect_right(generation.starts, place) - 1)


class SuffixProposer:
    """Guesses for one request.

    Args:
        texts: of others; None: it has nothing to do with them.
        num_prompt_tokens: tokens that come before its answer.

    Attributes:
        shares: of the last guess, how many of the places that agree with what comes before agree with each token.
    """

    def __init__(self, config: SpeculativeConfig, texts: SharedTexts | None, num_prompt_tokens: int) -> None:
        self._factor, self._least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        self._history = TokenHistory(MIN_MATCH, config.suffix_decoding_max_tree_depth)
        self._texts, self._num_prompt_tokens = texts, num_prompt_tokens
        self.shares: list[float] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        self._history.extend(token_ids)

    def propose(self, most: int) -> list[int]:
        own, longest = self._history, MIN_MATCH - 1
        found: list[tuple[TokenHistory, int]] = []
        generations = self._texts.generations if self._texts is not None else ()
        for history in (own, *(generation.history for generation in generations)):
            places, length = history.find(own)
            if length > longest:
                found, longest = [], length
            if length == longest:
                found += [(history, place) for place in places]
        for generation in generations:
            for history, place in found:
                if history is generation.history and self._texts is not None:
                    self._texts.use(generation, place)
        return self._follow(found, min(most, max(1, int(longest * self._factor))))

    def _follow(self, places: list[tuple[TokenHistory, int]], most: int) -> list[int]:
        """Go on as most of these places do."""
        nearest = places[: token_history.MAX_PLACES]
        texts = collections.Counter(tuple(history.continuation(place, most)) for history, place in nearest)
        guess, chance = list[int](), 1.0
        self.shares = []
        while texts and len(guess) < most:
            if len(texts) == 1:
                (text,) = texts
                rest = text[len(guess) : text.index(_SEPARATOR) if _SEPARATOR in text else most]
                self.shares += [1.0] * len(rest)
                return [*guess, *rest]
            votes: dict[int, int] = {}
            for text, count in texts.items():
                votes[text[len(guess)]] = votes.get(text[len(guess)], 0) + count
            token_id = max(votes, key=votes.__getitem__)
            share = votes[token_id] / sum(votes.values())
            chance *= share
            if token_id == _SEPARATOR or chance < self._least:
                break
            if len(votes) > 1:
                texts = {text: count for text, count in texts.items() if text[len(guess)] == token_id}
            guess.append(token_id)
            self.shares.append(share)
        return guess

    def end(self) -> None:
        """The request has ended: others may go on as it did."""
        if self._texts is not None:
            self._texts.add(self._history.tokens(self._num_prompt_tokens, self._history.count))
