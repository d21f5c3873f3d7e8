"""Many readers at once over the hash model, with the core in a thread and in a process: streams, cancellation, death."""

import asyncio
import contextlib
import os
import signal

import pytest
from tests.engine.builders import ENDLESS, ROOM, make_config
from tests.oracles.hash_model import HashExecutor, HashModel

from quire.engine import async_llm
from quire.engine.async_llm import AsyncLLM
from quire.engine.request_record import RequestRecord
from quire.errors import CapacityError, ConfigError, EngineDeadError, EngineError, RequestError
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.tokenizers.detokenizer import ByteDetokenizer

MODEL = HashModel(vocab_size=512)
CORES = ["inproc", "process"]


def sampling(**fields):
    """Parameters whose streams end at `max_tokens` alone."""
    return SamplingParams(ignore_eos=True, **fields)


def oracle(prompt, max_tokens, seed):
    return MODEL.oracle(prompt, SamplingParams(max_tokens=max_tokens), seed, 10_000)


@pytest.fixture(scope="module", params=["inproc", "inproc-async", "process"])
def engine(request, model_folder):
    config = make_config(model_folder, async_scheduling=request.param.endswith("async"), **ROOM)
    engine = AsyncLLM.from_engine_config(config, core=request.param.split("-")[0])
    yield engine
    engine.shutdown()


async def collect(outputs):
    return [output async for output in outputs]


def tokens_of(outputs):
    return [token for output in outputs for token in output.outputs[0].token_ids]


def test_many_concurrent_streams_are_the_oracle_s(engine):
    async def main():
        params = [sampling(max_tokens=3 + i % 20, seed=i, output_kind=RequestOutputKind.DELTA) for i in range(150)]
        streams = [collect(engine.generate([5, i % 400, 7], params[i], f"r{i}")) for i in range(150)]
        for index, outputs in enumerate(await asyncio.gather(*streams)):
            assert tokens_of(outputs) == oracle([5, index % 400, 7], 3 + index % 20, index)
            assert outputs[-1].finished and not any(output.finished for output in outputs[:-1])
        assert engine.get_num_unfinished_requests() == 0

    asyncio.run(main())


def test_long_prompt_logprobs_are_made_ready_between_other_work(engine, monkeypatch):
    monkeypatch.setattr(async_llm, "POSITIONS_AT_ONCE", 10)
    most, pieces = RequestRecord.read_prompt_logprobs, []

    def read(record, count=None):
        pieces.append(min(len(record.unread), len(record.unread) if count is None else count))
        most(record, count)

    monkeypatch.setattr(RequestRecord, "read_prompt_logprobs", read)

    async def main():
        prompt = [5 + place % 300 for place in range(205)]
        for kind in RequestOutputKind:
            pieces.clear()
            params = sampling(max_tokens=4, seed=3, prompt_logprobs=1, output_kind=kind)
            outputs = await collect(engine.generate(prompt, params, f"long-{kind}"))
            told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
            assert told[0][0] is None and [next(iter(position)) for position in told[0][1:]] == prompt[1:]
            assert len(told) == 1 or kind is RequestOutputKind.CUMULATIVE
            assert sum(pieces) == len(prompt) - 1 and max(pieces) == 10
            assert tokens_of(outputs)[-4:] == oracle(prompt, 4, 3)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("stop", [None, ["never said"]])
def test_a_stream_may_tell_several_tokens_at_a_time(engine, kind, stop):
    async def main():
        params = sampling(max_tokens=40, seed=2, output_kind=kind, stream_interval=7, stop=stop, n=2)
        outputs = await collect(engine.generate([5, 6], params, "r"))
        for index in range(2):
            told = [each for output in outputs for each in output.outputs if each.index == index]
            if kind is RequestOutputKind.DELTA:
                counts = [len(each.token_ids) for each in told]
                assert all(count >= 7 for count in counts[1:-1]) and sum(counts) == 40
            assert told[-1].finish_reason == "length"
        expected = oracle([5, 6], 40, 2)
        first = [each for output in outputs for each in output.outputs if each.index == 0]
        tokens = [token for each in first for token in each.token_ids] if kind is RequestOutputKind.DELTA else None
        assert (tokens or first[-1].token_ids) == expected
        whole = await collect(engine.generate([5, 6], sampling(max_tokens=40, seed=2), "s"))
        text = "".join(each.text for each in first) if tokens else first[-1].text
        assert text == whole[-1].outputs[0].text

    asyncio.run(main())


