"""Prepares forms slowly, in any order, and forgets them now and then: what an executor is to a scheduler, without grammars."""

from random import Random

from quire.request import EngineRequest
from quire.sampling_params import SamplingParams


class SlowPreparer:
    """As `Preparer`.

    Args:
        seed: of what happens when.
        ends: how likely a form that is being prepared is found ready when somebody looks.
        forgets: how likely a form that was prepared is forgotten when somebody looks.

    Attributes:
        begun, known, order: form by request that is being prepared; forms that are; requests in the order of their beginnings.
        released: requests whose form is ready at the next look.
        most_begun: preparations that were under way at once.
        loads, slots: what is loaded for which request: (place, adapter); and what every place has.
        broken: names of adapters that cannot be loaded.
    """

    def __init__(self, seed: int = 0, ends: float = 0.3, forgets: float = 0.0) -> None:
        self._random = Random(seed)
        self._ends, self._forgets = ends, forgets
        self.begun: dict[str, str] = {}
        self.known: set[str] = set()
        self.released: set[str] = set()
        self.order: list[str] = []
        self.most_begun = 0
        self.loads: dict[str, tuple[int, str]] = {}
        self.slots: dict[int, str] = {}
        self.broken: set[str] = set()
        self._problems: dict[str, str] = {}

    @staticmethod
    def form_of(params: SamplingParams | None) -> str:
        """What is prepared for a request: its form, or the feature of one that wants logprobs; nothing for others."""
        assert params is not None
        if params.structured_outputs is None:
            return "" if params.logprobs is None else "logprobs"
        assert params.structured_outputs.regex is not None
        return params.structured_outputs.regex

    def is_prepared(self, request: EngineRequest) -> bool:
        form = self.form_of(request.sampling_params)
        return not form or form in self.known

    def prepare(self, request: EngineRequest) -> None:
        assert not self.is_prepared(request), "prepared twice"
        self.begun[request.request_id] = self.form_of(request.sampling_params)
        self.order.append(request.request_id)
        self.most_begun = max(self.most_begun, len(self.begun))

    def load_adapter(self, request: EngineRequest, slot: int) -> None:
        assert request.adapter is not None and slot not in [other for other, _ in self.loads.values()]
        assert request.adapter.lora_name not in self.slots.values(), "loaded twice"
        self.slots.pop(slot, None)
        self.loads[request.request_id] = slot, request.adapter.lora_name

    def problems(self) -> dict[str, str]:
        problems, self._problems = self._problems, {}
        return problems

    def _end_loads(self, wait_s: float) -> list[str]:
        done = [name for name in self.loads if wait_s or self._random.random() < self._ends]
        for request_id in done:
            slot, adapter = self.loads.pop(request_id)
            if adapter in self.broken:
                self._problems[request_id] = f"{adapter} is broken"
            else:
                self.slots[slot] = adapter
        return done

    def prepared(self, wait_s: float) -> list[str]:
        for form in sorted(self.known):
            if self._random.random() < self._forgets:
                self.known.discard(form)
        done = [name for name in self.begun if wait_s or name in self.released or self._random.random() < self._ends]
        self.known.update(self.begun.pop(name) for name in done)
        return done + self._end_loads(wait_s)
