"""The asynchronous engine over cores that die at random points of their loop, all drawn from one seed.

`AsyncLLM`, `RecoveringClient`, `Suspects`, `CoreLoop`, `EngineCore` and the scheduler are the real ones; the model is the hash
model. A core lives in the event loop's thread and takes a few turns of its loop at a time, so that a seed gives the same run
again. What it has sent is on its way for a while: a death takes the last messages with it, as a broken socket does.
"""

import asyncio
import collections
import dataclasses
import threading
from collections.abc import Awaitable
from random import Random
from typing import Any, cast

import pytest
from tests.engine.builders import make_config
from tests.oracles.hash_model import HashExecutor, HashModel

from quire import faults
from quire.codec import encode
from quire.engine import messages, recovery
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.core_client import CoreClient, OnMessage
from quire.engine.core_loop import CoreLoop
from quire.engine.recovery import RecoveringClient
from quire.engine.suspects import Suspects
from quire.errors import EngineError, QuireError
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

VOCABULARY = 512
POISON = VOCABULARY - 2
MODEL = HashModel(vocab_size=VOCABULARY, eos_every=30)
LOOP_POINTS = ("schedule", "execute", "collect", "update", "send", "utility")
MOST_IDLE_ROUNDS = 20_000
"""Rounds in which nothing ends, after which something is stuck."""


class Killed(BaseException):
    """A core's sudden death. Nothing may catch it but the harness."""


class _TurnIsOver(BaseException):
    """The core's loop has had its turn."""


class TurnInbox:
    """What the frontend has sent, as bytes; the loop may look into it so many times until its turn is over."""

    def __init__(self) -> None:
        self.data: collections.deque[bytes] = collections.deque()
        self.num_looks = 0

    def interrupt(self) -> None:
        """Nothing waits."""

    def receive(self, block: bool) -> list[messages.FrontendMessage]:
        if self.num_looks == 0 or (block and not self.data):
            raise _TurnIsOver
        self.num_looks -= 1
        taken = [messages.decoder_at_core()(data) for data in self.data]
        self.data.clear()
        return taken


class MortalCore(CoreClient):
    """A core in the caller's thread, which takes a turn when it is told to."""

    shares_memory = False

    def __init__(self, harness: "CrashingEngine", on_message: OnMessage) -> None:
        self.core = EngineCore(harness.config, HashExecutor(harness.config, model=MODEL), serves=True)
        self.ready = self.core.ready()
        self.is_alive = True
        self._draw = harness.draw
        self._on_message = on_message
        self._inbox = TurnInbox()
        self._underway: list[bytes] = []
        self._loop = CoreLoop(self.core, self._inbox, lambda message: self._underway.append(encode(message)))

    def send(self, message: messages.FrontendMessage) -> None:
        if self.is_alive:
            self._inbox.data.append(encode(message))

    def take_turn(self) -> None:
        """A few turns of the loop; then some of what it sent arrives, in order."""
        self._inbox.num_looks = self._draw.randrange(1, 6)
        try:
            self._loop.run()
        except _TurnIsOver:
            self._deliver(self._draw.randint(0, len(self._underway)))
        except Killed:
            self._deliver(self._draw.randint(0, len(self._underway)))
            self.is_alive = False
            self._on_message(messages.Dead("killed"))

    def _deliver(self, count: int) -> None:
        for data in self._underway[:count]:
            self._on_message(messages.decoder_at_frontend()(data))
        del self._underway[:count]

    def shutdown(self) -> None:
        self.is_alive = False


@dataclasses.dataclass
class Tally:
    """What happened in a run."""

    ended: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_tokens: int = 0
    num_deaths: int = 0
    num_calls: int = 0


