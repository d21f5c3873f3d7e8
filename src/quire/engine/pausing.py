"""Whether a core schedules: it may be paused at once, or as soon as what runs has ended; what comes meanwhile waits.

Knows requests by their ids. Schedules nothing.
"""

import enum
from collections.abc import Iterable

from quire.errors import RequestError
from quire.request import EngineRequest

PAUSE_MODES = ("abort", "wait", "keep")


class PauseState(enum.StrEnum):
    """RUNNING: requests are scheduled. DRAINING: those that were there are, new ones wait. PAUSED: none is."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


class Pause:
    """A core's pause.

    Attributes:
        clears_cache: cached prefixes are to be forgotten when the core has drained.
    """

    def __init__(self) -> None:
        self.state = PauseState.RUNNING
        self.clears_cache = False
        self.held: dict[str, EngineRequest] = {}

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """Those of the ids that were held, and are no more."""
        return [request_id for request_id in request_ids if self.held.pop(request_id, None) is not None]


def check_mode(mode: str) -> None:
    """Raises RequestError: there is no such mode."""
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode is {mode[:20]!r}; it may be {', '.join(PAUSE_MODES)}", param="mode")


_KINDS = ("chatcmpl-", "cmpl-", "msg_", "resp_")


def is_named(core_id: str, given: str) -> bool:
    """Whether a core's request is one that a server's client calls so: by the id of its request, or of its answer. What the
    core has is that, the number that makes it the engine's own, a serial number, and with n > 1 the sibling's."""
    name = core_id.rpartition("~")[0]
    return _without_kind(given) in (_without_kind(name), _without_kind(name.rpartition("-")[0]))


def _without_kind(name: str) -> str:
    return next((name.removeprefix(kind) for kind in _KINDS if name.startswith(kind)), name)
