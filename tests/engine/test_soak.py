"""Two hundred thousand requests, with aborts, stop strings, siblings and faults: memory stays flat."""

import gc
import os
import random
from pathlib import Path

import pytest
from tests.engine.builders import make_config
from tests.oracles.hash_model import Faults, HashExecutor

from quire.engine.llm_engine import LLMEngine
from quire.sampling_params import RequestOutputKind, SamplingParams

MIB = 1 << 20


def resident_bytes() -> int:
    """This process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(engine: LLMEngine, count: int, draw: random.Random) -> None:
    """`count` requests, at most 64 at a time."""
    started = 0
    while started < count or engine.has_unfinished_requests():
        while started < count and engine.get_num_unfinished_requests() < 64:
            params = SamplingParams(
                max_tokens=draw.randint(1, 4),
                n=2 if draw.random() < 0.05 else 1,
                stop=["e"] if draw.random() < 0.1 else None,
                logprobs=1 if draw.random() < 0.1 else None,
                output_kind=draw.choice(list(RequestOutputKind)),
            )
            engine.add_request(f"r{started}", [draw.randrange(2, 500) for _ in range(draw.randint(1, 6))], params)
            started += 1
        engine.step()
        if draw.random() < 0.02:
            engine.abort_request(f"r{started - draw.randint(1, 32)}")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_memory_is_flat_over_200_000_requests(model_folder):
    config = make_config(model_folder, num_blocks=2048)
    executor = HashExecutor(config, faults=Faults(seed=1, row_error_rate=0.001))
    engine = LLMEngine(config, executor=executor)
    draw = random.Random(0)
    serve(engine, 40_000, draw)
    gc.collect()
    before = resident_bytes()
    serve(engine, 160_000, draw)
    gc.collect()
    assert resident_bytes() - before < 8 * MIB
    assert engine.get_num_unfinished_requests() == 0


def test_nothing_is_left_of_requests_that_ended(model_folder):
    engine = LLMEngine.from_engine_config(make_config(model_folder, num_blocks=2048), enable_multiprocessing=False)
    serve(engine, 300, random.Random(1))
    assert len(engine._outputs) == engine._outputs.num_sequences == 0
    core = engine._client.core
    assert not core._scheduler.unfinished_ids() and not core.has_work()
    stats = core.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_total_blocks
