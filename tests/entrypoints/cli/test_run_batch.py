"""`quire run-batch`: a line in, a line out, in order; bad lines harm no other; a run that was cut off goes on."""

import argparse
import asyncio
import http.client
import http.server
import json
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.batches.beside import LineAnswerer
from quire.entrypoints.batches.protocol import BatchError, BatchResult
from quire.entrypoints.batches.runner import BatchRunner, Window
from quire.entrypoints.batches.store import BatchStore
from quire.entrypoints.batches.tables import BatchFolder
from quire.entrypoints.cli import run_batch
from quire.entrypoints.cli.main import main
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.process import metrics_port
from quire.errors import CapacityError, ConfigError, EngineDeadError


def line(custom_id: str, body: Any, url: str = "/v1/completions", **fields: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}).encode() + b"\n"


def complete(custom_id: str, prompt: str = "ab", **fields: Any) -> bytes:
    return line(custom_id, {"prompt": prompt, "max_tokens": 4, **fields})


def answerer(engine: FakeAsyncLLM) -> LineAnswerer:
    state = ServerState(ServerSettings(), engine)
    return LineAnswerer(build_app(state, docs=False), state)


def run(
    folder: Path, lines: tuple[bytes, ...], answer: Callable[[bytes], Awaitable[BatchResult]], size: int = 4
) -> None:
    """What the command does, around an answerer."""
    (folder / "in").write_bytes(b"".join(lines))
    args = argparse.Namespace(output_file="out", input_file="in")

    async def work() -> None:
        journal = BatchFolder(str(folder / "out.batch"), "output_file")
        try:
            store = BatchStore(journal)
            row = await run_batch._load_lines(args, store, str(folder / "in"))
            await BatchRunner(store, answer, Window(size), (), 1 << 20).run(until_done=True)
            await run_batch._write_output(store, row, str(folder / "out"))
        finally:
            journal.close()

    asyncio.run(work())


def answers(folder: Path, *lines: bytes, engine: FakeAsyncLLM | None = None) -> list[dict[str, Any]]:
    """The output lines of a batch over the fake engine."""
    run(folder, lines, answerer(engine or FakeAsyncLLM()).answer)
    return [json.loads(text) for text in (folder / "out").read_bytes().splitlines()]


