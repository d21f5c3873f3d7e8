"""Which requests a new core gets, and when: finds the request that makes cores die, whatever frontend it comes from.

A core that dies may have been killed from outside, or by one of its requests, and then by the same one again. So a request
under which `MAX_FRUITLESS` cores in a row died without giving it a token is a suspect: suspects run one at a time, alone, until
they get a token, and all others wait meanwhile. A request under which a core dies while it runs alone is at fault.

Looks at messages only. While no core has died it looks at none of the core's, and passes the frontends' on as they are.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import msgspec

from quire.engine.messages import AbortRequests, AddRequests, FrontendMessage
from quire.request import EngineCoreOutputs, EngineRequest

MAX_FRUITLESS = 2
"""Cores that may die under a request without giving it a token, before it goes on alone."""


@dataclasses.dataclass
class _Trial:
    """A request that a new core was given, or will be, and that has got no token since; siblings (n > 1) are one.

    Attributes:
        ids: the core's, of those that have not ended.
        num_fruitless: cores in a row that died under it.
        is_given: the core that runs now has it.
    """

    ids: set[str]
    num_fruitless: int
    is_given: bool = False


class Suspects:
    """The requests of all frontends after the death of a core.

    Attributes:
        is_watching: outputs are of interest: `saw` wants them.
    """

    def __init__(self) -> None:
        self.is_watching = False
        self._trials: dict[str, _Trial] = {}
        self._names: dict[str, str] = {}
        """The trial of each of the core's ids."""
        self._alone: _Trial | None = None
        self._held: list[AddRequests] = []
        self._never_given: set[str] = set()

    @property
    def holds_others(self) -> bool:
        """Whether a suspect runs alone, or shall, so that no other request is sent."""
        return self._alone is not None or any(map(_is_suspect, self._trials.values()))

    def core_died(self) -> list[str]:
        """A core has died. The core's ids of the request that is at fault, if that is certain; its frontend must not send it
        again. Frontends send all others again: what is held is forgotten."""
        alone, self._alone = self._alone, None
        self._never_given = {_name(request) for message in self._held for request in message.requests}
        self._held.clear()
        for trial in self._trials.values():
            trial.num_fruitless += trial.is_given
            trial.is_given = False
        culprit = sorted(alone.ids) if alone is not None else []
        self._forget(culprit)
        return culprit

    def let_through(self, message: FrontendMessage) -> Sequence[FrontendMessage]:
        """A frontend's message: what to send to the core because of it, now."""
        match message:
            case AddRequests(requests=requests, again=again):
                if again:
                    self._judge(requests)
                if not self.holds_others:
                    return [self._given(message)]
                self._held.append(message)
                return self._next()
            case AbortRequests(request_ids=request_ids):
                return [message, *self._abort(request_ids)]
            case _:
                return [message]

    def saw(self, outputs: EngineCoreOutputs) -> Sequence[FrontendMessage]:
        """A core's outputs: what to send to it because of them."""
        told = (one.request_id for one in outputs.outputs if one.new_token_ids or one.finish_reason is not None)
        trials = [self._names[each] for each in itertools.chain(outputs.plain_ids, told) if each in self._names]
        return self._forget([each for name in trials for each in self._trials[name].ids])  # they kill nothing

    def _judge(self, requests: Iterable[EngineRequest]) -> None:
        """Requests that come again: each is on trial until it gets a token."""
        unknown: dict[str, list[EngineRequest]] = {}
        for request in requests:
            if request.request_id not in self._names:
                unknown.setdefault(_name(request), []).append(request)
        for name, siblings in unknown.items():
            had_none = not any(request.resumed_token_ids for request in siblings) and name not in self._never_given
            trial = self._trials.setdefault(name, _Trial(set(), int(had_none)))
            for request in siblings:
                trial.ids.add(request.request_id)
                self._names[request.request_id] = name
        self.is_watching = bool(self._trials)

    def _given(self, message: AddRequests) -> AddRequests:
        """A message that goes to the core."""
        for request in message.requests if self._trials else ():
            name = self._names.get(request.request_id)
            if name is not None:
                self._trials[name].is_given = True
        return message

    def _next(self) -> list[FrontendMessage]:
        """The next suspect, if it has come and none runs; all that is held when there is no suspect any more. The one that runs
        may come twice, when its frontend was late to hear of a second death."""
        if not self.holds_others:
            held, self._held = self._held, []
            return [self._given(message) for message in held]
        candidates = self._trials.values() if self._alone is None else (self._alone,)
        for trial in filter(_is_suspect, candidates):
            come = (request for message in self._held for request in message.requests)
            requests = {request.request_id: request for request in come if request.request_id in trial.ids}
            if requests:
                self._drop_held(trial.ids)
                self._alone = trial
                return [self._given(AddRequests(list(requests.values()), again=True))]
        return []

    def _abort(self, request_ids: Iterable[str]) -> list[FrontendMessage]:
        self._drop_held(set(request_ids))
        return self._forget(request_ids)

    def _drop_held(self, request_ids: set[str]) -> None:
        if self._held:
            kept = [[one for one in message.requests if one.request_id not in request_ids] for message in self._held]
            self._held = [
                msgspec.structs.replace(message, requests=requests)
                for message, requests in zip(self._held, kept, strict=True)
                if requests
            ]

    def _forget(self, request_ids: Iterable[str]) -> list[FrontendMessage]:
        """Requests have ended, or are no suspects any more."""
        for request_id in request_ids:
            name = self._names.pop(request_id, None)
            if name is not None:
                trial = self._trials[name]
                trial.ids.discard(request_id)
                if not trial.ids:
                    self._acquit(name)
        return self._next() if self._held else []

    def _acquit(self, name: str) -> None:
        trial = self._trials.pop(name)
        self.is_watching = bool(self._trials)
        if trial is self._alone:
            self._alone = None


def _is_suspect(trial: _Trial) -> bool:
    return trial.num_fruitless >= MAX_FRUITLESS


def _name(request: EngineRequest) -> str:
    return request.group_id or request.request_id
