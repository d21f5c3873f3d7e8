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

    def advance(self, moves: Sequence[tuple[Any, int]]) -> list[bool]:
        """Let each matcher take its token; whether its grammar allows it. A matcher that refused one is of no use any more."""
        ...

    def forced(self, matcher: Any) -> list[int]:
        """The tokens that come next for certain, as masks would have them one after the other; none where the engine does not
        know, or where masks leave a choice between ways to divide a text into tokens."""
        ...

    def known(self, matcher: Any) -> Any:
        """Something hashable that stands for the matcher's next mask, where that is known before `fill`; else None."""
        ...

    def fill(self, wanted: Sequence[tuple[Any, int]], masks_NW: IntArray) -> None:
        """Write the mask of each matcher into its line, one bit a token, the lowest of each word first. Uses several threads,
        and lets other Python threads run meanwhile."""
        ...

    def settle(self, wanted: Sequence[tuple[Any, int]], masks_NW: IntArray) -> dict[int, str]:
        """The masks are there: what the engine learns from them, and by line why a matcher cannot go on."""
        ...
