"""Copies of the model on other hosts, here processes of this one: they join a head node, answer as one engine, may be lost."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
from tests.distributed.whole_engines import a_host, free_port
from tests.engine.test_async_llm import collect, oracle, sampling, tokens_of
from tests.engine.test_data_parallel import add, copies_config, played

from quire.codec import decoder
from quire.config import EngineConfig
from quire.config.wire import config_from_plain, config_to_plain
from quire.engine import messages
from quire.engine.async_llm import AsyncLLM
from quire.engine.data_parallel import CopiesClient
from quire.engine.headless import HeadlessCopy, serve_headless
from quire.engine.nodes import open_door
from quire.errors import CapacityError, ConfigError, EngineDeadError
from quire.executor import host_link
from quire.executor.host_door import Refused
from quire.executor.host_link import HostLink
from quire.metrics.events import EventKind
from quire.sampling_params import RequestOutputKind


def part_of(config: EngineConfig, port: int, **parallel: Any) -> EngineConfig:
    parallel |= {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": port}
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **parallel))


def head_config(port: int, num_copies: int, elsewhere: int, **settings: Any) -> EngineConfig:
    return part_of(copies_config(num_copies, **settings), port, data_parallel_elsewhere=elsewhere)


def node_config(port: int, first: int, count: int = 1, **settings: Any) -> EngineConfig:
    return part_of(copies_config(count, **settings), port, data_parallel_start=first)


def main() -> None:
    """The process of a node: its configuration comes as JSON."""
    serve_headless(config_from_plain(json.loads(sys.stdin.read())))


def a_node(config: EngineConfig) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
    return a_host("tests.engine.test_headless", given=json.dumps(config_to_plain(config)).encode())


def copies_of(engine: AsyncLLM) -> CopiesClient:
    assert isinstance(engine._client, CopiesClient)
    return engine._client


async def until_all_are_there(engine: AsyncLLM) -> None:
    while copies_of(engine)._gone:
        await asyncio.sleep(0.01)


async def many(engine: AsyncLLM, count: int, max_tokens: int) -> None:
    results = await asyncio.gather(
        *(collect(engine.generate([5, i], sampling(max_tokens=max_tokens, seed=i), str(i))) for i in range(count))
    )
    for i, outputs in enumerate(results):
        assert outputs[-1].outputs[0].token_ids == oracle([5, i], max_tokens, i)


def test_hosts_that_join_answer_as_one_engine_start_their_cores_again_and_end_with_their_head_node() -> None:
    port = free_port()

    async def main(node: "subprocess.Popen[bytes]") -> None:
        engine = await asyncio.to_thread(AsyncLLM.from_engine_config, head_config(port, 3, 2))
        try:
            await many(engine, 12, 30)
            assert min(copy.counts["engine_steps"] for copy in engine.metrics.copies) >= 30
            assert await engine.reset_prefix_cache() is True
            options = sampling(max_tokens=900, seed=3, output_kind=RequestOutputKind.DELTA)
            streams = [engine.generate([5], options, str(number), data_parallel_rank=number) for number in (1, 2)]
            firsts = [await anext(stream) for stream in streams]
            cores = _children(node.pid)
            os.kill(cores[0], signal.SIGKILL)
            for first, rest in zip(firsts, [tokens_of(await collect(stream)) for stream in streams], strict=True):
                assert [*first.outputs[0].token_ids, *rest] == oracle([5], 900, 3)
            assert await engine.reset_prefix_cache() is True  # waits for the copy
            assert engine.events.totals[EventKind.RESTART] == 1 and _children(node.pid) != cores
        finally:
            await asyncio.to_thread(engine.shutdown)

    with a_node(node_config(port, 1, 2)) as node:
        asyncio.run(main(node))
        assert node.wait(60) == 0


def test_requests_of_a_host_that_dies_go_on_elsewhere_and_a_host_that_joins_again_gets_some() -> None:
    port = free_port()

    async def main(node: "subprocess.Popen[bytes]", stack: contextlib.ExitStack) -> None:
        engine = await asyncio.to_thread(AsyncLLM.from_engine_config, head_config(port, 2, 1))
        try:
            lengths = [300 + 40 * i for i in range(8)]
            kind = RequestOutputKind.DELTA
            params = [sampling(max_tokens=length, seed=i, output_kind=kind) for i, length in enumerate(lengths)]
            streams = [engine.generate([5, i], params[i], str(i)) for i in range(8)]
            firsts = [await anext(stream) for stream in streams]
            node.kill()
            rests = await asyncio.gather(*(collect(stream) for stream in streams))
            for i, (first, rest) in enumerate(zip(firsts, rests, strict=True)):
                assert [*first.outputs[0].token_ids, *tokens_of(rest)] == oracle([5, i], lengths[i], i)
            assert engine.events.totals[EventKind.RESTART] == 1
            await engine.check_health()
            with pytest.raises(CapacityError, match="copy 1 of the engine: its host"):
                await engine.call("reset_prefix_cache")
            with pytest.raises(CapacityError, match="copy 1 of the engine: its host"):
                await collect(engine.generate([5], sampling(max_tokens=4), "no", data_parallel_rank=1))
            stack.enter_context(a_node(node_config(port, 1)))
            await until_all_are_there(engine)
            await collect(engine.generate([5], sampling(max_tokens=4), "yes", data_parallel_rank=1))
            assert await engine.call("reset_prefix_cache") is True
        finally:
            await asyncio.to_thread(engine.shutdown)

    with a_node(node_config(port, 1)) as node, contextlib.ExitStack() as stack:
        asyncio.run(main(node, stack))


@pytest.mark.exhaustive
def test_requests_of_a_host_that_is_silent_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(host_link, "SILENT_S", 3)

    async def main(node: "subprocess.Popen[bytes]") -> None:
        engine = await asyncio.to_thread(AsyncLLM.from_engine_config, head_config(port, 2, 1))
        try:
            streams = [engine.generate([5, i], sampling(max_tokens=300, seed=i), str(i)) for i in range(8)]
            tasks = [asyncio.ensure_future(collect(stream)) for stream in streams]
            await collect(engine.generate([5], sampling(max_tokens=1), "first", data_parallel_rank=1))
            node.send_signal(signal.SIGSTOP)
            for i, outputs in enumerate(await asyncio.gather(*tasks)):
                assert outputs[-1].outputs[0].token_ids == oracle([5, i], 300, i)
            assert copies_of(engine)._gone
            node.send_signal(signal.SIGCONT)  # it has lost its head node, and joins again
            await until_all_are_there(engine)
        finally:
            await asyncio.to_thread(engine.shutdown)

    with a_node(node_config(port, 1)) as node:
        asyncio.run(main(node))
        assert node.wait(60) == 0


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        found = [int(word) for word in file.read().split()]
    for thread in os.listdir(f"/proc/{pid}/task"):
        if thread != str(pid):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


@pytest.mark.parametrize(
    ("first", "settings", "message"),
    [
        (1, {"max_model_len": 1000}, "max_model_len differs: 1000 there, 2000 at the head node"),
        (2, {}, "has number 2, and the head node waits for copy 1"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_and_says_why(first: int, settings: dict[str, Any], message: str) -> None:
    door = open_door(head_config(port := free_port(), 2, 1))
    config = node_config(port, first)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **settings))
    try:
        with pytest.raises(ConfigError, match=message):
            HeadlessCopy(config).run()
    finally:
        door.close()


def test_somebody_who_is_no_host_is_passed_over() -> None:
    door = open_door(head_config(port := free_port(), 2, 1))
    try:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link = HostLink(socket.create_connection(("127.0.0.1", port)))
        link.send(b"no message")
        answer = decoder(Refused)(link.receive() or b"")
        assert "install the same version" in answer.message
        link.close()
        assert door._seats[1].empty()
    finally:
        door.close()


def test_an_engine_that_ends_waits_for_no_host() -> None:
    port = free_port()
    config = head_config(port, 2, 1, executor="tests.engine.test_headless:NoExecutor")
    with pytest.raises(ConfigError, match="NoExecutor"):
        AsyncLLM.from_engine_config(config)
    socket.create_server(("127.0.0.1", port)).close()  # the port is free again


def test_a_link_carries_messages_whole_and_ends_with_what_was_said_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = HostLink(socket.create_connection(server.getsockname()))
        two = HostLink(server.accept()[0])
    one.send(b"a")
    one.send(big := bytes(3 << 20))
    one.end()
    assert (two.receive(), two.receive(), two.receive()) == (b"a", big, None)
    two.send(b"answer")
    two.close()
    assert (one.receive(), one.receive()) == (b"answer", None)
    one.close()
    one.close()


def test_a_host_without_a_head_node_gives_up_in_time(monkeypatch: Any) -> None:
    monkeypatch.setenv("QUIRE_ENGINE_READY_TIMEOUT_S", "0.01")
    with pytest.raises(EngineDeadError, match="no head node at 127"):
        HeadlessCopy(node_config(free_port(), 1)).run()


def test_requests_that_find_no_copy_at_all_go_to_the_first_that_comes() -> None:
    client, (one, two), heard = played()
    add(client, "a", "b")
    one.hear(messages.Restarting("host lost", is_gone=True))
    assert heard[-1] == messages.Restarted(["a"] if "a" in one.ids() else ["b"])
    _send_again(client, heard)
    assert set(two.ids()) == {"a", "b"}
    two.hear(messages.Restarting("host lost", is_gone=True))
    assert [type(message) for message in heard[-2:]] == [messages.Stalled, messages.Restarted]
    _send_again(client, heard)  # to a copy that is away: its client drops them
    for copy in (one, two):
        copy.sent.clear()
    two.hear(messages.Restarted())
    _send_again(client, heard)
    assert set(two.ids()) == {"a", "b"} and not one.ids()


def _send_again(client: CopiesClient, heard: list[Any]) -> None:
    """What a frontend does with the last news."""
    add(client, *heard[-1].core_ids)


def test_a_call_that_waits_for_a_copy_fails_when_a_host_is_lost() -> None:
    client, (one, two), heard = played()
    one.hear(messages.Restarting("killed"))
    client.send(messages.UtilityCall(1, "sleep"))
    assert not any(isinstance(message, messages.UtilityResult) for message in heard)
    two.hear(messages.Restarting("host lost", is_gone=True))
    (result,) = [message for message in heard if isinstance(message, messages.UtilityResult)]
    assert result.call_id == 1 and "host lost" in str(result.error)
    assert not one.sent


if __name__ == "__main__":
    main()