class CrashingEngine:
    """An engine, its clients and the fate of its cores.

    Args:
        kill_rate: of passes of a point of the core's loop, the share at which the core dies.
        poison_rate: of requests, the share whose prompt kills every core that computes it.
        max_tokens: the most of an answer.
        settings: of the scheduler.
    """

    def __init__(
        self,
        seed: int,
        monkeypatch: pytest.MonkeyPatch,
        *,
        kill_rate: float = 0.005,
        poison_rate: float = 0.0,
        max_tokens: int = 12,
        at_once: int = 48,
        num_blocks: int = 160,
        **settings: Any,
    ) -> None:
        self.draw = Random(seed)
        self.config = make_config(
            vocab_size=VOCABULARY,
            max_model_len=64,
            eos_token_ids=(MODEL.eos_token_id,),
            num_blocks=num_blocks,
            **settings,
        )
        self.tally = Tally()
        self._max_tokens = max_tokens
        self._kill_rate, self._poison_rate, self._at_once = kill_rate, poison_rate, at_once
        self._cores: list[MortalCore] = []
        self._may_start, self._has_started = threading.Semaphore(0), threading.Event()
        self._is_restarting = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_started = 0
        self._failure: BaseException | None = None
        self._install_faults(monkeypatch)
        for name in ("FRUITLESS_WITHIN_S", "WITHIN_S"):
            monkeypatch.setattr(recovery, name, 0.0)  # deaths are many here, and no reason to give up
        monkeypatch.setattr("quire.engine.async_llm.open_client", self._open_client)
        self.engine = AsyncLLM.from_engine_config(self.config, core="process")

    # --- cores ---

    def _install_faults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("execute", "collect"):
            monkeypatch.setitem(faults.POINTS, name, (f"tests.oracles.hash_model:HashExecutor.{name}",))
        for point in LOOP_POINTS:
            for path in faults.POINTS[point]:
                owner, name = faults.find(path)
                monkeypatch.setattr(owner, name, getattr(owner, name))  # so that it is put back
            for is_before in (True, False):
                faults.install(point, is_before, self._pass_point)
        execute = HashExecutor.execute

        def execute_or_die(executor: HashExecutor, step: Any) -> None:
            if any(POISON in request.token_ids[: request.num_prompt_tokens] for request in step.new_requests):
                raise Killed
            execute(executor, step)

        monkeypatch.setattr(HashExecutor, "execute", execute_or_die)

    def _pass_point(self) -> None:
        if self.draw.random() < self._kill_rate and not self._suspects().holds_others:
            raise Killed  # one that runs alone would be taken for the cause

    def _open_client(self, config: Any, core: Any, on_message: OnMessage, **_: Any) -> RecoveringClient:
        def heard(message: messages.CoreMessage) -> None:
            if isinstance(message, messages.Restarting):
                self._is_restarting = True
            on_message(message)
            if isinstance(message, messages.Restarted):
                self._has_started.set()

        self._may_start.release()
        return RecoveringClient(self._start_core, heard)

    def _suspects(self) -> Suspects:
        return cast("RecoveringClient", self.engine._client)._suspects

    def _start_core(self, on_message: OnMessage, standing: messages.Standing | None) -> MortalCore:
        self._may_start.acquire()
        self._cores.append(MortalCore(self, on_message))
        if standing is not None:
            self._cores[-1].core.restore(standing)
        return self._cores[-1]

    def _turn(self) -> None:
        """The core's, or a new core's first."""
        if not self._is_restarting:
            self._cores[-1].take_turn()
        elif self.draw.random() < 0.2:
            self._may_start.release()
            self._has_started.wait()
            self._has_started.clear()
            self._is_restarting = False
            self.tally.num_deaths += 1

    # --- clients ---

    async def serve(self, count: int) -> Tally:
        """So many requests from clients of all kinds, until all have ended; nothing is left of them then."""
        draw, last = self.draw, self._num_started + count
        num_idle, ended = 0, 0
        while self._num_started < last or self._tasks:
            while self._num_started < last and len(self._tasks) < self._at_once and draw.random() < 0.9:
                self._spawn(self._client(self._num_started))
                self._num_started += 1
            if draw.random() < 0.01:
                self._spawn(self._call())
            self._turn()
            for _ in range(draw.randrange(1, 4)):
                await asyncio.sleep(0)
            before, ended = ended, self.tally.ended.total()
            num_idle = num_idle + 1 if before == ended else 0
            if self._failure is not None:
                raise self._failure
            assert num_idle < MOST_IDLE_ROUNDS, f"stuck with {len(self._tasks)} clients"
        self._check_nothing_is_left()
        return self.tally

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                self._failure = self._failure or task.exception()

        task.add_done_callback(over)

    def _params(self) -> SamplingParams:
        draw = self.draw
        rare = draw.random()
        return SamplingParams(
            max_tokens=draw.randint(1, self._max_tokens),
            min_tokens=draw.choice([0, 0, 0, 1]),
            seed=draw.choice([None, draw.randrange(1000)]),
            n=draw.randint(2, 3) if rare < 0.1 else 1,
            logprobs=2 if 0.1 < rare < 0.2 else None,
            prompt_logprobs=1 if 0.2 < rare < 0.25 else None,
            stop_token_ids=[draw.randrange(400)] if 0.25 < rare < 0.3 else None,
            ignore_eos=draw.random() < 0.3,
            stream_interval=draw.choice([None, None, 3]),
            output_kind=draw.choice(list(RequestOutputKind)),
        )

    async def _client(self, number: int) -> None:
        """One request, from its prompt to its end; some of them leave, or are aborted, before that."""
        draw, params = self.draw, self._params()
        prompt = [draw.randrange(2, 500) for _ in range(draw.randint(1, 20))]
        is_poison = draw.random() < self._poison_rate
        if is_poison:
            prompt.append(POISON)
        patience = draw.randrange(8) if draw.random() < 0.1 else None
        is_aborted = patience is not None and draw.random() < 0.5
        stream = await self.engine.open_stream(prompt, params, f"r{number}", priority=draw.randrange(3))
        oracles = [
            MODEL.oracle(prompt, request.sampling_params, request.seed, 64) for request in stream.record.engine_requests
        ]
        answer = Answer(params)
        try:
            outputs = stream.outputs()
            async for output in outputs:
                assert isinstance(output, RequestOutput)
                answer.take(output)
                if patience is not None and not output.finished:
                    patience -= 1
                    if patience < 0 and is_aborted:
                        await self.engine.abort(f"r{number}")
                    elif patience < 0:
                        break
            await outputs.aclose()
        except EngineError as error:
            assert is_poison and "was running alone" in str(error), error
            self.tally.ended["given up"] += 1
            return
        assert not (is_poison and answer.is_finished) or "abort" in answer.reasons.values()
        self.tally.ended[answer.check(prompt, oracles)] += 1
        self.tally.num_tokens += sum(map(len, answer.token_ids.values()))

    async def _call(self) -> None:
        """A control verb: it is answered, or it fails because the core died."""
        self.tally.num_calls += 1
        try:
            await self.engine.reset_prefix_cache()
        except QuireError as error:
            assert "started again" in str(error)

    def _check_nothing_is_left(self) -> None:
        core = self._cores[-1].core
        while core.has_work():
            core.step()
        stats = core.stats()
        assert stats.num_running == stats.num_waiting == 0 and not core._all_ids()
        assert stats.num_free_blocks == stats.num_total_blocks
        engine = self.engine
        assert not len(engine._outputs) and not engine._calls and not engine._to_add and not self._suspects()._held
        del self._cores[:-1]

    def close(self) -> None:
        """End the engine, whatever it is doing."""
        self._may_start.release()
        self.engine.shutdown()


