"""What a grammar engine must be able to do: compile a form, begin rows, follow them, and make their masks.

One backend object serves one vocabulary with one set of tokens that end a sequence. What a form and a matcher are is the
engine's own business.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from quire.sampling_params import StructuredOutputsParams

IntArray = npt.NDArray[np.int32]


class Backend(Protocol):
    """A grammar engine. Legend: N rows, W words of 32 tokens."""

    def compile(self, params: StructuredOutputsParams) -> Any:
        """A form, from which rows begin. Several threads may compile at once.

        Raises:
            RequestError: it makes no sense to this engine; `param` names the field.
        """
        ...

    def begin(self, form: Any) -> Any:
        """A row's matcher, at its beginning; takes microseconds."""
        ...

    def take(self, matcher: Any, token_ids: list[int]) -> bool:
        """Let a matcher take tokens; whether its grammar allows them. One that refused is of no use any more."""
        ...

    def take_all(self, moves: Sequence[tuple[Any, list[int]]]) -> None:
        """Let each matcher take its tokens, which its grammar is known to allow."""
        ...

    def fill(self, wanted: Sequence[tuple[Any, int]], masks_NW: IntArray) -> None:
        """Write the mask of each matcher into its line, one bit a token, the lowest of each word first. Uses several threads,
        and lets other Python threads run meanwhile."""
        ...

    def why_stuck(self, matcher: Any) -> str | None:
        """Why a matcher whose mask was made cannot go on, if so."""
        ...

    def is_forced(self, matcher: Any) -> bool:
        """Whether the grammar leaves one text only, and the mask perhaps less than that, as the token before it has it."""
        ...

    def forced(self, matcher: Any) -> list[int]:
        """The tokens that come next for certain, as masks would have them one after the other; none where the engine does not
        know, or where masks leave a choice between ways to divide a text into tokens."""
        ...

    def room(self, matcher: Any, token_ids: list[int]) -> int:
        """How many of these tokens it would take one after the other."""
        ...
