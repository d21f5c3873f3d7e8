"""Several engine cores behind one client: copies of one model, each with its own device, scheduler and cache.

Requests go to the copy that has least to do with them (`replica_choice.py`), calls go to all. Each copy is started, watched and
started again by its own client (`recovery.py`): its requests wait for it and go on, while the other copies serve. Knows messages;
knows nothing of processes and devices.
"""

import dataclasses
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec

from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.pausing import PauseState
from quire.engine.replica_choice import PIECE_TOKENS, Assignment, ReplicaChooser, keys_of
from quire.engine.shared_copies import Gathering
from quire.errors import ConfigError
from quire.executor.host_door import HostDoor
from quire.logger import init_logger
from quire.request import EngineCoreOutput, EngineCoreOutputs, EngineRequest, FinishReason, QueueState, Refusal

logger = init_logger(__name__)

StartCopy = Callable[[OnMessage], CoreClient]
"""Starts one copy, which calls what it is given with its messages."""


def config_of_copy(config: EngineConfig, number: int) -> EngineConfig:
    """The configuration of one of the copies."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, data_parallel_rank=number))


@dataclasses.dataclass(slots=True)
class _Call:
    """A call that copies have not all answered. Attributes: name: of the utility; `answers`: by the copy's number."""

    name: str
    answers: dict[int, messages.UtilityResult] = dataclasses.field(default_factory=dict[int, messages.UtilityResult])


