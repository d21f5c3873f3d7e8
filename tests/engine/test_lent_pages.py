"""Pages that a library moves between two engines: the tokens of one engine, whatever becomes of the transfer.

Every test runs with a mover of this file's own, which copies within the process, with a process group, and with each library that
is installed.
"""

import contextlib
import ctypes
import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_disaggregated_prefill import DECODE_THERE, WHOLE, an_engine, ask, llama, someone_else, tokens

from quire import LLM
from quire.config.kv_transfer import KV_CONNECTORS, KVConnector, KVTransferConfig, read_kv_transfer_config
from quire.errors import ConfigError
from quire.worker.lent_tier import Lent, LentTier
from quire.worker.tcp_tier import ANSWER

__all__ = ["llama"]

LIBRARIES = {"nixl": "nixl._api", "mooncake": "mooncake.engine"}
OTHERS_KIND = 200
SLOW = threading.Event()
"""Until when a mover takes with the ticket `slow`."""


class CopyingTier(LentTier):
    """Moves pages within a process."""

    KIND = OTHERS_KIND

    def open(self, transfer: KVTransferConfig, extra: dict[str, Any]) -> None:
        pass

    def lend(self, memory: torch.Tensor) -> bytes:
        return b"here"

    def read_lent(self, lent: Lent, into: torch.Tensor) -> None:
        if lent.ticket == b"slow":
            SLOW.wait()
        if lent.ticket != b"here":
            raise OSError("nobody has lent this")
        for row, place in zip(into, lent.places, strict=True):
            ctypes.memmove(row.data_ptr(), place, into.shape[1])


@pytest.fixture(scope="module", autouse=True)
def copying() -> Iterator[None]:
    halves = KVConnector("quire.core.remote_pages:RemotePages", f"{__name__}:CopyingTier")
    KV_CONNECTORS.register("copying", halves)
    yield
    KV_CONNECTORS.unregister("copying")


@pytest.fixture(scope="module", params=["copying", "nccl", *LIBRARIES])
def mover(request: pytest.FixtureRequest) -> str:
    if request.param in LIBRARIES:
        pytest.importorskip(LIBRARIES[request.param], exc_type=ImportError)
    return request.param


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    with an_engine(llama) as alone:
        return tokens(ask(alone, None))[0]


@pytest.fixture(scope="module")
def prefill(llama: Path, mover: str) -> Iterator[LLM]:
    with an_engine(llama, "kv_producer", {"max_bytes": 1 << 20}, mover) as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(llama: Path, mover: str) -> Iterator[LLM]:
    with an_engine(llama, "kv_consumer", {"timeout_s": 5}, mover) as llm:
        yield llm


def test_what_one_engine_has_computed_another_goes_on_with(prefill: LLM, decode: LLM, expected: list[int]) -> None:
    for _ in range(2):
        decode.reset_prefix_cache()
        params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
        assert tokens(ask(decode, params)) == (expected, WHOLE)


def test_rows_are_used_again_when_their_pages_are_gone(prefill: LLM, decode: LLM, llama: Path) -> None:
    """Twenty prompts in the memory of seven."""
    with an_engine(llama) as alone:
        for number in range(20):
            prompt = [3 + (i * i * 17 + i * number) % 300 for i in range(150)]
            params = ask(prefill, DECODE_THERE, 1, prompt).kv_transfer_params
            assert tokens(ask(decode, params, prompt=prompt)) == (tokens(ask(alone, None, prompt=prompt))[0], WHOLE)


def test_a_prefill_engine_that_is_gone_is_done_without(
    llama: Path, mover: str, decode: LLM, expected: list[int]
) -> None:
    decode.reset_prefix_cache()
    with an_engine(llama, "kv_producer", None, mover) as gone:
        params = ask(gone, DECODE_THERE, 1).kv_transfer_params
        assert tokens(ask(decode, params)) == (expected, WHOLE)
        decode.reset_prefix_cache()
    assert tokens(ask(decode, params)) == (expected, 0)


