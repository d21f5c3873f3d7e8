"""Events of the prefix cache: a listener that knows vLLM's message format has at any time what the cache has."""

import asyncio
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.engine.builders import make_config
from tests.engine.test_async_llm import collect, sampling
from tests.engine.test_data_parallel import copies_config

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.config.kv_events import KVEventsConfig, read_kv_events_config
from quire.engine.async_llm import AsyncLLM
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.request import EngineRequest

SIZE = 4


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """As vLLM's subscribers declare them."""


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Listener:
    """A router's idea of one cache."""

    def __init__(self) -> None:
        self.tokens: dict[int | bytes, list[int]] = {}
        self.parents: dict[int | bytes, int | bytes | None] = {}

    def take(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.tokens.clear()
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.tokens[name]
            else:
                assert event.block_size == SIZE and len(event.token_ids) == SIZE * len(event.block_hashes)
                assert event.kv_cache_spec_kind == "full_attention" and event.medium == "GPU" and event.group_idx == 0
                parent = event.parent_block_hash
                for index, name in enumerate(event.block_hashes):
                    assert name not in self.tokens
                    self.tokens[name] = event.token_ids[index * SIZE : (index + 1) * SIZE]
                    self.parents[name], parent = parent, name

    def prompt_of(self, name: int | bytes) -> list[int]:
        parent = self.parents[name]
        return [*(self.prompt_of(parent) if parent is not None else []), *self.tokens[name]]


def with_events(config: EngineConfig, folder: Path, **given: Any) -> EngineConfig:
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"ipc://{folder}/e", replay_endpoint=f"ipc://{folder}/r", **given
    )
    return dataclasses.replace(config, kv_events=events)


