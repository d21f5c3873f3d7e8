"""Verifying drafts: which draws of a step count.

A row draws behind its last token and behind each of its drafts. What it draws at a position depends on its logits, its seed and
the position alone, so a draft that equals the draw before it is exactly what a step by itself would have drawn, and the next draw
counts as well. Streams are therefore the same token for token as without drafts, greedy or seeded, and their distribution is
the model's own, whoever made the drafts. Rejection sampling would accept a draft more often where the drafter's probabilities
are known, and its tokens would depend on the drafter.

Draws that need nothing but logits are made all at once. Those of rows with a grammar, penalties or anything else that looks at
earlier tokens are made in rounds, one draw a row: each round sees what the round before has drawn, as a step does.

Legend: S draws, B rows that draw, N rows that draw in a round, V vocabulary.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from quire.config.speculative import SpeculativeConfig
from quire.request import TokenLogprobs

IntArray = npt.NDArray[np.int32]
_MASK = (1 << 64) - 1


@dataclasses.dataclass
class Draws:
    """What rows drew, one token each.

    Attributes:
        logprobs, errors, forced: by row, as in `ModelRunnerOutput`.
    """

    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs] = dataclasses.field(default_factory=dict[int, TokenLogprobs])
    errors: dict[int, str] = dataclasses.field(default_factory=dict[int, str])
    forced: dict[int, list[int]] = dataclasses.field(default_factory=dict[int, list[int]])


@dataclasses.dataclass
class Verified:
    """What a step with drafts has given.

    Attributes:
        rows: each row that draws, once.
        positions: where its first token stands.
        first: its first tokens, as far as they count; `accepted`: by row, those behind right drafts.
    """

    rows: IntArray
    positions: IntArray
    first: Draws
    accepted: dict[int, list[int]]


class Acceptance:
    """Says whether a draft is right: if it is what was drawn, or, to measure speed, at random.

    Args:
        config: None accepts by what was drawn.
    """

    def __init__(self, config: SpeculativeConfig | None) -> None:
        is_synthetic = config is not None and config.is_synthetic
        self._rates = config.synthetic_rates() if config is not None and is_synthetic else None

    def token(self, drawn: int, draft: int, index: int, row: int, position: int) -> int:
        """What counts at a position where `drawn` was drawn, and a row's draft number `index` was computed."""
        if self._rates is None:
            return drawn
        is_right = _uniform(row, position) < self._rates[index]
        return draft if is_right else drawn if drawn != draft else draft ^ 1

    def count(
        self,
        rows_S: IntArray,
        positions_S: IntArray,
        first_B: IntArray,
        tokens_S: IntArray,
        drafts: Mapping[int, list[int]],
    ) -> Verified:
        """Which draws count, all of which were made at once."""
        first_tokens = tokens_S[first_B].copy()
        accepted: dict[int, list[int]] = {}
        rows_B = rows_S[first_B]
        for number, (row, first) in enumerate(zip(rows_B.tolist(), first_B.tolist(), strict=True)):
            guesses = drafts.get(row)
            if not guesses:
                continue
            drawn: list[int] = tokens_S[first : first + len(guesses) + 1].tolist()
            position, kept = int(positions_S[first]), list[int]()
            for index, (token, guess) in enumerate(zip(drawn, guesses, strict=False)):
                kept.append(self.token(token, guess, index, row, position + index))
                if kept[-1] != guess:
                    break
            else:
                kept.append(drawn[-1])
            first_tokens[number] = kept[0]
            if len(kept) > 1:
                accepted[row] = kept[1:]
        return Verified(rows_B, positions_S[first_B], Draws(first_tokens), accepted)

    def in_rounds(
        self,
        logits_SV: torch.Tensor,
        rows_S: IntArray,
        positions_S: IntArray,
        first_B: IntArray,
        drafts: Mapping[int, list[int]],
        draw: Callable[[torch.Tensor, IntArray, IntArray], Draws],
    ) -> Verified:
        """Draw once a row, and again for the rows whose draft was right, until there are none."""
        at_N, result = first_B, None
        accepted: dict[int, list[int]] = {}
        for index in range(max(map(len, drafts.values()), default=0) + 1):
            rows_N = rows_S[at_N]
            where_N = torch.from_numpy(at_N.astype(np.int64)).to(logits_SV.device)
            draws = draw(logits_SV.index_select(0, where_N), rows_N, positions_S[at_N])
            tokens: list[int] = draws.token_ids.tolist()
            if result is None:
                result = draws
            else:
                _join(result, draws, rows_N.tolist(), accepted)
            going_on: list[int] = []
            for number, (row, token) in enumerate(zip(rows_N.tolist(), tokens, strict=True)):
                guesses = drafts.get(row, ())
                if index < len(guesses) and guesses[index] == token and row not in draws.errors:
                    going_on.append(number)
                    result.forced.pop(row, None)
            if not going_on:
                break
            at_N = at_N[going_on] + 1
        assert result is not None
        return Verified(rows_S[first_B], positions_S[first_B], result, accepted)


def _join(result: Draws, draws: Draws, rows: list[int], accepted: dict[int, list[int]]) -> None:
    """Add a later round's draws. A row that fails there fails in a step of its own, when it has told what it has."""
    for row, token in zip(rows, draws.token_ids.tolist(), strict=True):
        if row in draws.errors:
            continue
        accepted.setdefault(row, []).append(token)
        if row in draws.logprobs:
            kept, more = result.logprobs[row], draws.logprobs[row]
            kept.token_ids.extend(more.token_ids)
            kept.logprobs.extend(more.logprobs)
            kept.ranks.extend(more.ranks)
        if row in draws.forced:
            result.forced[row] = draws.forced[row]


def _uniform(row: int, position: int) -> float:
    """A number from 0 to 1 that every rank finds for a row's position (SplitMix64; Steele, Lea, Flood 2014)."""
    value = ((row << 32) + position + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) / 2**64
