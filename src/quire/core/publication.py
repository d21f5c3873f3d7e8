"""Pages that nobody else can find yet: those that collected steps have completed, and those of prompts in flight.

Naming a page costs a hash; it need not be done between one step and the next. Knows rows and how far they are computed;
takes no decisions.
"""

from quire.core.kv_cache_manager import KVCacheManager
from quire.core.output import IntArray
from quire.core.request_state import Request
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


class Beginnings:
    """Requests whose first chunk is planned and not yet collected, by the tokens of their first page.

    A step writes all of its keys and values before any of its tokens attends, layer by layer, and steps run in order. So
    what is planned can be shared already: many requests with one long prefix that arrive together compute it once.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._in_flight: dict[tuple[int, ...], tuple[Request, int, int]] = {}

    def add(self, request: Request, num_tokens: int, step_id: int) -> None:
        """The step will have computed the request's first `num_tokens` tokens."""
        if num_tokens >= self._kv.block_size and request.publishes:
            self._in_flight[self._first_page(request)] = (request, num_tokens, step_id)

    def publish_like(self, request: Request) -> None:
        """Let a request find the pages of one in flight that begins as it does."""
        if self._in_flight and len(request.token_ids) > self._kv.block_size:
            found = self._in_flight.get(self._first_page(request))
            # One that has had to give its pages back meanwhile has none to share.
            if (
                found is not None
                and found[0].block_ids
                and len(found[0].block_ids[0]) * self._kv.block_size >= found[1]
            ):
                self._kv.publish(found[0], found[1])

    def collected(self, step_id: int) -> None:
        """The step, and all before it, were collected: their pages are published as all others are."""
        if self._in_flight:
            self._in_flight = {page: entry for page, entry in self._in_flight.items() if entry[2] > step_id}

    def _first_page(self, request: Request) -> tuple[int, ...]:
        return tuple(request.token_ids[: self._kv.block_size])
