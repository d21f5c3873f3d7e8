"""Which attention backend serves a model: the first candidate that says yes to every kind of layer, or the one the user names."""

import dataclasses
from collections.abc import Sequence

from quire.attention.interface import AttentionBackend, AttentionRequest
from quire.attention.paged import PagedBackend
from quire.errors import ConfigError
from quire.plugins.registry import Registry, import_class

BUILT_IN_BACKENDS = ("quire.attention.cpu:CpuBackend", "quire.attention.reference:ReferenceBackend")


BACKENDS: Registry[type[AttentionBackend]] = Registry("attention backend", "attention_backend")
"""The backends of plugins, which are asked before the platform's own."""


def register_attention_backend(
    name: str, backend: type[AttentionBackend] | str, *, override: bool = False, owner: str | None = None
) -> None:
    """Add a backend: a class or its path. Its `supports` should say no on devices that it does not know
    (`current_platform().name`). `override`, `owner`: see `Registry.register`.

    Raises:
        ConfigError: the name is taken.
    """
    BACKENDS.register(name, backend, override=override, owner=owner)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chosen class, and for each candidate's name what it answered."""

    backend: type[AttentionBackend]
    reasons: dict[str, str]


def load_backend(path: str) -> type[AttentionBackend]:
    """Import a class path `module:attribute`."""
    return import_class(path, "attention_backend", AttentionBackend)


def select_backend(
    requests: Sequence[AttentionRequest], candidates: Sequence[str], forced: str | None = None
) -> Selection:
    """Ask the candidates in order.

    Args:
        requests: what the model's layers need; a backend must serve all of them.
        candidates: the platform's class paths, best first; plugins' backends are asked before them.
        forced: a backend's name that the user insists on, or a class path of his own.

    Raises:
        ConfigError: no such name, or nobody (or not the forced one) can serve these layers.
    """
    backends = [*BACKENDS.values(), *(load_backend(path) for path in candidates)]
    if forced is not None:
        by_name = {backend.name: backend for backend in backends}
        if forced not in by_name and ":" in forced:
            by_name[forced] = load_backend(forced)
        if forced not in by_name:
            raise ConfigError(
                f"attention_backend={forced!r} is not known here; known: {', '.join(sorted(by_name))}, or a class path "
                f"'module:attribute'",
                setting="attention_backend",
            )
        backends = [by_name[forced]]
    if not requests:  # layers that use no backend read their pages in the built-in layout
        backends = [backend for backend in backends if issubclass(backend, PagedBackend)] or backends
    reasons: dict[str, str] = {}
    chosen: type[AttentionBackend] | None = None
    for backend in backends:
        refusal = next((answer.why for r in requests if not (answer := backend.supports(r)).yes), None)
        if refusal is not None:
            reasons[backend.name] = f"no: {refusal}"
        elif chosen is not None:
            reasons[backend.name] = f"could serve, but {chosen.name} comes first"
        elif forced is not None:
            chosen, reasons[backend.name] = backend, "chosen: named by attention_backend"
        elif backend.only_when_named:
            reasons[backend.name] = f"could serve: --attention-backend {backend.name} to use it"
        else:
            why = backend.supports(requests[0]).why if requests else "no layer needs attention"
            chosen, reasons[backend.name] = backend, f"chosen: {why}"
    if chosen is None:
        answers = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise ConfigError(f"no attention backend can serve this model ({answers})", setting="attention_backend")
    return Selection(chosen, reasons)