def test_text_prompts_stream_text_and_a_long_one_does_too(engine):
    async def main():
        tokenizer = engine.get_tokenizer()
        for text in ("hello world", "hello " * 3000):
            params = sampling(max_tokens=20, seed=1, truncate_prompt_tokens=50, output_kind=RequestOutputKind.DELTA)
            outputs = await collect(engine.generate(text, params, "r"))
            final = (
                await collect(engine.generate(text, sampling(max_tokens=20, seed=1, truncate_prompt_tokens=50), "r"))
            )[-1]
            ids = tokenizer.encode(text)[-50:]
            assert tokens_of(outputs) == oracle(ids, 20, 1)
            assert "".join(output.outputs[0].text for output in outputs) == final.outputs[0].text
            assert outputs[0].prompt == text and outputs[0].prompt_token_ids == ids

    asyncio.run(main())


def test_a_slow_reader_gets_merged_outputs_and_loses_nothing(engine):
    async def main():
        slow = engine.generate([5, 6], sampling(max_tokens=60, seed=3, output_kind=RequestOutputKind.DELTA), "slow")
        outputs = [await anext(slow)]
        await collect(engine.generate([7, 8], sampling(max_tokens=100, seed=4), "other"))
        outputs += [output async for output in slow]
        assert tokens_of(outputs) == oracle([5, 6], 60, 3)
        assert len(outputs) < 30

    asyncio.run(main())


def test_closing_a_generator_aborts_its_request_and_frees_its_pages(engine):
    async def main():
        stream = engine.generate([5, 6], sampling(max_tokens=ENDLESS, seed=3), "closed")
        await anext(stream)
        assert engine.get_num_unfinished_requests() == 1
        await stream.aclose()
        assert engine.get_num_unfinished_requests() == 0
        assert (await collect(engine.generate([5, 6], sampling(max_tokens=3, seed=3), "closed")))[-1].finished

    asyncio.run(main())


def test_cancelled_readers_leave_the_others_alone(engine):
    async def main():
        tasks = [
            asyncio.create_task(collect(engine.generate([5, i], sampling(max_tokens=ENDLESS, seed=i), f"r{i}")))
            for i in range(20)
        ]
        kept = engine.generate([9, 9], sampling(max_tokens=100, seed=7, output_kind=RequestOutputKind.DELTA), "kept")
        outputs = [await anext(kept)]
        for task in tasks:
            task.cancel()
        outputs += [output async for output in kept]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert tokens_of(outputs) == oracle([9, 9], 100, 7)
        assert engine.get_num_unfinished_requests() == 0

    asyncio.run(main())


