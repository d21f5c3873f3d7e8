"""Logprobs as users see them: a list of dicts, or the flat container with the same behaviour and few objects."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast, overload


@dataclasses.dataclass(slots=True)
class Logprob:
    """One token's log probability, its 1-based rank in the vocabulary, and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class FlatLogprobs(Sequence[LogprobsOnePosition]):
    """The logprobs of many positions in four flat lists: easy on the garbage collector, read like a list of dicts."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def append(self, position: LogprobsOnePosition | None) -> None:
        """Add one position; None (the first prompt token) is an empty one."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def append_fast(
        self,
        token_ids: list[int],
        logprobs: list[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Add one position from columns of equal length; builds no object for a token."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[LogprobsOnePosition | None]) -> None:
        """Add several positions."""
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition: ...
    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...
    def __getitem__(self, index: int | slice) -> "LogprobsOnePosition | FlatLogprobs":
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __iter__(self) -> Iterator[LogprobsOnePosition]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FlatLogprobs | list):
            return NotImplemented
        theirs = cast("list[LogprobsOnePosition | None]", list(cast("Iterable[Any]", other)))
        return list(self) == [position or {} for position in theirs]

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"


PromptLogprobs = FlatLogprobs | list[LogprobsOnePosition | None]
SampleLogprobs = FlatLogprobs | list[LogprobsOnePosition]
