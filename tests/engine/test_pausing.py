"""A pause: nothing is computed in it, nothing of what is kept is lost by it, and what comes meanwhile waits."""

import asyncio
import dataclasses

import pytest
from tests.engine.builders import ENDLESS, ROOM, make_config
from tests.oracles.hash_model import HashModel

from quire.engine.async_llm import AsyncLLM
from quire.engine.llm_engine import LLMEngine
from quire.engine.pausing import is_named
from quire.entrypoints.llm import LLM
from quire.errors import CapacityError, RequestError
from quire.metrics.events import EventKind
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams

MODEL = HashModel(vocab_size=512)
SWAPS = {"preemption_mode": "swap"}


def sampling(**fields):
    return SamplingParams(**{"ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA, **fields})


def oracle(prompt, max_tokens, seed):
    return MODEL.oracle(prompt, SamplingParams(max_tokens=max_tokens), seed, 10_000)


@pytest.fixture(scope="module", params=["inproc", "inproc-async", "process-async"])
def engine(request):
    is_async = request.param.endswith("async")
    config = make_config(async_scheduling=is_async, max_num_seqs=4, **ROOM)
    engine = AsyncLLM.from_engine_config(config, core=request.param.split("-")[0])
    yield engine
    engine.shutdown()


class Reader:
    """Reads a request's stream from now on."""

    def __init__(self, engine: AsyncLLM, number: int, max_tokens: int = ENDLESS) -> None:
        self.prompt, self.seed, self.max_tokens = [5, number, 7, 8, 9], number, max_tokens
        self.tokens: list[int] = []
        self.reason: str | None = None
        self._engine = engine
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        params = sampling(max_tokens=self.max_tokens, seed=self.seed)
        async for output in self._engine.generate(self.prompt, params, f"r{self.seed}"):
            self.tokens += output.outputs[0].token_ids
            self.reason = output.outputs[0].finish_reason

    async def until(self, count: int) -> None:
        while len(self.tokens) < count:
            await asyncio.sleep(0)

    async def end(self) -> None:
        """Read on for some tokens, and then no more."""
        await self.until(len(self.tokens) + 20)
        await self._engine.abort(f"r{self.seed}")
        await self.task

    @property
    def expected(self) -> list[int]:
        """As many tokens as there are, but all if there is an end."""
        length = len(self.tokens) if self.max_tokens == ENDLESS else self.max_tokens
        return oracle(self.prompt, length, self.seed) if length else []


async def settle() -> None:
    """Let everything that has come be read."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_what_is_kept_stands_still_and_goes_on_as_if_nothing_had_been(engine, clear_cache):
    async def main():
        readers = [Reader(engine, number) for number in range(6)]  # four run, two wait
        await readers[0].until(20)
        assert not await engine.is_paused()
        await engine.pause_generation(mode="keep", clear_cache=clear_cache)
        assert await engine.is_paused() and await engine.is_sleeping()
        await settle()
        seen = [len(reader.tokens) for reader in readers]
        late = Reader(engine, 9, 5)
        stats = await engine.inspect()
        await settle()
        assert [len(reader.tokens) for reader in readers] == seen and not late.tokens
        assert stats
        await engine.resume_generation()
        for reader in readers:
            await reader.end()
        await late.task
        assert [reader.tokens for reader in (*readers, late)] == [reader.expected for reader in (*readers, late)]
        assert not await engine.is_paused()

    asyncio.run(main())


def test_an_abort_ends_what_runs_and_new_requests_wait(engine):
    async def main():
        readers = [Reader(engine, number) for number in range(5)]
        await readers[0].until(5)
        await engine.pause_generation()
        await asyncio.gather(*(reader.task for reader in readers))
        assert {reader.reason for reader in readers} == {"abort"}
        assert all(reader.tokens == reader.expected for reader in readers)
        late = Reader(engine, 7, 20)
        await settle()
        assert not late.tokens
        await engine.resume_generation()
        await late.task
        assert late.tokens == late.expected

    asyncio.run(main())


def test_a_pause_that_waits_lets_everything_end_first(engine):
    async def main():
        readers = [Reader(engine, number, 300) for number in range(6)]
        await readers[0].until(5)
        pausing = asyncio.create_task(engine.pause_generation(mode="wait"))
        while not await engine.is_paused():
            await asyncio.sleep(0)
        late, aborted = Reader(engine, 8, 20), Reader(engine, 9, 20)
        await settle()
        aborted.task.cancel()
        await pausing
        await asyncio.gather(*(reader.task for reader in readers))
        assert [reader.tokens for reader in readers] == [reader.expected for reader in readers]
        await settle()
        assert not late.tokens
        await engine.resume_generation()
        await late.task
        assert late.tokens == late.expected
        await engine.pause_generation(mode="wait")  # nothing runs: at once
        await engine.resume_generation()

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_an_engine_may_sleep_with_requests(engine, mode):
    async def main():
        readers = [Reader(engine, number, ENDLESS if mode == "keep" else 200) for number in range(5)]
        await readers[0].until(5)
        await engine.sleep(2, mode=mode)
        await settle()
        seen = [len(reader.tokens) for reader in readers]
        with pytest.raises(CapacityError, match="sleeps"):
            await Reader(engine, 9).task
        await engine.wake_up(["weights"])
        await settle()
        assert [len(reader.tokens) for reader in readers] == seen
        await engine.wake_up(["kv_cache"])
        for reader in readers:
            await (reader.end() if mode == "keep" else reader.task)
        assert [reader.tokens for reader in readers] == [reader.expected for reader in readers]
        told = [event.text for event in engine.events.latest() if event.kind == EventKind.CONTROL]
        assert told[-2:] == ["wake_up ['weights']", "wake_up ['kv_cache']"]

    asyncio.run(main())


def test_the_cache_s_memory_comes_and_goes_under_requests(engine):
    async def main():
        reader = Reader(engine, 3, 200)
        await reader.until(5)
        await engine.release_kv_cache_memory()
        assert await engine.is_sleeping()
        await engine.wake_up(["kv_cache"])
        assert not await engine.is_sleeping()
        assert await engine.reset_prefix_cache(reset_running_requests=True)
        await reader.task
        assert reader.tokens == reader.expected
        await engine.sleep(0, mode="keep")
        assert await engine.is_paused()
        await engine.wake_up(["scheduling"])
        assert not await engine.is_paused()

    asyncio.run(main())


def test_requests_are_ended_by_the_names_that_clients_know(engine):
    async def main():
        stays = Reader(engine, 1, 100)
        params = sampling(max_tokens=ENDLESS, n=2, seed=4)
        outputs = engine.generate([5], params, "chatcmpl-mine-7")
        await anext(outputs)
        assert await engine.abort_named(["nobody", "chatcmpl-mine"]) == 2
        last = [output async for output in outputs][-1]
        assert last.finished and {choice.finish_reason for choice in last.outputs} <= {"abort", None}
        await stays.task
        assert stays.tokens == stays.expected

    asyncio.run(main())


@pytest.mark.parametrize(
    ("core_id", "given", "expected"),
    [
        ("chatcmpl-abc-3~1f", "abc", True),
        ("chatcmpl-abc-3~1f.2", "chatcmpl-abc", True),
        ("cmpl-abc-3~1f", "chatcmpl-abc", True),
        ("chatcmpl-abc-3~1f", "msg_abc", True),
        ("chatcmpl-abc-def-3~1f", "abc-def", True),
        ("chatcmpl-abc-def-3~1f", "abc", False),
        ("chatcmpl-abc-3~1f", "abc-def", False),
        ("chatcmpl-abc-3~1f", "ab", False),
        ("job~1", "job", True),
    ],
)
def test_a_name_is_the_client_s_or_the_answer_s(core_id, given, expected):
    assert is_named(core_id, given) is expected


def test_what_makes_no_sense_is_refused(engine):
    async def main():
        for call in (engine.pause_generation(mode="later"), engine.sleep(1, mode="later")):
            with pytest.raises(RequestError, match="abort, wait, keep"):
                await call

    asyncio.run(main())


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, SWAPS])
def test_what_stands_still_is_computed_anew_whatever_it_had(settings):
    """Also what was preempted to host memory before: its pages are of other weights then."""
    config = make_config(num_blocks=70, max_num_seqs=8, max_model_len=256, **settings)
    if settings is SWAPS:
        config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, swap_space=0.01))
    engine = LLMEngine.from_engine_config(config, enable_multiprocessing=False)
    try:
        prompts = {str(number): [number, 3, 4] * 4 for number in range(8)}
        for name, prompt in prompts.items():
            engine.add_request(name, prompt, sampling(max_tokens=60, seed=int(name)))
        got: dict[str, list[int]] = {name: [] for name in prompts}
        for turn in range(100000):
            if not engine.has_unfinished_requests():
                break
            if turn % 7 == 3:
                engine.sleep(1 + turn % 2, mode="keep")
                assert engine.is_standing_still()
                engine.wake_up()
            for output in engine.step():
                assert isinstance(output, RequestOutput) and output.error is None
                got[output.request_id] = got[output.request_id] + output.outputs[0].token_ids
        assert got == {name: oracle(prompt, 60, int(name)) for name, prompt in prompts.items()}
    finally:
        engine.shutdown()


def test_prompts_may_be_enqueued_and_waited_for_later():
    with LLM.from_engine_config(make_config(num_blocks=2048)) as llm:
        plain = {"detokenize": False, "ignore_eos": True, "max_tokens": 6}
        first = llm.enqueue(
            [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 7]}], SamplingParams(seed=1, **plain)
        )
        between = llm.generate({"prompt_token_ids": [9]}, SamplingParams(seed=3, **plain), use_tqdm=False)
        assert between[0].outputs[0].token_ids == oracle([9], 6, 3)
        llm.sleep(0, mode="keep")
        second = llm.enqueue({"prompt_token_ids": [8]}, SamplingParams(seed=2, **plain))
        with pytest.raises(RequestError, match="paused"):
            llm.generate({"prompt_token_ids": [9]}, SamplingParams(**plain), use_tqdm=False)
        with pytest.raises(RequestError, match="unfinished"):
            llm.sleep(1, mode="wait")
        llm.wake_up(["scheduling"])
        outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
        assert [output.request_id for output in outputs] == first + second
        expected = [oracle([5, 6], 6, 1), oracle([5, 7], 6, 1), oracle([8], 6, 2)]
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm.wait_for_completion() == [] and llm.get_world_size() == 1
        llm.enqueue({"prompt_token_ids": [8]}, SamplingParams(**plain))
        with pytest.raises(RequestError, match="output_type is int"):
            llm.wait_for_completion(int, use_tqdm=False)
