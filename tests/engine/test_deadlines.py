"""Requests end when their time is over, whoever named it, and others go on."""

import asyncio
import contextlib
import os
import signal
import time

import pytest
from tests.engine.builders import ENDLESS, ROOM, make_config
from tests.oracles.hash_model import HashModel

from quire import SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.caller import CALLER, Caller
from quire.errors import CapacityError, DeadlineError, RequestError
from quire.metrics.events import EventKind
from quire.request import QueueState
from quire.sampling_params import BeamSearchParams, RequestOutputKind

LONG = {
    "max_tokens": ENDLESS,
    "ignore_eos": True,
    "detokenize": False,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}
"""Parameters of a request that does not end by itself."""


async def collect(stream):
    """All outputs."""
    return [output async for output in stream]


@contextlib.asynccontextmanager
async def running(**settings):
    """An engine over the hash model."""
    engine = AsyncLLM.from_engine_config(make_config(**ROOM, **settings), core="inproc")
    try:
        yield engine
    finally:
        engine.shutdown()


def expire(engine, stream):
    """What a request's timer does; it need not be waited for."""
    stream.timer.cancel()
    engine._expire(stream.record)


def test_a_timeout_ends_a_request_wherever_it_is_and_leaves_the_others():
    async def main():
        async with running(max_num_seqs=1) as engine:
            params = SamplingParams(**LONG, seed=1)
            runs = asyncio.ensure_future(collect(engine.generate([5, 1], params, "runs", timeout=1.0)))
            waits = asyncio.ensure_future(collect(engine.generate([5, 2], params, "waits", timeout=0.9)))
            short = SamplingParams(max_tokens=5, ignore_eos=True, seed=3, detokenize=False)
            other = asyncio.ensure_future(collect(engine.generate([5, 3], short, "other")))
            for task in (runs, waits):
                with pytest.raises(DeadlineError, match="did not end within its timeout"):
                    await task
            assert (await other)[-1].outputs[0].token_ids == HashModel(vocab_size=512).oracle([5, 3], short, 3, 1000)
            assert engine.events.totals[EventKind.DEADLINE] == 2
            assert engine.get_num_unfinished_requests() == 0

    asyncio.run(main())


def test_a_stream_gets_its_tokens_until_its_time_is_over():
    async def main():
        async with running() as engine:
            params = SamplingParams(**LONG | {"output_kind": RequestOutputKind.DELTA})
            stream = await engine.open_stream([5, 1], params, "r", timeout=3600.0)
            assert (await stream.next()).outputs[0].token_ids
            expire(engine, stream)
            with pytest.raises(DeadlineError):
                await collect(stream.outputs())

    asyncio.run(main())


def test_the_engines_own_timeout_and_the_callers_hold_for_every_kind_of_request():
    async def main():
        async with running(request_timeout=0.2) as engine:
            with pytest.raises(DeadlineError):
                await collect(engine.generate([5, 1], SamplingParams(**LONG), "r", timeout=60.0))
            beams = BeamSearchParams(beam_width=2, max_tokens=50_000, ignore_eos=True)
            with pytest.raises(
                (DeadlineError, CapacityError)
            ):  # a step of it may be refused because its turn comes too late
                await collect(engine.beam_search([5, 1], beams, "b"))
        async with running() as engine:
            CALLER.set(Caller(deadline=time.monotonic() + 0.2))
            with pytest.raises(DeadlineError):
                await collect(engine.generate([5, 1], SamplingParams(**LONG), "r"))
            with pytest.raises(DeadlineError, match="before it was queued"):
                await collect(engine.generate([5, 1], SamplingParams(**LONG), "late"))

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), 1e9])
def test_a_timeout_that_is_none_is_refused_by_name(timeout):
    async def main():
        async with running() as engine:
            with pytest.raises(RequestError, match="above 0") as refusal:
                await collect(engine.generate([5, 1], SamplingParams(**LONG), "r", timeout=timeout))
            assert refusal.value.param == "timeout"

    asyncio.run(main())


def test_a_request_that_ends_in_time_leaves_no_timer():
    async def main():
        async with running() as engine:
            stream = await engine.open_stream([5, 1], SamplingParams(max_tokens=2), "r", timeout=3600.0)
            async for _ in stream.outputs():
                pass
            assert stream.timer is not None and stream.timer.cancelled()

    asyncio.run(main())


def test_a_deadline_holds_while_the_core_is_started_again():
    async def main():
        engine = AsyncLLM.from_engine_config(make_config(**ROOM), core="process")
        try:
            params = SamplingParams(**LONG | {"output_kind": RequestOutputKind.DELTA})
            stream = await engine.open_stream([5, 1], params, "r", timeout=3600.0)
            await stream.next()
            os.kill(engine._client.client.pid, signal.SIGKILL)
            while not engine._restarting:
                await asyncio.sleep(0.001)
            expire(engine, stream)
            with pytest.raises(DeadlineError):
                await collect(stream.outputs())
            assert engine.get_num_unfinished_requests() == 0
        finally:
            engine.shutdown()

    asyncio.run(main())


async def fill(engine, count, **options):
    """Send requests that do not end until the core has no room for more, and one of them runs."""
    tasks = []
    for turn in range(2):  # the one that starts to run leaves its place to another
        tasks += [
            asyncio.ensure_future(collect(engine.generate([5, i], SamplingParams(**LONG), f"r{turn}.{i}", **options)))
            for i in range(count)
        ]
        while not engine.metrics.num_running:
            await asyncio.sleep(0.001)
    while not engine.queue.state.closed:
        await asyncio.sleep(0.001)
    return tasks


async def empty(engine, tasks):
    """End all requests; the core then has room again."""
    await engine.abort([record.request_id for record in engine._outputs.records])
    results = await asyncio.gather(*tasks, return_exceptions=True)
    while engine.queue.state.closed:
        await asyncio.sleep(0.001)
    return results


def test_a_frontend_knows_that_the_queue_is_full_before_it_sends_a_request():
    async def main():
        async with running(max_num_seqs=1, max_num_waiting=2) as engine:
            tasks = await fill(engine, 6)
            with pytest.raises(CapacityError):
                engine.check_queue()
            results = await empty(engine, tasks)
            assert sum(isinstance(result, CapacityError) for result in results) == 9
            engine.check_queue()

    asyncio.run(main())


def test_under_fair_only_the_tenant_whose_share_is_used_up_is_refused():
    async def main():
        async with running(max_num_seqs=1, max_num_waiting=8, policy="fair") as engine:
            tasks = await fill(engine, 8, tenant="flood")
            assert engine.queue.state.closed == ["flood"]
            CALLER.set(Caller(tenant="flood"))
            with pytest.raises(CapacityError, match="full for this tenant"):
                engine.check_queue()
            CALLER.set(Caller(tenant="quiet"))
            engine.check_queue()
            params = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
            quiet = await engine.open_stream([5, 99], params, "quiet")
            flood = [record.request_id for record in engine._outputs.records if record.request_id != "quiet"]
            await engine.abort(flood)
            assert [output async for output in quiet.outputs()][-1].finished
            results = await empty(engine, tasks)
            assert sum(isinstance(result, CapacityError) for result in results) == 11

    asyncio.run(main())


def test_a_burst_between_two_words_of_the_core_is_counted():
    async def main():
        async with running(max_num_seqs=4) as engine:
            engine.queue.state = QueueState(max_waiting=3)
            engine.check_queue(num_preparing=6)
            with pytest.raises(CapacityError):
                engine.check_queue(num_preparing=7)

    asyncio.run(main())