class CopiesClient(CoreClient):
    """Engine cores that are copies of one another, as one core.

    Args:
        starts: one for each copy; they start at the same time.
        on_message: gets the messages of all. A copy's death is a `Restarting` that says that others go on; the `Restarted` behind
            it names the requests that are to be sent again.
        gathering: of copies that share experts; all are told when one may have got work, since all take their steps together.
        door: at which hosts join. Both are closed before the first copy is ended: no end is a loss then.

    Raises:
        ConfigError, EngineDeadError: a copy does not start.
    """

    shares_memory = False

    def __init__(
        self,
        starts: Sequence[StartCopy],
        on_message: OnMessage,
        gathering: Gathering | None = None,
        door: HostDoor | None = None,
    ) -> None:
        self._on_message, self._gathering, self._door, self._num_wakes = on_message, gathering, door, 0
        self._calling = threading.Lock()  # held while all are called, so that all have the same order of calls
        self.clients: Sequence[CoreClient] = ()
        self._lock = threading.Lock()  # never held while a copy is spoken to, which may be waiting for it
        self._owners: dict[str, Assignment] = {}
        self._waiting: dict[str, Assignment] = {}
        self._calls: dict[int, _Call] = {}
        self._deferred: list[messages.UtilityCall] = []
        self._down: set[int] = set()
        self._gone: dict[int, str] = {}
        """Of those that are down: the copies whose host is gone, and what became of it."""
        self._queues: dict[int, QueueState] = {}
        self._chooser = ReplicaChooser(len(starts))
        self.clients = _start_all(starts, self._heard, self._shut_down)
        self.ready = _join_ready([client.ready for client in self.clients])
        pieces = sum(client.ready.num_blocks * client.ready.block_size for client in self.clients) // PIECE_TOKENS
        self._chooser = ReplicaChooser(len(starts), pieces)

    # --- from the frontends ---

    def send(self, message: messages.FrontendMessage) -> None:
        match message:
            case messages.AddRequests(requests=requests, again=again):
                for number, part in self._divide(requests).items():
                    self.clients[number].send(messages.AddRequests(part, again=again))
            case messages.AbortRequests(request_ids=request_ids):
                for number, ids in self._forget(request_ids).items():
                    self.clients[number].send(messages.AbortRequests(ids))
            case messages.UtilityCall():
                self._call(message)
            case _:
                for client in self.clients:
                    client.send(message)
        self._wake_all()

    def _wake_all(self) -> None:
        """Copies that share experts: one may have got work."""
        if self._gathering is not None:
            with self._calling:
                self._num_wakes += 1
                for client in self.clients:
                    client.send(messages.TakePart(self._num_wakes))

    def _divide(self, requests: Iterable[EngineRequest]) -> dict[int, list[EngineRequest]]:
        """The requests by the copy that gets them. One that comes again goes where it was; siblings (n > 1) go together, as
        they share the prompt's pages. One that names a copy whose host is gone is refused."""
        parts: dict[int, list[EngineRequest]] = {}
        siblings: dict[str, int] = {}
        refused: list[EngineCoreOutput] = []
        with self._lock:
            for request in requests:
                if request.copy in self._gone:
                    refused.append(_refuse(request, self._gone[request.copy]))
                    continue
                owner = self._owners.get(request.request_id)
                if owner is None:
                    owner = self._assign(request, siblings.get(request.group_id or ""))
                if request.group_id:
                    siblings[request.group_id] = owner.replica
                parts.setdefault(owner.replica, []).append(request)
        if refused:
            self._on_message(messages.Outputs(EngineCoreOutputs(outputs=refused)))
        return parts

    def _assign(self, request: EngineRequest, number: int | None) -> Assignment:
        """A copy for a new request; `number`: the one that it must be."""
        tokens = request.prompt_token_ids
        number = request.copy if number is None else number
        if number is not None:
            owner = self._chooser.give(number, (), 1 if request.copy is None else max(1, len(tokens)))
        else:
            adapter = request.adapter.lora_name if request.adapter is not None else None
            keys = keys_of(tokens, (request.cache_salt, adapter))
            up = [copy for copy in range(len(self.clients)) if copy not in self._down]
            owner = self._chooser.choose(keys, PIECE_TOKENS, len(tokens), up or range(len(self.clients)))
        self._owners[request.request_id] = self._waiting[request.request_id] = owner
        return owner

    def _forget(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Requests end: their ids, by copy."""
        parts: dict[int, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                if (owner := self._end(request_id)) is not None:
                    parts.setdefault(owner.replica, []).append(request_id)
        return parts

    def _end(self, request_id: str) -> Assignment | None:
        owner = self._owners.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if owner is not None:
            self._chooser.end(owner)
        return owner

    def _call(self, call: messages.UtilityCall) -> None:
        """Have all copies do something; while one is started again, the call waits for it. It fails where that needs a host that
        is gone."""
        with self._lock:
            why = "; ".join(self._gone.values())
            if self._down and not why:
                self._deferred.append(call)
                return
            if not why:
                self._calls[call.call_id] = _Call(call.utility)
        if why:
            error = f"{call.utility} is for all copies of the engine: {why}"
            self._on_message(messages.UtilityResult(call.call_id, error=error, refusal=_AWAY))
            return
        with self._calling:
            for client in self.clients:
                client.send(call)

    # --- from the copies, each in its own thread ---

    def _heard(self, number: int, message: messages.CoreMessage) -> None:
        match message:
            case messages.Outputs(outputs=outputs):
                with self._lock:
                    self._take_in(number, outputs)
                self._on_message(message)
            case messages.UtilityResult():
                self._answered(number, message)
            case messages.Restarting(message=text, is_gone=is_gone):
                self._lose(number, text, is_gone)
            case messages.Restarted():
                self._come_back(number)
            case messages.GivenUp(core_ids=core_ids):
                self._forget(core_ids)
                self._on_message(message)
            case messages.Dead(message=text):
                self._on_message(msgspec.structs.replace(message, message=f"copy {number} of the engine: {text}"))
            case messages.Stalled() | messages.Ready() | messages.Standing():
                self._on_message(message)

    def _take_in(self, number: int, outputs: EngineCoreOutputs) -> None:
        if self._waiting:
            for request_id in outputs.plain_ids:
                self._begin_answer(request_id)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self._end(output.request_id)
            elif output.new_token_ids:
                self._begin_answer(output.request_id)
        outputs.engine = number
        if outputs.queue is not None:
            self._queues[number] = outputs.queue
            outputs.queue = _join_queues(self._queues.values(), len(self.clients) - len(self._gone))

    def _begin_answer(self, request_id: str) -> None:
        owner = self._waiting.pop(request_id, None)
        if owner is not None:
            self._chooser.begin_answer(owner)

    def _answered(self, number: int, result: messages.UtilityResult) -> None:
        with self._lock:
            call = self._calls.get(result.call_id)
            if call is None:  # it has failed already
                return
            call.answers[number] = result
            if len(call.answers) < len(self.clients):
                return
            del self._calls[result.call_id]
        self._on_message(_join_answers(call))

    def _lose(self, number: int, text: str, is_gone: bool) -> None:
        """A copy has died and is started again. Calls that it has not answered fail; new requests go to the others, and if its
        host is gone, so do its own."""
        text = f"copy {number} of the engine: {text}"
        calls: list[messages.UtilityCall] = []
        with self._lock:
            self._down.add(number)
            if is_gone:
                self._gone[number] = text
                calls, self._deferred = self._deferred, []
            self._queues.pop(number, None)
            self._chooser.forget(number)
            failed = [call_id for call_id, call in self._calls.items() if number not in call.answers]
            for call_id in failed:
                del self._calls[call_id]
            none_left = len(self._down) == len(self.clients)
            moved = self._owned_by({number}) if is_gone else []
        self._forget(moved)
        self._on_message(messages.Restarting(text, is_whole=False))
        for call_id in failed:
            error = f"an engine core died and is started again: {text}"
            self._on_message(messages.UtilityResult(call_id, error=error))
        self._make_calls(calls)
        if none_left:
            self._on_message(messages.Stalled(f"every copy of the engine is started again; the last one: {text}"))
        if moved:
            self._on_message(messages.Restarted(moved))

    def _owned_by(self, numbers: Container[int]) -> list[str]:
        """The unfinished requests of some copies."""
        return [request_id for request_id, owner in self._owners.items() if owner.replica in numbers]

    def _come_back(self, number: int) -> None:
        """A copy has been started again: its requests go on there, and those that found no copy at all are placed anew."""
        with self._lock:
            none_was_left = len(self._down) == len(self.clients)
            self._down.discard(number)
            self._gone.pop(number, None)
            own, stranded = self._owned_by({number}), self._owned_by(self._gone)
            calls, self._deferred = ([], self._deferred) if self._down else (self._deferred, [])
        self._forget(stranded)
        if none_was_left:
            self._on_message(messages.Stalled(""))
        self._on_message(messages.Restarted(own + stranded))
        if calls or self._gathering is not None:
            # Not from this thread, in which the copy's client tells that it is back.
            threading.Thread(target=self._catch_up, args=(calls,), name="deferred-calls", daemon=True).start()

    def _make_calls(self, calls: Sequence[messages.UtilityCall]) -> None:
        for call in calls:
            self._call(call)

    def _catch_up(self, calls: Sequence[messages.UtilityCall]) -> None:
        """A copy is back, which has not heard what all others have."""
        self._make_calls(calls)
        self._wake_all()

    def shutdown(self) -> None:
        self._shut_down(self.clients)

    def _shut_down(self, clients: Iterable[CoreClient]) -> None:
        for awaited in (self._door, self._gathering):
            if awaited is not None:
                awaited.close()
        _in_parallel([client.shutdown for client in clients])


_AWAY = Refusal(is_capacity=True, retry_after=10.0)
"""What needs a host that is gone may be asked for again when it is back."""


def _refuse(request: EngineRequest, why: str) -> EngineCoreOutput:
    return EngineCoreOutput(request.request_id, finish_reason=FinishReason.ERROR, error=why, refusal=_AWAY)


def _in_parallel(functions: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _start_all(
    starts: Sequence[StartCopy],
    heard: Callable[[int, messages.CoreMessage], None],
    end: Callable[[Iterable[CoreClient]], None],
) -> list[CoreClient]:
    """Start the copies at the same time. Where one cannot start, the others are ended, and its error is raised."""
    clients: dict[int, CoreClient] = {}
    errors: dict[int, BaseException] = {}

    def start(number: int) -> None:
        try:
            clients[number] = starts[number](lambda message: heard(number, message))
        except BaseException as error:  # raised in the thread that waits
            errors[number] = error

    _in_parallel([lambda number=number: start(number) for number in range(len(starts))])
    if errors:
        end(clients.values())
        came_first = list(errors.values())  # a copy may have died of what is wrong with another one
        raise next((error for error in came_first if isinstance(error, ConfigError)), came_first[0])
    return [clients[number] for number in range(len(starts))]


def _join_ready(all_ready: Sequence[messages.Ready]) -> messages.Ready:
    """What a request may count on, whichever copy it comes to; concurrency is the sum."""
    return messages.Ready(
        num_blocks=min(ready.num_blocks for ready in all_ready),
        block_size=all_ready[0].block_size,
        max_model_len=min(ready.max_model_len for ready in all_ready),
        max_concurrency=sum(ready.max_concurrency for ready in all_ready),
    )


def _join_queues(queues: Iterable[QueueState], num_copies: int) -> QueueState:
    """The queue of all copies. One that has not told anything has room."""
    told = list(queues)
    missing = num_copies - len(told)
    closed: set[str] = set() if missing else set(told[0].closed).intersection(*(queue.closed for queue in told))
    longest = max(queue.max_waiting for queue in told)
    return QueueState(
        max_waiting=sum(queue.max_waiting for queue in told) + missing * longest,
        delay=0.0 if missing else min(queue.delay for queue in told),
        closed=sorted(closed),
    )


def _concatenate(values: Sequence[Any]) -> list[Any]:
    return [item for value in values for item in value]


def _slowest_state(values: Sequence[Any]) -> str:
    """Draining as long as one copy drains; paused when all are."""
    order = [PauseState.DRAINING, PauseState.RUNNING, PauseState.PAUSED]
    return min(map(PauseState, values), key=order.index).value


def _first_known(values: Sequence[Any]) -> Any:
    return next((value for value in values if value is not None), None)


_JOIN: dict[str, Callable[[Sequence[Any]], Any]] = {
    "collective_rpc": _concatenate,
    "list_loras": _concatenate,
    "stop_profile": _concatenate,
    "abort_named": sum,
    "pause_state": _slowest_state,
    "timeline": _first_known,
    "is_sleeping": any,
    "is_standing_still": any,
    "remove_lora": any,
    "reset_prefix_cache": all,
}
"""How the copies' values become one; of other calls the first copy's counts, as all have the same."""


def _join_answers(call: _Call) -> messages.UtilityResult:
    answers = [call.answers[number] for number in sorted(call.answers)]
    failed = next((answer for answer in answers if answer.error is not None), None)
    if failed is not None:
        return failed
    join = _JOIN.get(call.name)
    value = answers[0].value if join is None else join([answer.value for answer in answers])
    return messages.UtilityResult(answers[0].call_id, value)