def test_an_abort_gives_the_reader_a_last_output(engine):
    async def main():
        stream = engine.generate([5, 6], sampling(max_tokens=ENDLESS, seed=3), "r")
        await anext(stream)
        await engine.abort("r")
        await engine.abort(["unknown"])
        last = (await collect(stream))[-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"

    asyncio.run(main())


def test_siblings_arrive_together(engine):
    async def main():
        params = sampling(n=3, max_tokens=6, seed=2, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = await collect(engine.generate([5, 6], params, "r"))
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert output.outputs[0].token_ids == oracle([5, 6], 6, 2)
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3

    asyncio.run(main())


def test_a_bad_request_raises_and_the_engine_goes_on(engine):
    async def main():
        for prompt, params in [([], sampling()), ([9999], sampling()), ([5], sampling(logprobs=99))]:
            with pytest.raises(RequestError):
                await collect(engine.generate(prompt, params, "bad"))
        # Both are added before the event loop sees an output: the first cannot have ended when the second comes.
        first, second = await asyncio.gather(
            collect(engine.generate([5], sampling(max_tokens=50, seed=1), "twice")),
            collect(engine.generate([5], sampling(), "twice")),
            return_exceptions=True,
        )
        assert isinstance(second, RequestError) and "in use" in str(second)
        assert isinstance(first, list) and first[-1].finished

    asyncio.run(main())


def test_a_model_that_generates_refuses_to_pool(engine):
    with pytest.raises(RequestError, match="runner='pooling'"):
        asyncio.run(collect(engine.encode([5], PoolingParams(), "r")))


def test_utilities_answer(engine):
    async def main():
        await engine.check_health()
        assert engine.is_running and not engine.errored and not engine.is_stopped
        assert await engine.reset_prefix_cache() is True
        assert (await engine.explain())["kv_block_size"] == 4
        with pytest.raises(EngineError, match="collective_rpc"):
            await engine.collective_rpc("no_such_method")
        await engine.sleep(1)
        assert await engine.is_sleeping()
        assert await engine.is_sleeping()
        with pytest.raises(RequestError, match="tags") as refused:
            await engine.wake_up(["nonsense"])
        assert refused.value.param == "tags"
        assert await engine.wake_up(["weights"]) is False
        assert await engine.wake_up() is True
        assert not await engine.is_sleeping()
        assert tokens_of((await collect(engine.generate([5], sampling(max_tokens=3, seed=1), "r")))[-1:]) == oracle(
            [5], 3, 1
        )

    asyncio.run(main())


def test_sleep_ends_what_runs(engine):
    async def main():
        stream = engine.generate([5, 6], sampling(max_tokens=ENDLESS, seed=3), "r")
        await anext(stream)
        await engine.sleep()
        assert (await collect(stream))[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(CapacityError, match="sleeps"):
            await collect(engine.generate([5], sampling(), "s"))
        await engine.wake_up()

    asyncio.run(main())


def test_waiting_for_the_drain_ends_with_the_last_request(engine):
    async def main():
        await engine.wait_for_requests_to_drain()
        stream = engine.generate([5], sampling(max_tokens=ENDLESS, seed=1), "r")
        await anext(stream)
        with pytest.raises(TimeoutError):
            await engine.wait_for_requests_to_drain(drain_timeout=0)
        draining = asyncio.create_task(engine.wait_for_requests_to_drain())
        await asyncio.sleep(0)
        await engine.abort("r")
        await draining
        assert engine.get_num_unfinished_requests() == 0
        assert (await collect(stream))[-1].finished

    asyncio.run(main())


def test_metrics_count_what_was_served(engine):
    async def main():
        before = engine.metrics.counts["generation_tokens"]
        await collect(engine.generate([5, 6, 7], sampling(max_tokens=9, seed=1), "r"))
        assert engine.metrics.counts["generation_tokens"] - before == 9
        assert engine.metrics.success["length"] > 0

    asyncio.run(main())


def test_beam_search_gives_one_output_with_the_best_first(engine):
    async def main():
        params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
        (output,) = await collect(engine.beam_search([5, 6, 7], params, "b"))
        scores = [completion.cumulative_logprob for completion in output.outputs]
        assert len(scores) == 3 and scores == sorted(scores, reverse=True)
        assert all(len(completion.token_ids) == 4 for completion in output.outputs)

    asyncio.run(main())


def test_a_beam_search_that_runs_is_not_refused_by_a_queue_that_became_full(model_folder):
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)

    async def search(engine):
        (output,) = await collect(engine.beam_search([5, 6, 7], params, "b"))
        return [completion.token_ids for completion in output.outputs]

    async def main(engine):
        expected = await search(engine)
        searching = asyncio.ensure_future(search(engine))
        others = []
        while not searching.done():  # others take every place in the queue
            await asyncio.sleep(0)
            for _ in range(20 if len(others) < 2000 else 0):
                outputs = engine.generate([9, len(others)], sampling(max_tokens=100), f"r{len(others)}")
                others.append(asyncio.ensure_future(collect(outputs)))
        assert await searching == expected
        ends = await asyncio.gather(*others, return_exceptions=True)
        return sum(isinstance(end, CapacityError) for end in ends)

    engine = AsyncLLM.from_engine_config(make_config(model_folder, max_num_seqs=1, max_num_waiting=2), core="inproc")
    try:
        assert asyncio.run(main(engine)) > 0
    finally:
        engine.shutdown()


class StuckExecutor(HashExecutor):
    """Fails at the fifth step."""

    steps = 0

    def collect(self):
        self.steps += 1
        if self.steps == 5:
            raise RuntimeError("the device fell off")
        return super().collect()


@pytest.mark.parametrize("core", CORES)
def test_a_failed_step_raises_in_every_pending_generator(core):
    async def main():
        engine = AsyncLLM.from_engine_config(make_config(executor=StuckExecutor, recovery=False), core=core)
        streams = [collect(engine.generate([5, i], sampling(max_tokens=50, seed=i), str(i))) for i in range(5)]
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) and "fell off" in str(result) for result in results)
        assert engine.errored and "fell off" in str(engine.dead_error)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine.generate([5], sampling(), "late"))
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        engine.shutdown()

    asyncio.run(main())


def test_without_recovery_the_death_of_the_core_process_raises_in_every_pending_generator():
    async def main():
        engine = AsyncLLM.from_engine_config(make_config(recovery=False, **ROOM), core="process")
        streams = [engine.generate([5, i], sampling(max_tokens=ENDLESS, seed=i), str(i)) for i in range(5)]
        for stream in streams:
            await anext(stream)
        os.kill(engine._client.pid, signal.SIGKILL)
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert engine.errored and not engine.is_running
        await engine.wait_for_requests_to_drain()
        engine.shutdown()

    asyncio.run(main())


def test_signals_to_the_whole_group_leave_the_core_to_its_parent_who_drains():
    async def main():
        engine = AsyncLLM.from_engine_config(make_config(max_model_len=4000, num_blocks=5000), core="process")
        stream = engine.generate([5, 1], sampling(max_tokens=300, seed=1), "a")
        await anext(stream)
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(engine._client.client.pid, number)
        outputs = await collect(stream)
        assert outputs[-1].outputs[0].token_ids == oracle([5, 1], 300, 1)
        engine.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("core", CORES)
