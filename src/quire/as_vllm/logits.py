"""vLLM's interface of logits processors, on Quire's.

vLLM tells a processor of the rows that come and go before each step (`update_state`) and gives it the logits of all rows, where
the row's number is the index (`apply`). Quire gives it the rows that want it. Knows both; knows nothing of sampling.
"""

import dataclasses
import enum
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.sample.logits_processor import LogitsProcessor as _LogitsProcessor
from quire.sample.logits_processor import adapt_callable
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import torch

RequestLogitsProcessor = Callable[..., Any]
"""`(output_token_ids, logits) -> logits`, or with the prompt's token ids in front."""
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Row, parameters, the prompt's token ids, and those of the output, which grow."""


class MoveDirectionality(enum.Enum):
    """Whether a row moved, or two changed places. Rows of Quire stay where they are."""

    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclasses.dataclass(frozen=True)
class BatchUpdate:
    """Rows that came and went. `moved` is always empty."""

    batch_size: int
    removed: Sequence[int] = ()
    added: Sequence[AddedRequest] = ()
    moved: Sequence[tuple[int, int, MoveDirectionality]] = ()


class LogitsProcessor(_LogitsProcessor):
    """A processor that was written for vLLM: it has `update_state` and `apply(logits)`."""

    _own_apply: Callable[[Any, Any], Any]
    _rows: set[int]

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass's `apply` takes all rows. Quire's, which takes some of them, has the same name and goes into its place."""
        super().__init_subclass__(**options)
        if "apply" in cls.__dict__:
            cls._own_apply = cls.__dict__["apply"]
            del cls.apply

    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the likeliest; it is asked in any case."""
        return False

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Rows came or went."""

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        """Every row is wanted: whether the processor edits it is its own secret."""
        rows = self._known_rows()
        rows.add(row)
        self.update_state(BatchUpdate(len(rows), added=[(row, params, prompt_token_ids, output_token_ids)]))
        return True

    def remove_row(self, row: int) -> None:
        """The row's request has ended."""
        rows = self._known_rows()
        rows.discard(row)
        self.update_state(BatchUpdate(len(rows), removed=[row]))

    def _known_rows(self) -> set[int]:
        return vars(self).setdefault("_rows", set())  # a subclass may not call our constructor

    def apply(self, logits_NV: "torch.Tensor", rows_N: "np.ndarray") -> "torch.Tensor":
        """Put the rows where their numbers say, and take them from there again."""
        indices = rows_N.tolist()
        all_rows = logits_NV.new_zeros(max(self._known_rows(), default=0) + 1, logits_NV.shape[1])
        all_rows[indices] = logits_NV
        return type(self)._own_apply(self, all_rows)[indices]


class AdapterLogitsProcessor(_LogitsProcessor):
    """Makes a request's processor where the request asks for one."""

    _of_row: dict[int, tuple[Callable[..., Any], list[int], list[int]]]

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """A request's own processor, if it wants one."""

    def is_argmax_invariant(self) -> bool:
        """As in `LogitsProcessor`."""
        return False

    def add_row(
        self, row: int, params: SamplingParams, prompt_token_ids: list[int], output_token_ids: list[int]
    ) -> bool:
        """The rows are wanted for which there is a processor."""
        made = self.new_req_logits_processor(params)
        if made is None:
            return False
        entry = (adapt_callable(made), prompt_token_ids, output_token_ids)
        vars(self).setdefault("_of_row", {})[row] = entry
        return True

    def remove_row(self, row: int) -> None:
        """The row's request has ended."""
        self._of_row.pop(row, None)

    def apply(self, logits_NV: "torch.Tensor", rows_N: "np.ndarray") -> "torch.Tensor":
        """Each row by its own processor."""
        for index, row in enumerate(rows_N.tolist()):
            function, prompt, output = self._of_row[row]
            logits_NV[index] = function(prompt, output, logits_NV[index])
        return logits_NV


def process_dict_updates(
    req_entries: dict[int, Any],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], Any],
) -> bool:
    """Keep a dictionary of rows that have a state, as `new_state` gives it. True if it changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row in batch_update.removed:
        req_entries.pop(row, None)
    for row, params, prompt, output in batch_update.added:
        req_entries.pop(row, None)
        state = new_state(params, prompt, output)
        if state is not None:
            req_entries[row] = state
    return before != req_entries
