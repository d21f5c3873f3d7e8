"""A core that makes no progress is noticed, wherever it hangs; one that works or has nothing to do is left alone."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.builders import ENDLESS, ROOM, make_config
from tests.engine.test_async_llm import collect, oracle, sampling
from tests.engine.test_recovery import an_engine, run, until_restarted
from tests.oracles.hash_model import HashExecutor

from quire.core.output import ModelRunnerOutput
from quire.descriptors import memory_file
from quire.engine.async_llm import AsyncLLM
from quire.engine.heartbeat import FIRST_STEPS_FACTOR, NUM_BYTES, Activity, Heartbeat, Pulse, map_words
from quire.engine.llm_engine import LLMEngine
from quire.engine.request_stream import RequestStream
from quire.engine.watchdog import Progress, Watchdog
from quire.errors import EngineDeadError
from quire.metrics.events import EventKind
from quire.sampling_params import RequestOutputKind, SamplingParams

TIMEOUT_S = 1.0
LEARNT = 40
"""Tokens after which a core has measured enough steps to predict the next one."""
STUCK = 498
"""A prompt with this token is never answered, by the first core."""


class StuckExecutor(HashExecutor):
    """A device that never answers where a step begins a prompt that holds `STUCK`; once in a folder."""

    released = threading.Event()

    def execute(self, step: Any) -> None:
        self._is_stuck = any(STUCK in request.token_ids for request in step.new_requests)
        super().execute(step)

    def collect(self) -> ModelRunnerOutput:
        if self._is_stuck and not os.path.exists(os.environ["STUCK_ONCE"]):
            Path(os.environ["STUCK_ONCE"]).touch()
            self._wait_for_ever()
        return super().collect()

    def _wait_for_ever(self) -> None:
        self.released.wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", str(TIMEOUT_S))
    monkeypatch.setenv("STUCK_ONCE", str(tmp_path / "was stuck"))


def stop(engine: AsyncLLM) -> None:
    os.kill(engine._client.client.pid, signal.SIGSTOP)


async def generate(engine: AsyncLLM, prompt: list[int], length: int, seed: int) -> list[int]:
    outputs = await collect(engine.generate(prompt, sampling(max_tokens=length, seed=seed), f"{prompt}-{seed}"))
    return list(outputs[-1].outputs[0].token_ids)


class Reading:
    """A stream without an end, as far as it was read."""

    def __init__(self, stream: RequestStream, seed: int) -> None:
        self._stream, self._seed, self._tokens = stream, seed, list[int]()

    async def until(self, count: int) -> None:
        while len(self._tokens) < count:
            self._tokens += (await self._stream.next()).outputs[0].token_ids

    async def end(self) -> None:
        """Read on behind all that has come, and stop it: it has the oracle's tokens."""
        record = self._stream.record
        await self.until(len(record.sequences[0].token_ids) + LEARNT)
        self._stream.close()
        assert self._tokens == oracle(record.prompt_token_ids, len(self._tokens), self._seed)


async def begin(engine: AsyncLLM, seed: int) -> Reading:
    params = sampling(max_tokens=ENDLESS, seed=seed, output_kind=RequestOutputKind.DELTA)
    return Reading(await engine.open_stream([5, seed], params, str(seed)), seed)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def until_each_has(engine: AsyncLLM, num_tokens: int) -> None:
    await until(lambda: bool(engine._outputs.records))
    await until(lambda: all(len(one.sequences[0].token_ids) >= num_tokens for one in engine._outputs.records))


# --- with a core ---


def test_a_stopped_core_is_replaced_and_its_streams_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with an_engine() as engine:
            streams = [await begin(engine, i) for i in range(4)]
            for stream in streams:
                await stream.until(LEARNT)
            pid = engine._client.client.pid
            stop(engine)
            await until_restarted(engine, pid)
            for stream in streams:
                await stream.end()
            assert engine._client.client.pid != pid
            assert engine.events.totals == {EventKind.HANG: 1, EventKind.RESTART: 1, EventKind.REPLAY: 4}
            await engine.check_health()

    run(main())
    assert "made no progress for" in caplog.text
    assert "is stopped (SIGSTOP)" in caplog.text and "so it cannot show its stacks" in caplog.text