def test_a_full_queue_refuses_with_the_time_to_come_back_and_serves_the_rest(core):
    async def main():
        engine = AsyncLLM.from_engine_config(make_config(max_num_seqs=1, max_num_waiting=2, **ROOM), core=core)
        first = engine.generate([5], sampling(max_tokens=ENDLESS), "first")
        await anext(first)  # it has the only place until it is aborted
        streams = [collect(engine.generate([5, i], sampling(max_tokens=100, seed=i), str(i))) for i in range(12)]
        answers = [asyncio.ensure_future(stream) for stream in streams]
        done: set[asyncio.Future] = set()
        while len(done) < 10:
            done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        await first.aclose()
        results = await asyncio.gather(*answers, return_exceptions=True)
        refused = [result for result in results if isinstance(result, CapacityError)]
        assert len(refused) == 10 and all(error.retry_after > 0 for error in refused)
        served = [(index, result) for index, result in enumerate(results) if isinstance(result, list)]
        assert len(served) == 2
        for index, outputs in served:
            assert outputs[-1].outputs[0].token_ids == oracle([5, index], 100, index)
        engine.shutdown()

    asyncio.run(main())


def test_a_reader_that_fails_and_a_sequence_without_text_harm_no_other(engine, monkeypatch):
    async def main():
        failing = await engine.open_stream(
            [5, 6], sampling(max_tokens=20, output_kind=RequestOutputKind.DELTA), "fails"
        )
        failing.push_to(lambda: 1 / 0)
        stopping = engine.generate([5, 6], sampling(max_tokens=20, stop="never there"), "no-text")
        with monkeypatch.context() as patch:
            patch.setattr(ByteDetokenizer, "feed", lambda self, token_ids: 1 / 0)
            assert (await collect(stopping))[-1].outputs[0].finish_reason == "error"
        outputs = await collect(engine.generate([5, 6], sampling(max_tokens=20, seed=1), "r"))
        assert outputs[-1].outputs[0].token_ids == oracle([5, 6], 20, 1)
        failing.close()

    asyncio.run(main())


@pytest.mark.parametrize("core", CORES)
def test_news_that_cannot_be_taken_in_end_every_request_with_an_error(core, model_folder, monkeypatch):
    engine = AsyncLLM.from_engine_config(make_config(model_folder), core=core)

    async def main():
        waiting = [collect(engine.generate([5, 6], sampling(max_tokens=50), f"r{index}")) for index in range(3)]
        monkeypatch.setattr(engine._outputs, "process", lambda outputs, now: 1 / 0)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError] * 3

    try:
        asyncio.run(main())
    finally:
        engine.shutdown()


@pytest.mark.parametrize("core", CORES)
def test_shutdown_ends_pending_generators_and_may_be_called_twice(core):
    async def main():
        engine = AsyncLLM.from_engine_config(make_config(**ROOM), core=core)
        stream = engine.generate([5], sampling(max_tokens=ENDLESS, seed=1), "r")
        await anext(stream)
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(stream)
        with pytest.raises(EngineDeadError):
            await collect(engine.generate([5], sampling(), "late"))

    asyncio.run(main())


@pytest.mark.parametrize("core", CORES)
def test_a_configuration_that_cannot_work_is_refused_at_the_start(core):
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        AsyncLLM.from_engine_config(make_config(num_blocks=3), core=core)


def test_an_unknown_kind_of_core_is_refused():
    with pytest.raises(ConfigError, match="inproc"):
        AsyncLLM.from_engine_config(make_config(), core="thread")


def test_an_engine_serves_one_event_loop_after_another(engine):
    for index in range(3):
        outputs = asyncio.run(collect(engine.generate([5], sampling(max_tokens=4, seed=index), "r")))
        assert outputs[-1].outputs[0].token_ids == oracle([5], 4, index)


def test_a_loop_that_ends_with_readers_pending_leaves_the_engine_usable(engine):
    async def begin():
        stream = engine.generate([5], sampling(max_tokens=ENDLESS, seed=1), "left")
        await anext(stream)

    asyncio.run(begin())
    outputs = asyncio.run(collect(engine.generate([5], sampling(max_tokens=4, seed=1), "next")))
    assert outputs[-1].outputs[0].token_ids == oracle([5], 4, 1)
    with contextlib.suppress(RuntimeError):
        asyncio.run(engine.abort("left"))


def test_functions_reach_a_core_in_this_process_and_are_refused_by_another(engine):
    async def main():
        params = sampling(max_tokens=2, logits_processors=[lambda ids, logits: logits])
        if engine._client.shares_memory:
            assert (await collect(engine.generate([5], params, "r")))[-1].finished
        else:
            with pytest.raises(RequestError, match="logits_processors"):
                await collect(engine.generate([5], params, "r"))

    asyncio.run(main())
