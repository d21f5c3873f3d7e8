"""Pages through a process group of two engines: what is kept between transfers, and what happens when one of the two is lost.

What every way of handing over pages has in common is in `test_lent_pages.py`.
"""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.test_disaggregated_prefill import DECODE_THERE, WHOLE, an_engine, ask, llama, someone_else, tokens

from quire import LLM
from quire.distributed import page_link
from quire.distributed.page_link import PageLink, open_meeting
from quire.worker.tcp_tier import ANSWER

__all__ = ["llama"]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    with an_engine(llama) as alone:
        return tokens(ask(alone, None))[0]


@pytest.fixture(scope="module")
def prefill(llama: Path) -> Iterator[LLM]:
    with an_engine(llama, "kv_producer", None, "nccl") as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(llama: Path) -> Iterator[LLM]:
    with an_engine(llama, "kv_consumer", {"timeout_s": 30}, "nccl") as llm:
        yield llm


def test_rows_of_any_number_come_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_link, "_CHUNK", 100)  # three rows of 32 bytes
    store, place = open_meeting("127.0.0.1")
    rows = [torch.randint(0, 256, (32,), dtype=torch.uint8) for _ in range(8)]

    def send() -> None:
        link = PageLink(place, "a name", 0, CPU, 30)
        link.send(rows)
        link.send(rows[:1])

    sender = threading.Thread(target=send)
    sender.start()
    link = PageLink(place, "a name", 1, CPU, 30)
    for count in (8, 1):
        into = torch.zeros(count, 32, dtype=torch.uint8)
        link.receive(into)
        assert torch.equal(into, torch.stack(rows[:count]))
    sender.join()
    del store


def test_a_member_that_does_not_come_is_waited_for_as_long_as_said() -> None:
    store, place = open_meeting("127.0.0.1")
    with pytest.raises(RuntimeError):
        PageLink(place, "nobody's", 1, CPU, 0.2)
    del store


def test_two_engines_meet_once_and_again_after_a_transfer_that_failed(
    prefill: LLM, decode: LLM, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make, send = PageLink.__init__, PageLink.send

    def counted(self: PageLink, place: object, name: str, *given: object) -> None:
        made.append(name)
        make(self, place, name, *given)  # type: ignore[arg-type]

    def once_more() -> tuple[list[int], int]:
        decode.reset_prefix_cache()
        return tokens(ask(decode, ask(prefill, DECODE_THERE, 1).kv_transfer_params))

    monkeypatch.setattr(PageLink, "__init__", counted)
    assert [once_more() for _ in range(3)] == [(expected, WHOLE)] * 3
    assert len(made) == 2 and len(set(made)) == 1

    def break_off(self: PageLink, rows: list[torch.Tensor]) -> None:
        send(self, rows[:1])
        raise RuntimeError("the cable was pulled")

    monkeypatch.setattr(PageLink, "send", break_off)
    assert once_more() == (expected, 0)
    monkeypatch.setattr(PageLink, "send", send)
    assert [once_more() for _ in range(2)] == [(expected, WHOLE)] * 2
    assert len(made) == 4 and len(set(made)) == 2


def _leaves_before_it_joins(engine: socket.socket, client: socket.socket) -> None:
    client.recv(1 << 10)


def _names_a_link_to_nobody(engine: socket.socket, client: socket.socket) -> None:
    engine.sendall(b"\xff" * 40)


@pytest.mark.parametrize("end", [_leaves_before_it_joins, _names_a_link_to_nobody])
def test_whoever_asks_and_then_leaves_is_no_harm(
    end: Callable[[socket.socket, socket.socket], None], llama: Path, prefill: LLM, decode: LLM, expected: list[int]
) -> None:
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", params["remote_port"])) as engine:
            engine.sendall(client.recv(1 << 16))
            client.sendall(engine.recv(ANSWER.size + 2, socket.MSG_WAITALL))
            end(engine, client)

    hasty = an_engine(llama, "kv_consumer", {"timeout_s": 0.5}, "nccl")
    with hasty, someone_else(serve) as port:
        assert tokens(ask(hasty, {**params, "remote_port": port})) == (expected, 0)
    decode.reset_prefix_cache()
    assert tokens(ask(decode, params)) == (expected, WHOLE)


def test_a_prefill_engine_that_stalls_or_is_killed_half_way_is_done_without(
    llama: Path, prefill: LLM, decode: LLM, expected: list[int]
) -> None:
    command = [sys.executable, "-m", "tests.engine.prefill_that_ends", str(llama)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        assert child.stdin is not None and child.stdout is not None
        params = json.loads(next(line for line in child.stdout if line.startswith("PARAMS")).removeprefix("PARAMS"))
        with an_engine(llama, "kv_consumer", {"timeout_s": 0.5}, "nccl") as hasty:
            assert tokens(ask(hasty, params)) == (expected, 0)
        assert child.poll() is None
        child.stdin.write("the next transfer is its last\n")
        assert "the next transfer is its last\n" in child.stdout
        decode.reset_prefix_cache()
        assert tokens(ask(decode, params)) == (expected, 0)
        assert child.wait() == -9
    finally:
        child.kill()
        child.communicate()
    decode.reset_prefix_cache()
    assert tokens(ask(decode, ask(prefill, DECODE_THERE, 1).kv_transfer_params)) == (expected, WHOLE)
