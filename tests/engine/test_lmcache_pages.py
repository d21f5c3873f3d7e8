"""Pages in an LMCache server, which is LMCache's own: engines find what others have left there, all of it or the first part."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.whole_engines import free_port
from tests.engine.test_kv_connectors import PROMPT, SETTINGS, WHOLE, ask, engine, llama

from quire import LLM
from quire.config.kv_transfer import read_kv_transfer_config
from quire.errors import ConfigError

__all__ = ["llama"]


@contextlib.contextmanager
def lmcache_server() -> Iterator[int]:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)])
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
        assert server.poll() is None
        yield port
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    pytest.importorskip("lmcache.v1.server.__main__", exc_type=ImportError)
    with lmcache_server() as port:
        yield port


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    with engine(llama) as llm:
        return ask(llm, PROMPT)[0][0]


def at(port: int, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "lmcache", "kv_connector_extra_config": {"remote_url": f"lm://127.0.0.1:{port}", **extra}}


def test_an_engine_finds_what_another_has_left(llama: Path, port: int, expected: list[int]) -> None:
    with engine(llama, transfer=at(port)) as first:
        assert ask(first, PROMPT) == [(expected, 0)]
    with engine(llama, transfer={"kv_role": "kv_consumer", **at(port)}) as second, engine(llama) as alone:
        for _ in range(50):  # the server says nothing when it has taken a page in
            second.reset_prefix_cache()
            answer = ask(second, PROMPT)
            if answer == [(expected, WHOLE)]:
                break
        assert answer == [(expected, WHOLE)]
        other = [*PROMPT[:100], *(token + 1 for token in PROMPT[100:])]  # of which six pages are there
        second.reset_prefix_cache()
        ((drawn, computed),) = ask(second, other)
        assert drawn == ask(alone, other)[0][0] and computed <= 96


def test_what_is_there_in_part_is_fetched_in_part(llama: Path, port: int) -> None:
    """Until one of the requests has waited for the server's answer: it may come too late for a single one."""
    found = set[int]()
    with engine(llama, transfer=at(port, secret="a")) as first, engine(llama) as alone:
        ask(first, PROMPT[:100])
        for number in range(20):
            prompt = [*PROMPT[:98], *(token + number for token in PROMPT[98:])]
            first.reset_prefix_cache()
            ((drawn, computed),) = ask(first, prompt)
            assert drawn == ask(alone, prompt)[0][0]
            found.add(computed)
    assert 96 in found and max(found) == 96  # fewer while pages are still on their way to the server


def test_another_secret_finds_nothing(llama: Path, port: int, expected: list[int]) -> None:
    with engine(llama, transfer=at(port)) as first:
        ask(first, PROMPT)
    with engine(llama, transfer=at(port, secret="another")) as second:
        assert ask(second, PROMPT) == [(expected, 0)]


def test_a_server_that_has_ended_is_done_without(llama: Path, port: int, expected: list[int]) -> None:
    with contextlib.ExitStack() as last:
        with lmcache_server() as short:
            llm = last.enter_context(engine(llama, transfer=at(short)))
            assert ask(llm, PROMPT) == [(expected, 0)]
        llm.reset_prefix_cache()
        assert ask(llm, PROMPT) == [(expected, 0)]


def test_settings_are_checked_and_vllm_s_name_means_it(llama: Path) -> None:
    given = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {"lmcache.remote_url": "lm://a:1"}}
    config = read_kv_transfer_config(given)
    assert config is not None and (config.kv_connector, config.extra("remote_url")) == (
        "lmcache",
        {"remote_url": "lm://a:1"},
    )
    for url in (None, "redis://a:1", "lm://a", 7):
        with pytest.raises(ConfigError, match=r"remote_url=.* must be lm://"):
            LLM(
                str(llama),
                kv_transfer_config={"kv_connector": "lmcache", "kv_connector_extra_config": {"remote_url": url}},
                **SETTINGS,
            )
