"""Which grammar engine makes the masks, and where it lives. An engine's package is imported when a request first needs it."""

import importlib
from collections.abc import Callable

from quire.errors import RequestError
from quire.structured_output.backend import Backend
from quire.structured_output.vocabulary import Vocabulary

BACKENDS = {
    "guidance": ("quire.structured_output.guidance", "GuidanceBackend", "llguidance", "structured"),
    "xgrammar": ("quire.structured_output.xgrammar_backend", "XGrammarBackend", "xgrammar", "xgrammar"),
}
"""Name → module, class, the package that it needs, and the extra that installs it."""


def find_backend(name: str) -> Callable[[Vocabulary, tuple[int, ...]], Backend]:
    """The class of a backend; `auto` is llguidance, whose worst mask is 3 ms where xgrammar's is 100
    (bench/results/grammars.json).

    Raises:
        RequestError: its package is not installed.
    """
    module, backend_class, package, extra = BACKENDS["guidance" if name == "auto" else name]
    try:
        return getattr(importlib.import_module(module), backend_class)
    except ImportError:
        raise RequestError(
            f"structured_outputs need the package {package}, which is not installed: pip install 'quire[{extra}]'",
            param="structured_outputs",
        ) from None
