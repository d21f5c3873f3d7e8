"""How many of a request's tokens were reasoning, by the ids of the markers around it.

Knows token ids. Where a marker is not a token of its own nothing is counted, so that no number is a guess.
"""

from collections.abc import Collection, Sequence
from typing import Any

from quire.parsers.formats import Reasoning


class ReasoningCount:
    """Counts tokens up to the end of the reasoning, markers included, in each of a request's answers.

    Args:
        starts, ends: ids of the markers.
        begins_inside: an answer begins within its reasoning.
    """

    def __init__(self, starts: Collection[int], ends: Collection[int], begins_inside: bool) -> None:
        self._starts = starts
        self._ends = ends
        self._begins_inside = begins_inside
        self._inside: dict[int, bool] = {}
        self._over: set[int] = set()
        self.total = 0

    def add(self, index: int, token_ids: Sequence[int]) -> None:
        """More tokens of the answer `index`."""
        if index in self._over:
            return
        inside = self._inside.get(index, self._begins_inside)
        for token_id in token_ids:
            inside = inside or token_id in self._starts
            self.total += inside
            if inside and token_id in self._ends:
                self._over.add(index)
                return
        self._inside[index] = inside


def reasoning_count(reasoning: Reasoning | None, in_reasoning: bool | None, tokenizer: Any) -> ReasoningCount | None:
    """A count for answers in a format; None where its markers are not single tokens, or there is no reasoning.

    Args:
        in_reasoning: the prompt ended inside the reasoning (or outside of it); None: as the format says.
    """
    if reasoning is None:
        return None
    starts, ends = _ids(reasoning.start, tokenizer), _ids(reasoning.end, tokenizer)
    inside = reasoning.implied if in_reasoning is None else in_reasoning
    return ReasoningCount(starts, ends, inside) if ends and (starts or inside) else None


def _ids(markers: tuple[str, ...], tokenizer: Any) -> frozenset[int]:
    found = (tokenizer.token_to_id(marker) for marker in markers)
    return frozenset(token_id for token_id in found if token_id is not None)
