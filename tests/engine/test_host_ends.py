"""A head node that ends takes its hosts along, however far each of them is; one that only lost a copy lets them join again."""

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.distributed.whole_engines import free_port
from tests.engine.test_data_parallel import PlayedCopy
from tests.engine.test_headless import head_config, node_config

from quire.codec import encode
from quire.config import EngineConfig
from quire.engine import headless, messages
from quire.engine.core_client import CoreClient
from quire.engine.headless import HeadlessCopy, serve_headless
from quire.engine.nodes import NodeClient, open_door, place_of_head
from quire.engine.shared_copies import Gathering
from quire.errors import EngineDeadError
from quire.executor.host_door import HostDoor, Join, shared_settings
from quire.executor.host_link import HostLink
from quire.patch import marks
from quire.version import __version__

PATIENCE_S = 30


class PlayedHost:
    """A host that has come to the door for copy 1."""

    def __init__(self, config: EngineConfig) -> None:
        self.link = HostLink(socket.create_connection(place_of_head(config)))
        self.link.send(encode(Join(1, __version__, shared_settings(config), ["there"])))

    def hear(self) -> list[str]:
        """The kinds of what the head node says, until the connection ends."""
        return [msgspec.msgpack.decode(said)[0] for said in iter(self.link.receive, None)]


@contextlib.contextmanager
def sharing(port: int) -> Iterator[tuple[HostDoor, Gathering, Callable[[], "Future[CoreClient]"]]]:
    """A door for copy 1, which shares experts with copy 0 of the head node, and what starts it there in a thread."""
    door, gathering = open_door(head_config(port, 2, 1)), Gathering(lambda: "here", 2)
    seat = gathering.seats[1]
    with ThreadPoolExecutor(1) as threads:
        try:
            yield (
                door,
                gathering,
                lambda: threads.submit(seat.open, functools.partial(NodeClient, door, 1, seat=seat), print),
            )
        finally:
            door.close()
            gathering.close()


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        time.sleep(0.005)


@pytest.mark.parametrize("others_are_there", [False, True])
def test_a_host_whose_copy_only_starts_ends_with_its_head_node(others_are_there: bool) -> None:
    with sharing(port := free_port()) as (door, gathering, start):
        starting, host = start(), PlayedHost(node_config(port, 1))
        if others_are_there:
            gathering.seats[0].join()
        until(lambda: gathering.seats[1].is_starting if others_are_there else gathering.seats[1].place)
        door.close()
        gathering.close()
        assert host.hear()[-1:] == ["shutdown"]
        with pytest.raises(EngineDeadError):
            starting.result(PATIENCE_S)


def test_a_start_that_another_copy_s_end_stops_says_so_and_its_host_joins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sharing(port := free_port()) as (_, gathering, start):
        starting, host = start(), PlayedHost(node_config(port, 1))
        gathering.seats[0].join()
        until(lambda: gathering.seats[1].is_starting)
        assert gathering.seats[0].leave()
        assert "shutdown" not in host.hear()
        again = PlayedHost(node_config(port, 1))
        gathering.seats[0].join()
        again.link.send(encode(messages.Ready()))
        client = starting.result(PATIENCE_S)
        again.link.close()
        client.shutdown()
    assert "does not start: another copy, with which it shares experts, has ended; it waits for a host" in caplog.text
    assert "is gone" not in caplog.text


def test_a_host_that_waits_for_an_answer_ends_with_its_head_node() -> None:
    door = open_door(head_config(port := free_port(), 2, 1))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(HeadlessCopy(node_config(port, 1)).run)
        until(lambda: not door._seats[1].empty())
        door.close()
        waiting.result(PATIENCE_S)
    with pytest.raises(EngineDeadError, match="waits for no host"):
        door.take(1)


def test_a_host_whose_core_has_died_joins_again_unless_the_head_node_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    cores: list[PlayedCopy] = []

    def start_core(config: EngineConfig, on_message: Any, standing: Any, **settings: Any) -> PlayedCopy:
        cores.append(PlayedCopy(on_message))
        return cores[-1]

    monkeypatch.setattr(headless, "ProcessClient", start_core)
    door = open_door(head_config(port := free_port(), 2, 1))
    with ThreadPoolExecutor(1) as threads, contextlib.closing(door):
        serving = threads.submit(HeadlessCopy(node_config(port, 1)).run)
        for last_word in (None, messages.Shutdown()):
            link, _ = door.take(1, PATIENCE_S)
            link.send(encode(messages.Start({}, None, None, marks())))
            assert msgspec.msgpack.decode(link.receive() or b"")[0] == "ready"
            cores[-1].hear(messages.Dead("killed"))
            assert msgspec.msgpack.decode(link.receive() or b"")[:2] == ["dead", "killed"]
            if last_word is not None:
                link.send(encode(last_word))
            link.close()
        serving.result(PATIENCE_S)
    assert len(cores) == 2 and all(core.is_shut_down for core in cores)


def test_a_host_ends_when_one_of_its_copies_was_told_and_another_one_still_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = threading.Event()
    monkeypatch.setattr(HeadlessCopy, "run", lambda copy: None if copy._number == 1 else never.wait(PATIENCE_S))
    monkeypatch.setattr(headless, "_PATIENCE_S", 0.05)
    before = signal.getsignal(signal.SIGTERM)
    try:
        serve_headless(node_config(free_port(), 0, 2))
    finally:
        signal.signal(signal.SIGTERM, before)
        never.set()
