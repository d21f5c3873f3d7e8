"""Keeps Python's cyclic collector from looking through millions of token ids while the device waits for its first step.

A collection visits every item of every list that was made since the last one, several times before they count as old. For
1,000 prompts of 1,000 tokens that is 30 ms before the first step, and up to 50 ms in the middle of a later one.
"""

import gc

FREEZE_FROM = 64
"""Requests from which on they are kept out of sight while they run. Fewer are not worth it: what is unfrozen later counts as
old, and the caller's own young garbage with it."""


class CollectorPause:
    """While it is entered nothing is collected; after `settle` only what is newer than that. Leaves the collector as it was.

    Where the program has turned the collector off, or has frozen objects itself, that is left alone.
    """

    def __init__(self) -> None:
        self._was_enabled = False
        self._has_frozen = False

    def __enter__(self) -> "CollectorPause":
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def settle(self, num_requests: int) -> None:
        """All requests are queued: what exists now is passed over, and collecting goes on."""
        if not self._was_enabled:
            return
        if num_requests >= FREEZE_FROM and gc.get_freeze_count() == 0:
            gc.freeze()
            self._has_frozen = True
        gc.enable()

    def __exit__(self, *exception: object) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()