class Answer:
    """What a client has seen of its answer."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self.token_ids: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        self.is_finished = False
        self._num_logprobs: collections.Counter[int] = collections.Counter()
        self._prompt_logprobs: list[Any] = []

    def take(self, output: RequestOutput) -> None:
        """The next output. Nothing may come after the last one."""
        assert not self.is_finished
        self.is_finished = output.finished
        is_delta = self._params.output_kind is RequestOutputKind.DELTA
        for each in output.outputs:
            if each.index in self.reasons:
                assert not is_delta or not each.token_ids
                continue
            before = self.token_ids.get(each.index, []) if is_delta else []
            grown = [*before, *each.token_ids]
            assert grown[: len(self.token_ids.get(each.index, []))] == self.token_ids.get(each.index, [])
            self.token_ids[each.index] = grown
            if each.logprobs is not None:
                known = self._num_logprobs[each.index] if is_delta else 0
                self._num_logprobs[each.index] = known + len(each.logprobs)
            if each.finish_reason is not None:
                self.reasons[each.index] = each.finish_reason
        if output.prompt_logprobs:
            self._prompt_logprobs = list(output.prompt_logprobs)

    def check(self, prompt: list[int], oracles: list[list[int]]) -> str:
        """How it ended. Raises AssertionError: not as the oracle says."""
        params = self._params
        for index, expected in enumerate(oracles):
            got = self.token_ids.get(index, [])
            if index in self.reasons and self.reasons[index] != "abort":
                assert got == expected, (params, self.reasons, self.token_ids, oracles)
                ends_by_length = len(expected) == params.max_tokens
                assert self.reasons[index] == "stop" or ends_by_length
            else:
                assert got == expected[: len(got)]
            if params.logprobs is not None:
                assert self._num_logprobs[index] == len(got)
        if not self.is_finished:
            return "left"
        assert set(self.reasons) == set(range(len(oracles)))
        if "abort" in self.reasons.values():
            return "aborted"
        if params.prompt_logprobs is not None:
            assert len(self._prompt_logprobs) == len(prompt)
        return "complete"


def crash(seed: int, count: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Tally:
    """Serve so many requests with the fate that the seed says."""

    async def main() -> Tally:
        world = CrashingEngine(seed, monkeypatch, **settings)
        try:
            return await world.serve(count)
        finally:
            world.close()

    return asyncio.run(main())