@contextlib.contextmanager
def lent_no_longer(port: int) -> Iterator[int]:
    """An engine that stops lending while its pages are read: what it says, and then the end of the connection."""

    def serve(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as engine:
            engine.sendall(client.recv(1 << 16))
            head = engine.recv(ANSWER.size, socket.MSG_WAITALL)
            client.sendall(head + engine.recv(ANSWER.unpack(head)[1], socket.MSG_WAITALL))
            client.recv(1)  # it has read

    with someone_else(serve) as place:
        yield place


def test_what_was_read_when_it_was_lent_no_longer_is_not_used(prefill: LLM, decode: LLM, expected: list[int]) -> None:
    decode.reset_prefix_cache()
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
    with lent_no_longer(params["remote_port"]) as port:
        assert tokens(ask(decode, {**params, "remote_port": port})) == (expected, 0)


NOWHERE = (
    b"\x93garbage",
    b"\x92\xc4\x04here\x90",
    b"\x92\xc4\x05there\x99" + bytes(range(9)),
    b"\x92\xc4\x05there\x91\x01",
)


@pytest.mark.parametrize("answer", NOWHERE)
def test_senseless_answers_are_done_without(
    answer: bytes, mover: str, prefill: LLM, decode: LLM, expected: list[int]
) -> None:
    kind = decode_kind(mover)
    decode.reset_prefix_cache()
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params

    def serve(client: socket.socket) -> None:
        client.recv(1 << 16)
        client.sendall(ANSWER.pack(kind, len(answer)) + answer)
        client.recv(1)

    with someone_else(serve) as port:
        assert tokens(ask(decode, {**params, "remote_port": port})) == (expected, 0)


def test_a_mover_that_takes_too_long_is_not_waited_for(llama: Path, expected: list[int]) -> None:
    answer = b"\x92\xc4\x04slow\x99" + bytes(range(9))

    def serve(client: socket.socket) -> None:
        client.recv(1 << 16)
        client.sendall(ANSWER.pack(OTHERS_KIND, len(answer)) + answer)
        client.recv(1)

    with an_engine(llama, "kv_both", {"timeout_s": 0.3}, "copying") as hasty, someone_else(serve) as port:
        params = ask(hasty, DECODE_THERE, 1).kv_transfer_params
        hasty.reset_prefix_cache()
        assert tokens(ask(hasty, {**params, "remote_port": port})) == (expected, 0)
        SLOW.set()


def decode_kind(mover: str) -> int:
    module, _, name = KV_CONNECTORS[mover].worker.partition(":")
    return getattr(importlib.import_module(module), name).KIND


def test_an_engine_without_the_library_sends_bytes_and_one_that_has_it_needs_it_on_both_sides(
    llama: Path, mover: str, prefill: LLM, decode: LLM, expected: list[int]
) -> None:
    decode.reset_prefix_cache()
    with an_engine(llama, "kv_both") as plain:
        params = ask(plain, DECODE_THERE, 1).kv_transfer_params
        assert tokens(ask(decode, params)) == (expected, WHOLE)
        plain.reset_prefix_cache()
        params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
        assert tokens(ask(plain, params)) == (expected, 0)


@pytest.mark.parametrize(("name", "module"), LIBRARIES.items())
def test_a_library_that_is_not_installed_is_named_with_its_packages(
    name: str, module: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"kv_connector '{name}' needs .* -m pip install .*{name}") as refused:
        an_engine(llama, "kv_both", None, name)
    assert refused.value.setting == "kv_transfer_config"


def test_memory_that_cannot_be_lent_is_told_at_the_start(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(self: CopyingTier, memory: torch.Tensor) -> bytes:
        raise OSError("no memory may be locked")

    monkeypatch.setattr(CopyingTier, "lend", locked)
    with pytest.raises(ConfigError, match=r"no memory may be locked.*max_bytes"):
        an_engine(llama, "kv_both", None, "copying")


def test_names_of_vllm_mean_these() -> None:
    for name, extra, ours, keys in (
        ("NixlConnector", {"backends": ["UCX"]}, "nixl", {"backends": ["UCX"]}),
        ("P2pNcclConnector", {}, "nccl", {}),
        ("MooncakeConnector", {"mooncake_protocol": "tcp"}, "mooncake", {"protocol": "tcp"}),
    ):
        config = read_kv_transfer_config({"kv_connector": name, "kv_connector_extra_config": extra})
        assert config is not None and (config.kv_connector, config.kv_connector_extra_config) == (ours, keys)


def test_backends_that_nixl_has_not_are_refused(llama: Path) -> None:
    pytest.importorskip("nixl._api", exc_type=ImportError)
    for backends in (["Pigeon"], "UCX", 7):
        with pytest.raises(ConfigError, match="backends="):
            an_engine(llama, "kv_both", {"backends": backends}, "nixl")
