"""Prefill in one engine, decode in another: the tokens of one engine, whatever becomes of the transfer."""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.whole_engines import free_port
from tests.engine.test_kv_connectors import PROMPT, SETTINGS, WHOLE
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.errors import ConfigError

Params = dict[str, Any]
DECODE_THERE: Params = {"do_remote_decode": True, "do_remote_prefill": False}
_ANSWER = struct.Struct("!BQ")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), max_position_embeddings=512)


def an_engine(model: Path, role: str = "", extra: Params | None = None, connector: str = "tcp", **given: Any) -> LLM:
    config: Params | None = {
        "kv_connector": connector, "kv_role": role, "kv_port": free_port(), "kv_connector_extra_config": extra or {},
    }  # fmt: skip
    return LLM(str(model), kv_transfer_config=config if role else None, **{**SETTINGS, **given})


def ask(llm: LLM, params: Params | None, max_tokens: int = 6, prompt: list[int] = PROMPT, **fields: Any) -> Any:
    extra = {} if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.9, seed=5, ignore_eos=True, extra_args=extra, **fields
    )
    asked: Any = [{"prompt_token_ids": prompt}]
    return llm.generate(asked, sampling, use_tqdm=False)[0]


def tokens(output: Any) -> tuple[list[int], int]:
    """An answer's tokens, and how many of its prompt were not computed."""
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[int]:
    with an_engine(llama) as llm:
        return tokens(ask(llm, None))[0]


@pytest.fixture(scope="module")
def prefill(llama: Path) -> Iterator[LLM]:
    with an_engine(llama, "kv_producer") as llm:
        yield llm


@pytest.fixture(scope="module")
def decode(llama: Path) -> Iterator[LLM]:
    with an_engine(llama, "kv_consumer", {"timeout_s": 3}) as llm:
        yield llm


@pytest.fixture(autouse=True)
def forgetful(decode: LLM) -> None:
    """The decoding engine's own cache is empty."""
    decode.reset_prefix_cache()


def test_what_one_engine_has_computed_another_goes_on_with(prefill: LLM, decode: LLM, expected: list[int]) -> None:
    first = ask(prefill, DECODE_THERE, 1)
    params = first.kv_transfer_params
    assert params["do_remote_prefill"] is True and params["remote_num_tokens"] == WHOLE
    assert tokens(first) == (expected[:1], 0)
    assert tokens(ask(decode, params)) == (expected, WHOLE)
    decode.reset_prefix_cache()
    again = ask(prefill, DECODE_THERE, 1)  # most of it is in the cache there
    assert again.num_cached_tokens == WHOLE
    assert tokens(ask(decode, again.kv_transfer_params)) == (expected, WHOLE)
    assert ask(prefill, None).kv_transfer_params is None


def test_pages_of_another_prompt_are_not_taken(prefill: LLM, decode: LLM, llama: Path) -> None:
    other = [*PROMPT[:40], *(token + 1 for token in PROMPT[40:])]
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
    with an_engine(llama) as alone:
        assert tokens(ask(decode, params, prompt=other)) == tokens(ask(alone, None, prompt=other))


def test_a_prefill_engine_that_is_gone_is_done_without(llama: Path, decode: LLM, expected: list[int]) -> None:
    with an_engine(llama, "kv_producer") as gone:
        params = ask(gone, DECODE_THERE, 1).kv_transfer_params
    assert tokens(ask(decode, params)) == (expected, 0)


def test_an_engine_with_another_page_size_is_told_so_and_done_without(
    llama: Path, decode: LLM, expected: list[int]
) -> None:
    with an_engine(llama, "kv_producer", block_size=32) as unlike:
        params = ask(unlike, DECODE_THERE, 1).kv_transfer_params
        assert tokens(ask(decode, params)) == (expected, 0)


