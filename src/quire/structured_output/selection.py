"""Which grammar engine makes the masks, and where it lives. An engine's package is imported when a request first needs it."""

import importlib
import importlib.util
import json
from collections.abc import Callable

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.backend import Backend
from quire.structured_output.vocabulary import Vocabulary

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
    """Whether a backend's package is."""
    return importlib.util.find_spec(BACKENDS[name][2]) is not None


def find_backend(name: str) -> Callable[[Vocabulary, tuple[int, ...]], Backend]:
    """The class of a backend. Raises RequestError: its package is not installed."""
    module, backend_class, package, extra = BACKENDS[name]
    try:
        return getattr(importlib.import_module(module), backend_class)
    except ImportError:
        raise RequestError(
            f"structured_outputs need the package {package}, which is not installed: pip install 'quire[{extra}]'",
            param="structured_outputs",
        ) from None
