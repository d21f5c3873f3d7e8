"""Pages that a connector has, and pages that it is given, as steps go: between the scheduler and its half of a connector.

Knows requests, rows and how far they are computed; takes no decisions.
"""

import numpy as np

from quire.core.cost_model import CostModel
from quire.core.fetch_times import FetchTimes
from quire.core.kv_connector import EXTRA, KVConnectorScheduler, Progress, check_no_params
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.core.request_state import Request
from quire.core.running import RunningBatch
from quire.request import EngineRequest


class NoTransfers:
    """Nobody else has pages."""

    def check(self, source: EngineRequest) -> None:
        """Raises RequestError: it asks for transfers that there are not."""
        check_no_params(source)

    def ask(self, request: Request, num_computed_tokens: int) -> int:
        """How many tokens behind these a connector has of a request that could start; it may have to wait for them."""
        return 0

    def names(self, request: Request) -> list[bytes]:
        """What is to be fetched for a request that waits for it."""
        return []

    def fetched(self, request: Request, problem: str | None) -> None:
        """It was fetched, or could not be."""

    def ended(self, request_id: str, problem: str | None) -> None:
        """A fetch has ended, whether or not its request still waits for it."""

    def late(self) -> list[str]:
        """Requests that wait for pages longer than computing them would take; each is told once."""
        return []

    def give_up(self, request: Request) -> None:
        """One of them waits no more."""

    def start(self, request: Request) -> None:
        """A request starts with what `ask` told last."""

    def launch(self, step: SchedulerOutput) -> None:
        """A step was planned: tell the workers."""

    def take_in(self, output: ModelRunnerOutput) -> None:
        """A step was collected: see what the workers tell."""

    def leave(self, request: Request) -> None:
        """A request has ended, or gives its pages back."""

    def reset(self) -> None:
        """What was saved is of no use any more."""


class PageTransfers(NoTransfers):
    """A connector's half beside a scheduler.

    Args:
        batch: the scheduler's rows.
        cost_model: predicts what computing takes that could be fetched.
    """

    def __init__(
        self, connector: KVConnectorScheduler, batch: RunningBatch, block_size: int, cost_model: CostModel
    ) -> None:
        self._connector, self._batch, self._size = connector, batch, block_size
        self._times = FetchTimes(cost_model, connector.config.scheduler.max_num_batched_tokens)
        self._num_told = np.zeros(len(batch.computed), dtype=np.int32)
        self._external: dict[str, tuple[int, int]] = {}
        """What was asked last: how many tokens the connector has of a request, and behind how many."""
        self._started: list[tuple[Request, int]] = []

    def check(self, source: EngineRequest) -> None:
        self._connector.check(source)

    def ask(self, request: Request, num_computed_tokens: int) -> int:
        self._external.pop(request.request_id, None)
        if request.is_swapped or request.request_id in self._times:  # what it was given up for is still being fetched
            return 0
        count, is_elsewhere = self._connector.get_num_new_matched_tokens(request, num_computed_tokens)
        if is_elsewhere and not self._times.pays(count, num_computed_tokens):
            count = 0
        request.awaits_pages = count > 0 and is_elsewhere
        self._external[request.request_id] = (count, num_computed_tokens)
        return count

    def names(self, request: Request) -> list[bytes]:
        self._times.begin(request.request_id, *self._external[request.request_id])
        return self._connector.fetch_names(request)

    def fetched(self, request: Request, problem: str | None) -> None:
        request.awaits_pages = False
        self._connector.fetched(request, problem)

    def ended(self, request_id: str, problem: str | None) -> None:
        self._times.end(request_id, has_come=problem is None)

    def late(self) -> list[str]:
        return self._times.late()

    def give_up(self, request: Request) -> None:
        request.awaits_pages = False
        self._connector.waited_enough(request)

    def start(self, request: Request) -> None:
        external, _ = self._external.pop(request.request_id, (0, 0))
        request.num_computed_tokens += external
        self._started.append((request, external))

    def launch(self, step: SchedulerOutput) -> None:
        for request, external in self._started:
            self._num_told[request.row] = request.num_computed_tokens // self._size
            self._connector.update_state_after_alloc(request, request.block_ids, external)
        self._started.clear()
        meta = self._connector.build_connector_meta(step, self._progress(step))
        if meta is not None:
            step.extras[EXTRA] = meta

    def _progress(self, step: SchedulerOutput) -> list[Progress]:
        """The pages of the step's rows that are whole once it is computed, and that the connector was not told of."""
        batch, rows, told = self._batch, step.rows, self._num_told
        whole = np.minimum(batch.computed[rows], batch.known[rows]) // self._size
        found: list[Progress] = []
        for index in (whole > told[rows]).nonzero()[0].tolist():
            row, count = int(rows[index]), int(whole[index])
            request = batch.request(row)
            batch.flush(request)
            if request.publishes:
                found.append(Progress(request, request.block_ids[0][:count], int(told[row])))
            told[row] = count
        return found

    def take_in(self, output: ModelRunnerOutput) -> None:
        if output.extras:
            self._connector.update_connector_output(output)

    def leave(self, request: Request) -> None:
        self._external.pop(request.request_id, None)
        self._connector.request_finished(request, request.block_ids)

    def reset(self) -> None:
        self._connector.reset_cache()
