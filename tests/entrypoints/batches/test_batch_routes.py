"""/v1/files and /v1/batches as OpenAI's client sees them: objects, states, files, refusals."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.entrypoints.batches.conftest import line, serve
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.batches.files import Upload
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app

pytestmark = pytest.mark.anyio


async def test_a_batch_is_uploaded_answered_and_read(server: Any) -> None:
    async with server() as s:
        file = await s.upload(line("a"), b"\n", line("b", "xy"), line("c", model="other"))
        assert (file.object, file.purpose, file.filename) == ("file", "batch", "in.jsonl") and file.expires_at
        batch = await s.client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"name": "first"}
        )
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"name": "first"})
        assert batch.expires_at == batch.created_at + 24 * 3600
        over = await s.over(batch)
        assert over.status == "completed" and over.errors is None
        assert over.in_progress_at and over.finalizing_at and over.completed_at
        counts = over.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        first, second = await s.results(over.output_file_id)
        assert first["custom_id"] == "a" and first["error"] is None and first["id"].startswith("batch_req_")
        assert first["response"]["status_code"] == 200 and first["response"]["request_id"]
        assert first["response"]["body"]["choices"][0]["text"] == "ABAB"
        assert second["custom_id"] == "b" and second["response"]["body"]["choices"][0]["text"] == "XYXY"
        (failed,) = await s.results(over.error_file_id)
        assert failed["custom_id"] == "c" and failed["response"]["status_code"] == 404
        assert "'other' is not served" in failed["error"]["message"]
        shown = await s.client.files.retrieve(over.output_file_id)
        content = (await s.client.files.content(shown.id)).content
        assert shown.purpose == "batch_output" and shown.bytes == len(content)
        events = [event.text for event in s.engine.events.latest()]
        assert events and batch.id in events[0]
        assert s.engine.metrics.batch_lines == {"completed": 2, "failed": 1}
        (told,) = (await s.http.get("/console/state")).json()["batches"]
        assert (told["id"], told["status"]) == (batch.id, "completed")
        assert told["request_counts"] == {"total": 3, "completed": 2, "failed": 1}


async def test_lines_go_on_in_a_new_process_where_they_stopped(tmp_path: Path) -> None:
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(8)  # two answers of four tokens
    names = [f"n{number}" for number in range(6)]
    async with serve(tmp_path, engine=engine) as s:
        batch = await s.begin(*map(line, names))
        while (await s.client.batches.retrieve(batch.id)).request_counts.completed < 2:
            await asyncio.sleep(0.005)
    second = FakeAsyncLLM()
    async with serve(tmp_path, engine=second) as s:
        over = await s.over(batch)
        assert [result["custom_id"] for result in await s.results(over.output_file_id)] == names
        assert len(second.started) == 4


async def test_a_cancelled_batch_tells_what_it_has(server: Any) -> None:
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(4)
    async with server(engine=engine) as s:
        batch = await s.begin(line("a"), line("b"), line("c"))
        while not (await s.client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.005)
        assert (await s.client.batches.cancel(batch.id)).status == "cancelling"
        over = await s.status(batch, "cancelled")
        assert over.cancelling_at and over.cancelled_at and over.request_counts.completed == 1
        (done,) = await s.results(over.output_file_id)
        ended = await s.results(over.error_file_id)
        assert sorted(each["custom_id"] for each in [done, *ended]) == ["a", "b", "c"]
        assert {each["error"]["code"] for each in ended} == {"batch_cancelled"}
        with pytest.raises(openai.ConflictError, match="is cancelled; it cannot be cancelled"):
            await s.client.batches.cancel(batch.id)
        assert len(engine.aborted) == 2


BAD_FILES = {
    "nonsense": ([line("a"), b"\n", b"nonsense\n"], "invalid_json_line", 3),
    "not text": ([b"\xff\xfe\n"], "invalid_json_line", 1),
    "no id": ([b'{"url": "/v1/completions", "body": {}}\n'], "invalid_line", 1),
    "a get": ([line("a").replace(b"POST", b"GET")], "invalid_method", 1),
    "another route": ([line("a"), line("b", url="/v1/embeddings")], "mismatched_url", 2),
    "an operator's route": ([line("a", url="/reset_prefix_cache")], "invalid_url", 1),
    "the same id": ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
    "a stream": ([line("a", stream=True)], "invalid_request", 1),
    "a huge line": ([line("a"), line("b", "x" * 3000)], "line_too_long", 2),
    "nothing": ([b"\n\n"], "empty_file", None),
}


@pytest.mark.parametrize("name", BAD_FILES)
async def test_a_wrong_file_fails_with_its_lines(name: str, server: Any) -> None:
    lines, code, number = BAD_FILES[name]
    async with server(max_body_bytes=2000) as s:
        over = await s.over(await s.begin(*lines))
        assert over.status == "failed" and over.failed_at and over.output_file_id is None
        (fault,) = over.errors.data
        assert (fault.code, fault.line) == (code, number) and fault.message
        assert s.engine.started == []


async def test_at_most_a_hundred_faults_are_listed(server: Any) -> None:
    async with server() as s:
        over = await s.over(await s.begin(b"x\n" * 2000))
        assert [fault.line for fault in over.errors.data] == list(range(1, 101))


async def test_an_input_that_is_deleted_is_missed_before_it_was_read_only(server: Any) -> None:
    async with server(runs=False) as s:
        unread = await s.begin(line("a"))
        await s.client.files.delete(unread.input_file_id)
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(0)
    async with server(engine=engine) as s:
        over = await s.over(unread)
        assert over.status == "failed" and over.errors.data[0].code == "file_not_found"
        read = await s.status(await s.begin(line("a")), "in_progress")
        await s.client.files.delete(read.input_file_id)
    async with server() as s:
        assert (await s.over(read)).status == "completed"


async def test_pages_of_files_and_batches(server: Any) -> None:
    async with server() as s:
        batches = [await s.begin(line("a")) for _ in range(5)]
        newest = [batch.id for batch in reversed(batches)]
        page = await s.client.batches.list(limit=2)
        assert [batch.id for batch in page.data] == newest[:2] and page.has_more
        assert [batch.id async for batch in s.client.batches.list(limit=2)] == newest
        for batch in batches:
            await s.over(batch)
        inputs = [batch.input_file_id for batch in batches]
        files = s.client.files
        assert [file.id async for file in files.list(purpose="batch", order="asc", limit=2)] == inputs
        assert [file.id async for file in files.list(purpose="batch")] == inputs[::-1]
        assert len([file async for file in files.list(limit=3)]) == 10
        for call in (s.client.batches.list(after="batch_x"), files.list(after="file-x")):
            with pytest.raises(openai.NotFoundError, match="There is no"):
                await call


async def test_a_deleted_file_is_gone_with_its_content(server: Any, tmp_path: Path) -> None:
    async with server() as s:
        over = await s.over(await s.begin(line("a"), line("b", model="other")))
        for file_id in (over.input_file_id, over.output_file_id):
            deleted = await s.client.files.delete(file_id)
            assert deleted.deleted and deleted.id == file_id
            for call in (s.client.files.retrieve, s.client.files.content, s.client.files.delete):
                with pytest.raises(openai.NotFoundError, match=f"There is no file '{file_id}'"):
                    await call(file_id)
        assert len(await s.results(over.error_file_id)) == 1
        assert os.listdir(tmp_path / "store" / "files") == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"endpoint": "/v1/models"}, "'/v1/models' is no route that batches can have"),
        ({"endpoint": "/v1/completion"}, "did you mean|/v1/completions"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"input_file_id": "file-none"}, "There is no file 'file-none'"),
    ],
    ids=str,
)
async def test_a_wrong_batch_is_refused(fields: dict[str, Any], words: str, server: Any) -> None:
    async with server(runs=False) as s:
        file = await s.upload(line("a"))
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=words):
            await s.client.batches.create(**body)


async def test_results_are_no_input(server: Any) -> None:
    async with server() as s:
        over = await s.over(await s.begin(line("a")))
        with pytest.raises(openai.BadRequestError, match="the file's purpose is 'batch_output'"):
            await s.client.batches.create(
                input_file_id=over.output_file_id, endpoint="/v1/completions", completion_window="24h"
            )


@pytest.mark.parametrize(
    ("form", "status", "words"),
    [
        ({"data": {"purpose": "batch"}}, 400, "multipart/form-data"),
        ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, 400, "file: the form has no such part"),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": ("a", b"x")}}, 400, "purpose: 'fine-tune' is not served"),
        ({"files": {"file": ("a", b"x")}}, 400, "purpose: ''"),
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * 5000)}}, 413, "larger than 4000 bytes"),
        ({"data": {"purpose": "batch"}, "files": {"file": ("a", b"x" * 100_000)}}, 413, "larger than 69536 bytes"),
        (
            {"data": {"purpose": "batch", "expires_after[anchor]": "now"}, "files": {"file": ("a", b"x")}},
            400,
            "expires_after.anchor: 'now'",
        ),
    ],
    ids=["no form", "no file", "purpose", "no purpose", "too large", "much too large", "expiry"],
)
async def test_a_wrong_upload_leaves_nothing(
    form: dict[str, Any], status: int, words: str, server: Any, tmp_path: Path
) -> None:
    async with server(runs=False, max_batch_file_size=4000) as s:
        answer = await s.http.post("/v1/files", **form)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
        assert os.listdir(tmp_path / "store" / "files") == []
        assert (await s.client.files.list()).data == []


async def test_a_file_name_is_a_name_and_no_path(server: Any, tmp_path: Path) -> None:
    async with server(runs=False) as s:
        file = await s.client.files.create(file=("../../é.jsonl", b"x\r\n--y"), purpose="batch")
        assert file.filename == "../../é.jsonl" and file.bytes == 6
        assert (await s.client.files.content(file.id)).content == b"x\r\n--y"
        assert os.listdir(tmp_path) == ["store"] and os.listdir(tmp_path / "store" / "files") == [file.id]


async def test_keys_guard_the_routes_and_open_them_to_lines(server: Any) -> None:
    async with server(keys=("secret", "other")) as s:
        assert (await s.over(await s.begin(line("a")))).request_counts.completed == 1
        assert (await s.http.get("/v1/batches")).status_code == 401


async def test_without_a_folder_the_answer_names_the_flag() -> None:
    app = build_app(ServerState(ServerSettings(), FakeAsyncLLM()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        for method, path in [
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("POST", "/v1/batches"),
            ("GET", "/v1/batches/x"),
        ]:
            answer = await http.request(method, path)
            assert answer.status_code == 400 and "--batch-store DIR" in answer.json()["error"]["message"]


async def test_a_full_disk_is_told(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(self: Upload) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Upload, "finish", full)
    async with server(runs=False) as s:
        answer = await s.http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")})
        assert answer.status_code == 507 and "disk is full" in answer.json()["error"]["message"]


async def test_a_draining_server_gives_its_lines_back(server: Any) -> None:
    engine = FakeAsyncLLM()
    engine.gate = asyncio.Semaphore(0)
    async with server(engine=engine) as s:
        batch = await s.begin(line("a"))
        await engine.news.wait()
        s.state.draining = True
        await asyncio.wait_for(s.state.idle.wait(), 30)
        counts = (await s.client.batches.retrieve(batch.id)).request_counts
        assert (counts.completed, counts.failed) == (0, 0)
    async with server() as s:
        assert (await s.over(batch)).request_counts.completed == 1
