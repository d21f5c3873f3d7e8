"""What a frontend knows of the core's queue: it refuses what the core would refuse, without reading or sending it.

The core tells when the queue has become full or has room again, and now and then how full it is; bursts come in between. Where
tenants have shares, a burst of one says nothing of the others: then only the core's word counts.
"""

from quire.config import SchedulerConfig
from quire.config.limits import DEFAULT_MAX_NUM_WAITING
from quire.core.policies import policy_class
from quire.errors import CapacityError
from quire.request import QueueState


class QueueView:
    """The queue as the core last told of it.

    Args:
        num_copies: of the core, each with a queue of its own, which are one here.

    Attributes:
        state: what the core told.
    """

    def __init__(self, config: SchedulerConfig, num_copies: int = 1) -> None:
        self._is_fair = policy_class(config.policy).has_shares
        self._max_num_seqs = config.max_num_seqs * num_copies
        self._max_waiting = (config.max_num_waiting or DEFAULT_MAX_NUM_WAITING) * num_copies
        self.forget()

    def forget(self) -> None:
        """There is another core, which has not told anything yet."""
        self.state = QueueState(self._max_waiting)

    def check(self, tenant: str, num_unfinished: int) -> None:
        """Raises CapacityError, with the seconds after which to try again, if there is no room for another request.

        Args:
            num_unfinished: this frontend's requests, of which only `max_num_seqs` can run.
        """
        state = self.state
        if (tenant if self._is_fair else "") in state.closed:
            share = " for this tenant" if self._is_fair else ""
            message = f"the queue is full{share}: it is predicted to take {state.delay:.3g} s"
        elif not self._is_fair and num_unfinished - self._max_num_seqs >= state.max_waiting:
            message = f"the queue is full: at least {num_unfinished - self._max_num_seqs} requests wait"
        else:
            return
        raise CapacityError(message, retry_after=max(1.0, state.delay))
