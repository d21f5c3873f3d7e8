"""What a grammar engine must be able to do: compile grammars, begin rows, follow them, make masks; and the choice of an engine.

One backend object serves one vocabulary with one set of tokens that end a sequence. What a compiled grammar and a matcher
are is the engine's own business. An engine's package is imported when a request first needs it.
"""

import abc
import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.extras import install_command
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.vocabulary import Vocabulary

IntArray = npt.NDArray[np.int32]


class Backend(abc.ABC):
    """A grammar engine. Legend: N rows, W words of 32 tokens."""

    @abc.abstractmethod
    def compile(self, params: StructuredOutputsParams) -> Any:
        """Compile a request's constraint. Several threads may compile at once.

        Raises:
            RequestError: the engine cannot read it; `param` names the field.
        """

    @abc.abstractmethod
    def begin(self, compiled: Any) -> Any:
        """Make a row's matcher, at its beginning; takes microseconds."""

    @abc.abstractmethod
    def take(self, matcher: Any, token_ids: list[int]) -> bool:
        """Let a matcher take tokens; whether its grammar allows them. One that refused is of no use any more."""

    @abc.abstractmethod
    def take_all(self, moves: Sequence[tuple[Any, list[int]]]) -> None:
        """Let each matcher take its tokens, which its grammar is known to allow."""

    @abc.abstractmethod
    def fill(self, wanted: Sequence[tuple[Any, int]], masks_NW: IntArray) -> None:
        """Write the mask of each matcher into its line, one bit a token, the lowest of each word first. Uses several threads,
        and lets other Python threads run meanwhile."""

    def why_stuck(self, matcher: Any) -> str | None:
        """Why a matcher whose mask was made cannot go on, if so. An engine that knows no way to go wrong there says nothing."""
        return None

    def is_forced(self, matcher: Any) -> bool:
        """Whether the grammar leaves one text only, and the mask perhaps less than that, as the token before it has it.
        Never of an engine whose masks have all that the grammar leaves."""
        return False

    def forced(self, matcher: Any) -> list[int]:
        """The tokens that come next for certain, as masks would have them one after the other; none where the engine does not
        know, or where masks leave a choice between ways to divide a text into tokens."""
        return []

    @abc.abstractmethod
    def room(self, matcher: Any, token_ids: list[int]) -> int:
        """How many of these tokens it would take one after the other."""


BACKENDS = {
    "guidance": ("quire.structured_output.guidance", "GuidanceBackend", "llguidance", "structured"),
    "xgrammar": ("quire.structured_output.xgrammar_backend", "XGrammarBackend", "xgrammar", "xgrammar"),
}
"""Name → module, class, the package that it needs, and the extra that installs it."""


def choose_backend(name: str, params: StructuredOutputsParams) -> str:
    """The backend's name where `auto` is asked for: llguidance, whose worst mask is a millisecond where xgrammar's is a hundred
    (bench/results/grammars.json); xgrammar for structural tags with a `format`, which only it reads."""
    kind, value = params.constraint()
    if kind == "grammar" and value.startswith("%llguidance"):  # it says itself whose language it is in
        return "guidance"
    if name != "auto":
        return name
    has_format = kind == "structural_tag" and '"format"' in (value if isinstance(value, str) else json.dumps(value))
    return "xgrammar" if has_format and is_installed("xgrammar") else "guidance"


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(BACKENDS[name][2]) is not None


def find_backend(name: str) -> Callable[[Vocabulary, tuple[int, ...]], Backend]:
    """The class of a backend.

    Raises:
        RequestError: its package is not installed.
    """
    module, backend_class, package, extra = BACKENDS[name]
    try:
        return getattr(importlib.import_module(module), backend_class)
    except ImportError:
        message = f"structured_outputs need the package {package}, which is not installed: {install_command(extra)}"
        raise RequestError(message, param="structured_outputs") from None