def test_a_line_gets_the_servers_own_answer(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    first, second = answers(tmp_path, line("a", chat, "/v1/chat/completions"), complete("b"))
    assert first["custom_id"] == "a" and first["error"] is None and first["id"].startswith("batch_req_")
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"]
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "<USE"
    assert second["response"]["body"]["choices"][0]["text"] == "ABAB"


BAD = {
    "nonsense": (b"nonsense\n", None, "invalid_json_line"),
    "not text": (b"\xff\xfe\n", None, "invalid_json_line"),
    "a list": (b"[1]\n", None, "invalid_line"),
    "no url": (b'{"custom_id": "x", "body": {}}\n', "x", "invalid_line"),
    "no id": (b'{"url": "/v1/completions", "body": {}}\n', None, "invalid_line"),
    "a get": (line("x", {}, method="GET"), "x", "invalid_method"),
    "an operator's route": (line("x", {}, "/reset_prefix_cache?a=b"), "x", "invalid_url"),
    "a stream": (complete("x", stream=True), "x", "invalid_request"),
    "a job": (line("x", {"input": "y", "background": True}, "/v1/responses"), "x", "invalid_request"),
    "the same id": (complete("first"), "first", "duplicate_custom_id"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_one_error_line_and_harms_no_other(name: str, tmp_path: Path) -> None:
    bad, custom_id, code = BAD[name]
    first, middle, last = answers(tmp_path, complete("first"), bad, complete("last"))
    assert first["error"] is None and last["error"] is None and last["custom_id"] == "last"
    assert (middle["custom_id"], middle["response"], middle["error"]["code"]) == (custom_id, None, code)


@pytest.mark.parametrize(
    ("bad", "status", "words"),
    [
        (line("x", {}, "/nowhere"), 404, "no route"),
        (line("x", [1]), 400, "object"),
        (complete("x", max_tokens="y"), 400, "max_tokens"),
        (complete("x", model="other"), 404, "'other' is not served"),
    ],
    ids=["route", "body", "type", "model"],
)
def test_what_a_route_refuses_is_told_with_its_status(bad: bytes, status: int, words: str, tmp_path: Path) -> None:
    (result,) = answers(tmp_path, bad)
    assert result["response"]["status_code"] == status
    assert words in result["error"]["message"] and words in result["response"]["body"]["error"]["message"]


def test_lines_run_together_and_come_out_in_order(tmp_path: Path) -> None:
    release = [asyncio.Event() for _ in range(6)]
    running: list[int] = []
    most = 0

    async def answer(text: bytes) -> BatchResult:
        nonlocal most
        number = int(json.loads(text)["custom_id"])
        running.append(number)
        most = max(most, len(running))
        if len(running) == 3:  # the youngest ends first
            release[max(running)].set()
        await release[number].wait()
        running.remove(number)
        for event in release[:number] if number == 5 else ():
            event.set()
        return BatchResult(custom_id=str(number))

    run(tmp_path, tuple(complete(str(number)) for number in range(6)), answer, 3)
    written = [json.loads(text)["custom_id"] for text in (tmp_path / "out").read_bytes().splitlines()]
    assert written == ["0", "1", "2", "3", "4", "5"] and most == 3


def test_a_full_queue_is_tried_again_while_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("quire.entrypoints.batches.beside.RETRY_S", 0.0)

    class Full(FakeAsyncLLM):
        refusals = 3

        async def generate(self, *args: Any, **options: Any) -> Any:
            self.num_asked += 1
            if self.num_asked == 2:
                self.both_asked.set()
            await self.both_asked.wait()  # alone, a line would be refused: nothing leaves the queue
            if self.refusals:
                self.refusals -= 1
                raise CapacityError("The queue is full.")
            async for output in super().generate(*args, **options):
                yield output

    engine = Full()
    engine.num_asked, engine.both_asked = 0, asyncio.Event()
    results = answers(tmp_path, complete("a"), complete("b"), engine=engine)
    assert [result["error"] for result in results] == [None, None] and engine.refusals == 0


def test_a_dead_engine_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    engine = FakeAsyncLLM()
    answer = answerer(engine).answer

    async def answer_one(text: bytes) -> BatchResult:
        result = await answer(text)
        engine.errored, engine.failure = True, EngineDeadError("dead")
        return result

    lines = (complete("a"), complete("b"), complete("c"))
    with pytest.raises(EngineDeadError, match="goes on where it stopped"):
        run(tmp_path, lines, answer_one, 1)
    again = FakeAsyncLLM()
    assert [result["custom_id"] for result in answers(tmp_path, *lines, engine=again)] == ["a", "b", "c"]
    assert len(again.started) == 2


def test_another_input_does_not_go_on(tmp_path: Path) -> None:
    answers(tmp_path, complete("a"))
    with pytest.raises(ConfigError, match="a run of another input was cut off"):
        answers(tmp_path, complete("b"))


def write_lines(path: Path, *lines: bytes) -> str:
    path.write_bytes(b"".join(lines))
    return str(path)


def result_line(custom_id: str) -> bytes:
    return BatchResult(custom_id=custom_id).as_line()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "exists; --overwrite replaces it, --resume accepts it"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--resume"], "has 2 lines and the input 1: it belongs to another input"),
        (["--max-inflight", "0"], "max_inflight=0"),
        (["--input-file", "/nowhere"], "cannot open '/nowhere'"),
        (["--input-file", "http://127.0.0.1:1/x"], "cannot get 'http://127.0.0.1:1/x'"),
        (["--output-file", "{folder}/none/out"], "cannot write in"),
        (["--output-file", "http://127.0.0.1:1/x", "--output-tmp-dir", "/nowhere"], "output_tmp_dir"),
        (["--ssl-keyfile", "x"], "unrecognized arguments: --ssl-keyfile"),
        (["--tool-call-parser", "nonsense", "--overwrite"], "nonsense"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line(flags: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    requests = write_lines(tmp_path / "i", complete("a"))
    output = write_lines(tmp_path / "o", result_line("a"), result_line("b"))
    flags = [flag.format(folder=tmp_path) for flag in flags]
    assert main(["run-batch", "-i", requests, "-o", output, *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


def test_a_file_without_lines_gives_a_result_without_lines(tmp_path: Path, capsys: Any) -> None:
    requests = write_lines(tmp_path / "i", b"\n  \n")
    model = ["--model", str(tmp_path / "is not read")]
    assert main(["run-batch", "-i", requests, "-o", str(tmp_path / "o"), *model]) == 0
    assert (tmp_path / "o").read_bytes() == b"" and "no request" in capsys.readouterr().err


@pytest.fixture
def store() -> Iterator[Any]:
    """A web server that gives and takes files."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = self.server.files.get(self.path)  # type: ignore[attr-defined]
            self.send_response(404 if content is None else 200)
            self.end_headers()
            self.wfile.write(content or b"")

        def do_PUT(self) -> None:
            self.server.files[self.path] = self.rfile.read(int(self.headers["Content-Length"]))  # type: ignore[attr-defined]
            self.send_response(201)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {}  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path)
    response = connection.getresponse()
    return response.status, response.read()


class Paths:
    """An application that answers with the path that was asked for."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": scope["path"].encode()})


def test_metrics_are_given_on_a_port_while_a_batch_runs() -> None:
    application = Paths()

    async def scrape() -> list[tuple[int, bytes]]:
        async with metrics_port(application, "127.0.0.1", 0) as port:
            with pytest.raises(ConfigError, match="port: cannot listen"):
                async with metrics_port(application, "127.0.0.1", port):
                    pass
            wanted = [("/metrics", "GET"), ("/metrics?x=1", "GET"), ("/v1/models", "GET"), ("/metrics", "POST")]
            return [await asyncio.to_thread(get, port, *each) for each in wanted]

    answers = asyncio.run(scrape())
    assert answers[:2] == [(200, b"/metrics")] * 2 and [status for status, _ in answers[2:]] == [404, 405]


async def answer_one_and_die(text: bytes) -> BatchResult:
    if b'"r0"' not in text:
        raise EngineDeadError("dead")
    return BatchResult(custom_id="r0", error=BatchError("c", "m"))


QUESTION = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 16, "temperature": 0}


def test_the_demo_model_answers_a_file_from_a_url_and_an_interrupted_run_goes_on(
    store: Any, tmp_path: Path, capsys: Any
) -> None:
    requests = [line(f"r{n}", QUESTION, "/v1/chat/completions") for n in range(3)]
    store.files["/in"] = b"".join(requests)
    address = f"http://127.0.0.1:{store.server_address[1]}"
    command = ["run-batch", "--no-progress", "--cpu-threads", "1", "--output-tmp-dir", str(tmp_path)]
    assert main([*command, "-i", f"{address}/in", "-o", f"{address}/out", "--enable-metrics", "--port", "0"]) == 0
    assert list(tmp_path.iterdir()) == []
    results = [json.loads(each) for each in store.files["/out"].splitlines()]
    assert [result["custom_id"] for result in results] == ["r0", "r1", "r2"]
    assert all("42" in result["response"]["body"]["choices"][0]["message"]["content"] for result in results)

    source, output = write_lines(tmp_path / "i", *requests), tmp_path / "o"
    with pytest.raises(EngineDeadError):
        run(tmp_path, tuple(requests), answer_one_and_die, 1)
    os.rename(tmp_path / "out.batch", tmp_path / "o.batch")
    os.unlink(tmp_path / "in")
    assert not output.exists()
    assert main([*command, "-i", source, "-o", str(output)]) == 0
    first, *rest = [json.loads(each) for each in output.read_text().splitlines()]
    assert first["error"]["code"] == "c" and [each["custom_id"] for each in rest] == ["r1", "r2"]
    assert "2 lines answered, 1 refused or failed" in capsys.readouterr().err
    assert main([*command, "-i", source, "-o", str(output), "--resume"]) == 0
    assert "all 3 lines are answered already" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["i", "o"]