@contextlib.contextmanager
def someone_else(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Another program at a port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                serve(client)

        threading.Thread(target=run, daemon=True).start()
        yield server.getsockname()[1]


def _send_half(client: socket.socket) -> None:
    _, _, size, count = struct.unpack("!16s16sII", client.recv(40, socket.MSG_WAITALL))
    client.recv(size * count, socket.MSG_WAITALL)
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4
    client.sendall(_ANSWER.pack(0, count * page_bytes) + bytes(count * page_bytes // 2))


def _say_nothing(client: socket.socket) -> None:
    while client.recv(1 << 20):
        pass


ENDS: dict[str, Callable[[socket.socket], None]] = {
    "half of it comes": _send_half,
    "it says nothing": _say_nothing,
    "it is something else": lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "it promises too much": lambda client: client.sendall(_ANSWER.pack(0, 1 << 60)),
    "it refuses": lambda client: client.sendall(_ANSWER.pack(1, 4) + b"no :"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_transfer_that_fails_or_takes_too_long_is_done_without(
    what: str, prefill: LLM, llama: Path, expected: list[int]
) -> None:
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
    with an_engine(llama, "kv_consumer", {"timeout_s": 0.3}) as hasty, someone_else(ENDS[what]) as port:
        assert tokens(ask(hasty, {**params, "remote_port": port})) == (expected, 0)


def test_senseless_params_and_hosts_that_are_no_peers_are_done_without(
    prefill: LLM, decode: LLM, expected: list[int]
) -> None:
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
    for wrong in (
        {"remote_host": "203.0.113.9"},
        {"remote_host": "example.org"},
        {"remote_port": "x"},
        {"remote_port": 70000},
        {"remote_engine_id": "ab"},
        {"remote_engine_id": 7},
        {"remote_engine_id": "00" * 32},
        {"remote_num_tokens": "many"},
        {"remote_num_tokens": -5},
    ):
        decode.reset_prefix_cache()
        assert tokens(ask(decode, {**params, **wrong})) == (expected, 0), wrong


def test_an_engine_without_a_connector_refuses_params_and_takes_none_that_are_no_object(
    llama: Path, prefill: LLM
) -> None:
    with an_engine(llama) as alone:
        assert "needs kv_transfer_config with the connector 'tcp', 'nccl'" in ask(alone, DECODE_THERE).error
        assert ask(alone, {}).error is None
    wrong: Any = ["do_remote_decode"]
    assert "must be an object" in ask(prefill, wrong).error


def test_garbage_at_the_port_ends_nothing(prefill: LLM, decode: LLM, expected: list[int]) -> None:
    params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
    for garbage in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(60),
        b"quire-kv-pages-1" + bytes(16) + b"\xff" * 8,
        b"quire-kv",
    ):
        with socket.create_connection(("127.0.0.1", params["remote_port"])) as peer:
            peer.sendall(garbage)
    assert tokens(ask(decode, params)) == (expected, WHOLE)


def test_settings_of_the_connector_that_cannot_be_are_refused(llama: Path) -> None:
    for extra, message in (
        ({"peers": ["nobody"]}, "peers"),
        ({"peers": 7}, "peers"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"path": "/x"}, "knows"),
    ):
        with pytest.raises(ConfigError, match=message):
            an_engine(llama, "kv_consumer", extra)
    with socket.create_server(("127.0.0.1", 0)) as server:
        transfer = {"kv_connector": "tcp", "kv_port": server.getsockname()[1]}
        with pytest.raises(ConfigError, match="kv_port"):
            LLM(str(llama), kv_transfer_config=transfer, **SETTINGS)


@pytest.mark.exhaustive
def test_two_ranks_of_each_side_hand_over_their_own_parts(llama: Path, expected: list[int]) -> None:
    with an_engine(llama, "kv_producer", tensor_parallel_size=2) as prefill:
        params = ask(prefill, DECODE_THERE, 1).kv_transfer_params
        with an_engine(llama, "kv_consumer", tensor_parallel_size=2) as decode:
            assert tokens(ask(decode, params)) == (expected, WHOLE)