def test_a_core_that_was_stopped_while_idle_is_noticed_when_a_request_comes() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            await generate(engine, [5, 1], LEARNT, 1)
            stop(engine)
            assert await generate(engine, [5, 2], 50, 2) == oracle([5, 2], 50, 2)
            assert engine.events.totals[EventKind.HANG] == 1

    run(main())


def test_a_device_that_never_answers_costs_a_core_and_no_token(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with an_engine(executor="tests.engine.test_watchdog:StuckExecutor") as engine:
            await generate(engine, [5, 1], LEARNT, 1)
            prompts = [[5, 1], [STUCK], [5, 2]]
            texts = await asyncio.gather(*(generate(engine, prompt, 300, i) for i, prompt in enumerate(prompts)))
            assert texts == [oracle(prompt, 300, i) for i, prompt in enumerate(prompts)]
            assert engine.events.totals[EventKind.HANG] == 1

    run(main())
    assert "in a step" in caplog.text and "stacks of quire core (process " in caplog.text
    assert "_wait_for_ever" in capfd.readouterr().err


def test_without_recovery_a_hang_is_the_engines_end() -> None:
    async def main() -> None:
        async with an_engine(recovery=False) as engine:
            stream = await begin(engine, 1)
            await stream.until(LEARNT)
            os.kill(engine._client.pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match=r"made no progress .* and was ended"):
                await stream.until(ENDLESS)
            assert engine.errored and engine.events.totals[EventKind.HANG] == 1

    run(main())


def test_the_synchronous_engine_raises_when_its_process_hangs() -> None:
    engine = LLMEngine(make_config(recovery=False, **ROOM), multiprocess=True)
    try:
        engine.add_request("a", [5, 1], SamplingParams(max_tokens=ENDLESS, ignore_eos=True, detokenize=False))
        for _ in range(LEARNT):
            engine.step()
        os.kill(engine._client.client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="made no progress"):
            while engine.has_unfinished_requests():
                engine.step()
    finally:
        engine.shutdown()


class NeverReadyExecutor(HashExecutor):
    """Its constructor does not return."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        threading.Event().wait()


@pytest.mark.exhaustive  # five seconds
def test_a_start_that_hangs_shows_its_stacks_and_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_READY_TIMEOUT_S", "5")
    config = make_config(executor="tests.engine.test_watchdog:NeverReadyExecutor")
    with pytest.raises(EngineDeadError, match=r"was not ready within 5 s \(QUIRE_ENGINE_READY_TIMEOUT_S\)"):
        AsyncLLM(config, core="process")
    assert "start_core" in capfd.readouterr().err


def test_a_core_in_a_thread_that_hangs_is_told_of_until_it_goes_on(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        engine = AsyncLLM(make_config(executor="tests.engine.test_watchdog:StuckExecutor"), core="inproc")
        try:
            await generate(engine, [5, 1], LEARNT, 1)
            stream = asyncio.ensure_future(generate(engine, [STUCK], 9, 1))
            await until(lambda: engine.events.totals[EventKind.HANG] == 1)
            with pytest.raises(EngineDeadError, match=r"no progress for .* in a step .* thread of this process"):
                await engine.check_health()
            assert engine.is_running
            StuckExecutor.released.set()
            assert await stream == oracle([STUCK], 9, 1)
            await until(lambda: not engine._stalled)
            await engine.check_health()
        finally:
            StuckExecutor.released.set()
            engine.shutdown()
            StuckExecutor.released.clear()

    run(main())
    assert "_wait_for_ever" in capfd.readouterr().err


def test_nobody_watches_a_paused_core_that_has_requests() -> None:
    async def main() -> None:
        async with an_engine() as engine:
            stream = await begin(engine, 1)
            await stream.until(1)
            await engine.pause_generation(mode="keep", clear_cache=False)
            watchdog = engine._client.client._watchdog
            await until(lambda: Pulse(watchdog._words).is_at_rest(watchdog._num_sent))
            await engine.resume_generation()
            await stream.end()

    run(main())


# --- the heartbeat ---


def pulse(heartbeat: Heartbeat) -> Pulse:
    return Pulse(heartbeat.words)


def test_a_heartbeat_says_what_the_core_does_and_how_long_that_may_take() -> None:
    heartbeat = Heartbeat()
    first = TIMEOUT_S * FIRST_STEPS_FACTOR
    said: list[tuple[Activity, float]] = []
    for say in (
        lambda: None,
        lambda: heartbeat.took(2),
        lambda: heartbeat.step(None),
        lambda: heartbeat.step(1.0),
        lambda: heartbeat.step(5000.0),
        lambda: heartbeat.took(1),
        heartbeat.collect,
        heartbeat.wait_for_grammar,
        lambda: heartbeat.call(30.0),
        heartbeat.prepare,
        heartbeat.rest,
    ):
        say()
        said.append((pulse(heartbeat).activity, pulse(heartbeat).allowed_s))
    assert said == [
        (Activity.PREPARATION, first),
        (Activity.MESSAGES, TIMEOUT_S),
        (Activity.STEP, first),
        (Activity.STEP, TIMEOUT_S),
        (Activity.STEP, 50.01),
        (Activity.MESSAGES, TIMEOUT_S),
        (Activity.STEP, 50.01),
        (Activity.GRAMMAR, first),
        (Activity.CALL, 630.0),
        (Activity.PREPARATION, first),
        (Activity.REST, TIMEOUT_S),
    ]
    assert pulse(heartbeat).is_at_rest(3) and not pulse(heartbeat).is_at_rest(4)


def test_everything_that_a_core_begins_is_progress_but_asking_for_a_grammar_again() -> None:
    heartbeat = Heartbeat()
    for say in (lambda: heartbeat.step(1.0), lambda: heartbeat.took(1), heartbeat.prepare, heartbeat.rest):
        say()
        before = pulse(heartbeat).words
        say()
        assert pulse(heartbeat).words != before
    heartbeat.wait_for_grammar()
    before = pulse(heartbeat).words
    heartbeat.wait_for_grammar()
    assert pulse(heartbeat).words == before


def test_a_heartbeat_is_seen_through_another_map_of_its_memory() -> None:
    memory_fd = memory_file(NUM_BYTES, "test")
    heartbeat, seen = Heartbeat(map_words(memory_fd)), map_words(memory_fd)
    os.close(memory_fd)
    heartbeat.took(7)
    assert Pulse(seen).words == pulse(heartbeat).words and Pulse(seen).activity is Activity.MESSAGES


# --- the watch ---


class Owner:
    """Has the method that a watchdog calls."""

    def __init__(self, on_hang: Callable[[str], None]) -> None:
        self.on_hang_in = on_hang

    def on_hang(self, reason: str) -> None:
        self.on_hang_in(reason)


def test_a_core_hangs_when_it_stands_still_longer_than_it_said() -> None:
    progress, heartbeat = Progress(look_every_s=0.4), Heartbeat()
    heartbeat.step(1.0)
    looks = [progress.look(pulse(heartbeat), 0.4) for _ in range(4)]
    assert looks[:3] == ["", "", ""]
    assert looks[3] == "made no progress for 1.2 s in a step (1.0 s are allowed; QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS)"
    heartbeat.step(1.0)
    assert progress.look(pulse(heartbeat), 0.1) == ""


def test_time_in_which_the_watcher_itself_was_stopped_does_not_count() -> None:
    progress, heartbeat = Progress(look_every_s=0.05), Heartbeat()
    heartbeat.step(1.0)
    assert [progress.look(pulse(heartbeat), 3600.0) for _ in range(3)] == ["", "", ""]


def test_nobody_looks_at_a_core_that_rests_until_a_message_lies_unread() -> None:
    heartbeat, told = Heartbeat(), list[str]()

    def on_hang(reason: str) -> None:
        told.append(reason)
        if reason:
            heartbeat.took(1)
            heartbeat.rest()

    owner = Owner(on_hang)
    watchdog = Watchdog(heartbeat.words, owner.on_hang)
    heartbeat.rest()
    watchdog._watch()  # which ends when the core rests
    assert told == []
    watchdog.sent()
    watchdog._watch()
    assert len(told) == 2 and "with a message that it does not take in" in told[0] and not told[1]


def test_a_watchdog_is_turned_off_with_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "0")
    before = threading.active_count()
    watchdog = Watchdog(Heartbeat().words, Owner(print).on_hang)
    watchdog.begin()
    assert threading.active_count() == before
