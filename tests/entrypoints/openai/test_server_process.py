"""A real server process on a real socket: start, signals, limits, the Unix socket. Only 127.0.0.1 is touched."""

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.oracles.server_process import ServerProcess

from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    running: list[ServerProcess] = []

    def begin(*arguments: str, **options: Any) -> ServerProcess:
        running.append(ServerProcess("-m", "tests.oracles.fake_server", *arguments, **options))
        return running[-1]

    yield begin
    for process in running:
        process.kill()


def wait_for_status(client: httpx.Client, path: str, status: int) -> httpx.Response:
    """Ask until the answer has the status; the server works meanwhile."""
    for _ in range(2000):
        response = client.get(path)
        if response.status_code == status:
            return response
    raise AssertionError(f"{path} never answered {status}")


BODY = {"prompt": "abc", "stream": True, "max_tokens": 20}


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_exits_with_0(start):
    process = start("2")
    with httpx.Client(base_url=process.url) as client, client.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        process.popen.send_signal(signal.SIGTERM)
        refused = wait_for_status(client, "/ready", 503)
        assert refused.headers["retry-after"]
        work = client.post("/v1/completions", json={"prompt": "x"})
        assert work.status_code == 503 and work.headers["retry-after"]
        process.popen.send_signal(signal.SIGUSR1)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in [first, *rest[:-1]])
        assert text == ("ABC" * 7)[:20]
    code, output = process.end()
    assert code == 0 and "Traceback" not in output


def test_an_idle_server_ends_at_once_on_sigterm(start):
    process = start("2")
    code, output = process.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in output


@pytest.mark.parametrize(
    ("signals", "expected"),
    [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 1), ((signal.SIGTERM, signal.SIGINT), 1)],
)
def test_ctrl_c_and_a_second_signal_cut_off_what_runs_without_a_trace(start, signals, expected):
    process = start("2")
    with httpx.Client(base_url=process.url) as client, client.stream("POST", "/v1/completions", json=BODY) as stream:
        lines = stream.iter_lines()
        next(lines)
        process.popen.send_signal(signals[0])
        if len(signals) > 1:
            wait_for_status(client, "/ready", 503)
            process.popen.send_signal(signals[1])
        code, output = process.end()
    assert code == expected and "Traceback" not in output and "Exception" not in output


def test_the_port_is_open_while_the_engine_starts(start):
    process = start("2", "slow-start", ready="listening at")
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=BODY).json()["error"]["code"] == "unavailable"
        process.popen.send_signal(signal.SIGUSR1)
        assert wait_for_status(client, "/health", 200)
    assert process.end(signal.SIGTERM)[0] == 0


def test_ctrl_c_while_the_engine_starts_ends_at_once(start):
    process = start("2", "slow-start", ready="listening at")
    with httpx.Client(base_url=process.url) as client:
        assert client.get("/health").status_code == 503
    code, output = process.end(signal.SIGINT)
    assert code == 130 and "Traceback" not in output


def test_a_start_that_fails_is_one_message_and_exit_code_2(start):
    code, output = start("2", "broken-start", ready="listening at").end()
    assert code == 2 and "max_model_len: 0 is too small." in output and "Traceback" not in output


def raw_exchange(url: str, request: bytes) -> bytes:
    """Send bytes as they are; give what comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return answer


def test_garbage_and_oversized_heads_are_refused_in_the_protocols_shape(start):
    process = start("2")
    huge = b"x" * 70_000
    cases = {
        b"\x00\x01garbage\r\n\r\n": b" 400 ",
        b"GET /health HTTP/1.1\r\nhost: x\r\na: " + huge + b"\r\n\r\n": b" 431 ",
        b"GET /health HTTP/1.1\r\nhost: x\r\na: " + huge: b" 431 ",
        b"GET /" + huge: b" 431 ",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 300 + b"\r\n": b" 431 ",
    }
    for request, status in cases.items():
        head, _, body = raw_exchange(process.url, request).partition(b"\r\n\r\n")
        assert status in head.split(b"\r\n")[0], head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(process.url + "/health").status_code == 200


def test_a_client_that_hangs_up_leaves_the_server_serving(start):
    process = start("3")
    with httpx.Client(base_url=process.url) as client:
        with client.stream("POST", "/v1/completions", json=BODY) as stream:
            next(stream.iter_lines())
        for _ in range(2000):
            if client.get("/load").json() == {"server_load": 0}:
                break
        else:
            raise AssertionError("the request of a client that went away still runs")
        process.popen.send_signal(signal.SIGUSR1)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_connections_are_kept_alive(start):
    process = start("100")
    with httpx.Client(base_url=process.url) as client:
        for _ in range(3):
            response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
            assert response.status_code == 200 and response.headers.get("connection") != "close"


def test_a_port_in_use_is_one_clear_error():
    listener, options = open_socket(ListenOptions(port=0))
    with listener, pytest.raises(ConfigError, match=f"port: cannot listen on 127.0.0.1:{options.port}"):
        open_socket(ListenOptions(port=options.port))


def test_a_host_that_is_not_ours_is_one_clear_error():
    with pytest.raises(ConfigError, match="cannot listen"):
        open_socket(ListenOptions(host="203.0.113.1", port=0))


def test_a_unix_socket_is_its_owners_alone_and_replaces_a_dead_one(tmp_path):
    path = tmp_path / "s"
    for _ in range(2):
        listener, options = open_socket(ListenOptions(uds=str(path)))
        assert path.stat().st_mode & 0o777 == 0o600 and options.url == f"unix:{path}"
        listener.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="uds"):
        open_socket(ListenOptions(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_server_whose_engine_dies_tells_its_streams_in_a_line_each_and_ends_with_1(start):
    process = start("2")
    with httpx.Client(base_url=process.url, timeout=120) as client:
        with client.stream("POST", "/v1/completions", json=BODY) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.popen.send_signal(signal.SIGUSR2)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2][6:])["error"]["code"] == "engine_dead" and rest[-1] == "data: [DONE]"
    assert process.popen.wait(60) == 1
    _, output = process.end()
    assert output.count("was cut off: the engine has died") == 1 and "Traceback" not in output
    assert "the server ends with exit code 1" in output


def test_a_server_may_stay_when_its_engine_has_died(start):
    process = start("2", "stays")
    with httpx.Client(base_url=process.url, timeout=120) as client:
        process.popen.send_signal(signal.SIGUSR2)
        wait_for_status(client, "/health", 503)
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 503
    assert process.popen.poll() is None
    code, output = process.end(signal.SIGTERM)
    assert code == 0 and "Traceback" not in output


FEW_FILES = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
sys.argv = ["fake_server", "2"]
runpy.run_module("tests.oracles.fake_server", run_name="__main__")
"""


def test_connections_beyond_the_limit_of_open_files_get_a_503_and_the_server_goes_on():
    process = ServerProcess("-c", FEW_FILES)
    try:
        host, port = process.url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port)), timeout=60) for _ in range(36)]
        answers = []
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            answers.append(connection.recv(65536))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        for _ in range(3):
            head, _, body = raw_exchange(process.url, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable")
            assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert "new ones get a 503" in process.line_with("ulimit -n")
        for connection in held:
            connection.close()
        with httpx.Client(base_url=process.url) as client:
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code in (200, 503)
            wait_for_status(client, "/health", 200)
        assert "Traceback" not in process.output
    finally:
        process.kill()