def replay(folder: Path, first: int = 0, copy: int = 0) -> list[tuple[bytes, int, Batch]]:
    """Topic, number and batch of all that is kept from a number on."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/r" + (f"_dp{copy}" if copy else ""))
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found: list[tuple[bytes, int, Batch]] = []
    try:
        for frames in iter(lambda: _frames(socket), None):
            topic, number, payload = frames
            found.append((topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload, type=Batch)))
    finally:
        socket.close(linger=0)
    return found


def _frames(socket: Any) -> list[bytes] | None:
    empty, *frames = socket.recv_multipart()
    assert empty == b""
    return None if frames[1] == b"\xff" * 8 else frames


def _request(number: int, prompt: list[int], **fields: Any) -> EngineRequest:
    from quire.request import token_array

    return EngineRequest(str(number), token_array(prompt), sampling(max_tokens=5, seed=number), **fields)


def run(core: EngineCore, *requests: EngineRequest) -> None:
    core.add_requests(requests)
    while core.has_work():
        core.step()
    core.idle()


@pytest.fixture
def core(tmp_path: Path) -> Iterator[EngineCore]:
    """One with so few pages that they are used again all the time."""
    core = EngineCore(with_events(make_config(num_blocks=40, max_model_len=64), tmp_path, topic="kv"))
    yield core
    core.shutdown()


def heard(folder: Path) -> Listener:
    listener = Listener()
    for expected, (topic, number, batch) in enumerate(replay(folder)):
        assert (topic, number, batch.data_parallel_rank) == (b"kv", expected, 0) and batch.ts > 1.7e9
        listener.take(batch)
    return listener


def names_in(core: EngineCore) -> set[int]:
    keys = core._scheduler.kv.pool._key_of.values()
    return {int.from_bytes(name, "big") % (1 << 64) for name, _ in keys}


def test_a_listener_knows_at_any_time_what_the_cache_has(core: EngineCore, tmp_path: Path) -> None:
    rng = random.Random(4)
    beginnings = [rng.choices(range(5, 500), k=12) for _ in range(3)]
    prompts = [[*rng.choice(beginnings), *rng.choices(range(5, 500), k=rng.randrange(1, 30))] for _ in range(40)]
    for number, prompt in enumerate(prompts):
        run(core, _request(number, prompt))
        if number % 8 == 7:
            listener = heard(tmp_path)
            assert listener.tokens.keys() == names_in(core)
            found = [listener.prompt_of(name) for name in listener.tokens if listener.parents[name] in listener.tokens]
            assert any(prompt[: len(tokens)] == tokens for tokens in found)
    core.reset_prefix_cache()
    assert not heard(tmp_path).tokens


def test_events_name_adapter_and_salt_and_only_the_first_page_has_the_salt(core: EngineCore, tmp_path: Path) -> None:
    kv, source = (
        core._scheduler.kv,
        _request(0, list(range(5, 14)), cache_salt="tenant", adapter=LoRARequest("a", 3, "/a")),
    )
    from quire.core.request_state import Request

    request = Request(source, 0, 64)
    kv.attach(request, kv.find_prefix(request))
    kv.grow(request, 8)
    kv.publish(request, 8)
    core.idle()
    ((_, _, batch),) = replay(tmp_path)
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert (event.lora_id, event.lora_name, event.extra_keys) == (3, "a", [("a", "tenant"), ("a",)])
    assert event.token_ids == list(range(5, 13)) and event.parent_block_hash is None
    kv.free(request)


def test_a_replay_begins_at_the_number_asked_for_and_a_senseless_request_ends_nothing(
    core: EngineCore, tmp_path: Path
) -> None:
    for number in range(4):
        run(core, _request(number, [9 + number] * 30))
    everything = replay(tmp_path)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{tmp_path}/r")
    for frames in ([b"x"], [b"", b"123"], [b"", b"1" * 8, b"2"]):
        socket.send_multipart(frames)
    assert len(everything) > 2 and replay(tmp_path, 2) == everything[2:]
    socket.close(linger=0)


def test_subscribers_get_each_batch_with_the_number_under_which_a_replay_has_it(
    core: EngineCore, tmp_path: Path
) -> None:
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.subscribe("kv")
    socket.connect(f"ipc://{tmp_path}/e")
    number = 0
    while not socket.poll(20):  # a subscription takes its time
        run(core, _request(number, [number % 400] * 9))
        number += 1
    topic, first, payload = socket.recv_multipart()
    kept = {number: (topic, batch) for topic, number, batch in replay(tmp_path)}
    assert kept[int.from_bytes(first, "big")] == (topic, msgspec.msgpack.decode(payload, type=Batch))
    socket.close(linger=0)


def test_each_copy_publishes_its_own_events_with_its_number(tmp_path: Path) -> None:
    async def main() -> None:
        engine = AsyncLLM.from_engine_config(with_events(copies_config(), tmp_path))
        try:
            for copy in range(2):
                stream = engine.generate([30 + copy] * 9, sampling(max_tokens=3), str(copy), data_parallel_rank=copy)
                await collect(stream)
                assert await engine.reset_prefix_cache() is True
        finally:
            found = [replay(tmp_path, copy=copy) for copy in range(2)]
            engine.shutdown()
        for copy, batches in enumerate(found):
            assert {batch.data_parallel_rank for _, _, batch in batches} == {copy}
            stored = [event for _, _, batch in batches for event in batch.events if isinstance(event, BlockStored)]
            assert {token for event in stored for token in event.token_ids[:8]} == {30 + copy}

    asyncio.run(main())


def test_an_address_that_is_taken_and_settings_that_make_no_sense_are_refused(core: EngineCore, tmp_path: Path) -> None:
    taken = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:1", replay_endpoint="tcp://256.0.0.1:9")
    with pytest.raises(ConfigError, match="kv_events_config: tcp://"):
        EngineCore(dataclasses.replace(make_config(), kv_events=taken))
    for given, message in (
        ({"publisher": "zmq"}, "enable_kv_cache_events is not true"),
        ({"endpoint": "5557"}, "ZMQ address"),
        ({"enable_kv_cache_events": True, "publisher": "kafka"}, "null, zmq"),
        ({"buffer": 1}, "not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_kv_events_config(given)
    assert read_kv_events_config({"enable_kv_cache_events": False}) is None
    assert read_kv_events_config({"enable_kv_cache_events": True, "publisher": "null"}) is None
