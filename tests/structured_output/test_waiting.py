"""A form whose compilation is slow keeps nobody waiting but its own request."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worker.tiny_engine import make_request

from quire import LLM, SamplingParams
from quire.engine.arg_utils import EngineArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.engine.core_loop import CoreLoop, ThreadInbox
from quire.engine.messages import AbortRequests, AddRequests, CoreMessage, Outputs, Shutdown
from quire.request import EngineRequest, FinishReason
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output import grammars
from quire.structured_output.guidance import GuidanceBackend
from quire.structured_output.rows import RowGrammar

EOS = 1
SLOW, FAST = r"[a-c]{9}", r"[d-f]{9}"


class Gate:
    """Compilations of `SLOW` wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.was_reached = threading.Event(), threading.Event()
        self.num_compiled = 0
        compile_form = GuidanceBackend.compile

        def slowly(backend: GuidanceBackend, params: StructuredOutputsParams) -> Any:
            if params.regex == SLOW:
                self.was_reached.set()
                assert self.is_open.wait(60)
                self.num_compiled += 1
            return compile_form(backend, params)

        monkeypatch.setattr(GuidanceBackend, "compile", slowly)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    grammars.shared_grammars.cache_clear()  # nothing is compiled yet
    made = Gate(monkeypatch)
    yield made
    made.is_open.set()


def config_of(path: Path, depth: int = 1) -> Any:
    args = EngineArgs(
        model=str(path), dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20, async_scheduling=depth > 1
    )
    return args.create_engine_config()


def request(name: str, regex: str | None = None, **params: Any) -> EngineRequest:
    form = None if regex is None else StructuredOutputsParams(regex=regex)
    common: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": False, "eos_token_ids": [EOS]}
    seed = sum(map(ord, name))
    return make_request(name, [5, 6, 7, seed % 90], seed=seed, structured_outputs=form, **common | params)


class Driven:
    """A core, stepped by hand."""

    def __init__(self, path: Path, depth: int = 1) -> None:
        self.core = EngineCore(config_of(path, depth))
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.order: list[str] = []

    def step(self) -> None:
        outputs = self.core.step()
        self.take(outputs)

    def take(self, outputs: Any) -> None:
        news = [*zip(outputs.plain_ids, ([token] for token in outputs.plain_tokens), strict=True)]
        news += [(output.request_id, output.new_token_ids) for output in outputs.outputs]
        for name, token_ids in news:
            if name not in self.tokens:
                self.order.append(name)
            self.tokens.setdefault(name, []).extend(token_ids)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason

    def run(self) -> dict[str, list[int]]:
        while self.core.has_work():
            self.step()
        return self.tokens


def requests() -> list[EngineRequest]:
    return [request("slow", SLOW), request("plain"), request("fast", FAST), request("slow too", SLOW), request("last")]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_of_others_go_on_and_every_answer_is_the_same(llama: Path, gate: Gate, depth: int) -> None:
    engine = Driven(llama, depth)
    engine.core.add_requests(requests())
    while set(engine.ended) != {"plain", "fast", "last"}:
        engine.step()
    assert gate.was_reached.wait(60) and gate.num_compiled == 0
    for _ in range(100):  # more plans without a token than a scheduler that is at fault may make
        engine.step()
    assert engine.core.has_work() and engine.core.stats().num_waiting == 2
    assert not set(engine.tokens) & {"slow", "slow too"}
    gate.is_open.set()
    tokens = engine.run()
    assert engine.order.index("slow") < engine.order.index("slow too")
    assert gate.num_compiled == 1
    again = Driven(llama, depth)
    again.core.add_requests(requests())  # every form is known now
    assert again.run() == tokens and again.ended == engine.ended


