"""`quire chat`, `quire complete` and `quire bench serve` against a server with a fake engine."""

import io
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.oracles.server_process import ServerProcess

from quire.entrypoints.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ServerProcess("-m", "tests.oracles.fake_server", "1000000")
    yield server.url
    server.kill()


def test_chat_answers_one_message(url, capsys):
    assert main(["chat", "--url", f"{url}/v1", "--max-tokens", "5", "--stats", "-q", "hello"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "<USER\n" and "5 out" in captured.err


def test_chat_keeps_the_conversation_and_obeys_commands(url, capsys, monkeypatch):
    lines = ["ab", "/system Be brief", "cd", "/reset", "ef", "/nonsense", "/exit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", "--url", f"{url}/v1", "--max-tokens", "95"]) == 0
    first, second, third, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("<USER>AB</USER><ASSISTANT><USER>AB")
    assert second.startswith("<SYSTEM>BE BRIEF</SYSTEM><USER>AB</USER><ASSISTANT><USER>AB")
    assert third.startswith("<SYSTEM>BE BRIEF</SYSTEM><USER>EF</USER><ASSISTANT>") and rest == []


def test_complete_continues_each_line(url, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\nde\n"))
    assert main(["complete", "--url", f"{url}/v1", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "ABCA\nDEDE\n"
    assert main(["complete", "--url", f"{url}/v1", "-q", "xy", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "XY\n"


def test_a_refusal_is_one_line_and_the_talk_goes_on(url, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600 + "\nab\n"))
    assert main(["complete", "--url", f"{url}/v1", "--max-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "AB\n" and "maximum context length" in captured.err


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/v1", "nonsense://", "http://h:notaport/v1"])
def test_a_server_that_is_not_there_is_one_line(address, capsys):
    assert main(["chat", "--url", address, "-q", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("quire: error: url: ") and error.count("\n") == 1


def test_bench_serve_measures_a_running_server(url, capsys, tmp_path):
    report = tmp_path / "serve.json"
    command = ["bench", "serve", "--base-url", url, "--num-prompts", "12", "--input-len", "20", "--output-len", "6"]
    assert main([*command, "--vocab-size", "120", "--request-rate", "500", "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["completed"] == 12 and figures["failed"] == 0
    assert figures["total_output_tokens"] == 72 and figures["total_input_tokens"] == 240
    assert 0 < figures["median_ttft_ms"] <= figures["median_e2el_ms"]
    assert "Median TTFT (ms):" in capsys.readouterr().out


def test_bench_serve_tells_failures(url, capsys):
    command = ["bench", "serve", "--base-url", url, "--num-prompts", "2", "--output-len", "600", "--num-warmups", "0"]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "Failed requests:                         2" in output and "status 400" in output


def test_an_unknown_benchmark_lists_those_there_are(capsys):
    assert main(["bench", "nonsense"]) == 2
    assert "throughput" in capsys.readouterr().err


BROKEN = {
    "no JSON": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {nonsense\n\n",
    "breaks off": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\ndata: {}\n",
    "no HTTP": b"what?\r\n\r\n",
    "an error page": b"HTTP/1.1 502 Bad Gateway\r\nconnection: close\r\n\r\n<html>gone</html>",
    "an error page, and a reset": b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 99\r\n\r\n<html>",
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_is_broken_is_one_line(name, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(BROKEN[name])
                if "reset" in name:  # what it has sent may be lost, too
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        assert main(["complete", "--url", url, "--model-name", "m", "-q", "x"]) in (1, 2)
        thread.join()
    error = capsys.readouterr().err
    assert error.startswith("quire: error: ") and error.count("\n") == 1
