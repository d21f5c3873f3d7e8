"""Pages that collected steps have completed and that nobody else can find yet.

Naming a page costs a hash; it need not be done between one step and the next. Knows rows and how far they are computed;
takes no decisions.
"""

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.output import IntArray
from quire.core.running import RunningBatch


class PendingPages:
    """Rows whose pages are to be published, and their computed tokens."""

    def __init__(self, kv: KVCacheManager, batch: RunningBatch) -> None:
        self._kv = kv
        self._batch = batch
        self._num_tokens: dict[int, int] = {}

    def add(self, row: int, num_tokens: int) -> None:
        """The row's first `num_tokens` tokens are computed; the host knows all of them."""
        self._num_tokens[row] = num_tokens

    def add_rows(self, rows: IntArray, num_tokens: IntArray) -> None:
        """`add` for several rows."""
        self._num_tokens.update(zip(rows.tolist(), num_tokens.tolist(), strict=True))

    def publish(self) -> None:
        """Let others find all of them."""
        pending, self._num_tokens = self._num_tokens, {}
        for row, num_tokens in pending.items():
            self._kv.publish(self._batch.request(row), num_tokens)

    def publish_row(self, row: int) -> None:
        """Let others find a row's pages, which are about to go."""
        num_tokens = self._num_tokens.pop(row, 0)
        if num_tokens:
            self._kv.publish(self._batch.request(row), num_tokens)