def test_no_step_waits_for_a_form(llama: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.is_open.set()
    begin = RowGrammar.__init__

    def check(row: RowGrammar, compiled: Any, *args: Any) -> None:
        assert compiled.done()
        begin(row, compiled, *args)

    monkeypatch.setattr(RowGrammar, "__init__", check)
    engine = Driven(llama)
    engine.core.add_requests(request(f"r{number}", f"[a-{'cdef'[number % 4]}]{{5}}") for number in range(12))
    assert len(engine.run()) == 12


def test_a_form_that_does_not_compile_ends_its_own_request(llama: Path, gate: Gate) -> None:
    engine = Driven(llama)
    engine.core.add_requests([request("wrong", "(?=a)"), request("plain")])
    engine.run()
    assert engine.ended["wrong"] is FinishReason.ERROR and engine.ended["plain"] is not FinishReason.ERROR


@pytest.mark.parametrize("way", ["abort", "sleep"])
def test_whoever_goes_meanwhile_is_forgotten_and_the_form_serves_the_next(llama: Path, gate: Gate, way: str) -> None:
    engine = Driven(llama)
    engine.core.add_requests([request("slow", SLOW)])
    engine.step()
    assert gate.was_reached.wait(60)
    if way == "abort":
        engine.core.abort_requests(["slow"])
        assert engine.core.stats().num_waiting == 0
    else:
        engine.core.sleep(1)
        engine.step()
        assert engine.ended == {"slow": FinishReason.ABORT}
        engine.core.wake_up()
    engine.step()
    assert not engine.core.has_work()
    gate.is_open.set()
    engine.core.add_requests([request("slow", SLOW)])
    assert len(engine.run()["slow"]) >= 9 and gate.num_compiled == 1


def test_a_loop_hears_of_aborts_and_of_its_end_while_a_form_is_compiled(llama: Path, gate: Gate) -> None:
    core, inbox = EngineCore(config_of(llama)), ThreadInbox()
    sent: list[CoreMessage] = []
    ended = threading.Event()

    def send(message: CoreMessage) -> None:
        sent.append(message)
        if isinstance(message, Outputs) and any(output.finish_reason for output in message.outputs.outputs):
            ended.set()

    loop = threading.Thread(target=CoreLoop(core, inbox, send).run)
    loop.start()
    inbox.put(AddRequests([request("slow", SLOW), request("gone", SLOW)]))
    assert gate.was_reached.wait(60)
    inbox.put(AbortRequests(["gone"]))
    inbox.put(AddRequests([request("plain")]))
    assert ended.wait(60)
    inbox.put(Shutdown())
    loop.join(60)
    assert not loop.is_alive() and not gate.is_open.is_set()
    assert core.stats().num_waiting == 1
    core.shutdown()


def test_readers_that_leave_an_engine_that_ends_and_others_that_go_on(llama: Path, gate: Gate) -> None:
    async def collect(engine: AsyncLLM, name: str, regex: str | None = None) -> str:
        form = None if regex is None else StructuredOutputsParams(regex=regex)
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, structured_outputs=form)
        text = ""
        async for output in engine.generate("hello", params, name):
            text = output.outputs[0].text
        return text

    async def run() -> None:
        engine = AsyncLLM(config_of(llama), core="inproc")
        try:
            slow = asyncio.create_task(collect(engine, "slow", SLOW))
            leaver = asyncio.create_task(collect(engine, "leaver", SLOW))
            assert await asyncio.to_thread(gate.was_reached.wait, 60)
            assert len(await collect(engine, "fast", FAST)) == 9
            assert await collect(engine, "plain")
            leaver.cancel()
            assert not slow.done()
            gate.is_open.set()
            assert len(await slow) == 9
            assert engine.get_num_unfinished_requests() == 0
        finally:
            engine.shutdown()

    asyncio.run(run())


def test_offline_many_forms_at_once_give_what_each_gives_alone(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_MOST_KEPT", 8)  # forms are forgotten while their requests queue
    grammars.shared_grammars.cache_clear()
    llm = LLM(str(llama), dtype="float32", max_model_len=128, kv_cache_memory_bytes=8 << 20, max_num_seqs=4)
    forms = [rf"[a-f]{{{number % 7 + 2}}}-{number}" for number in range(24)]
    params = [
        SamplingParams(
            temperature=1.0, seed=number, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=regex)
        )
        for number, regex in enumerate(forms)
    ]
    together = llm.generate(["hello"] * 24, params, use_tqdm=False)
    for number in (0, 11, 23):
        (alone,) = llm.generate("hello", params[number], use_tqdm=False)
        assert alone.outputs[0].text == together[number].outputs[0].text
        assert alone.outputs[0].text.endswith(f"-{number}")
