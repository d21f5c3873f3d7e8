"""The routes under `/v1/files` and `/v1/batches`: each reads what was sent, calls the store, and encodes what it gives."""

import contextlib
import sqlite3
from collections.abc import Awaitable, Generator
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.entrypoints.batches.protocol import (
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    BatchCreateRequest,
    BatchList,
    BatchObject,
    FileDeleted,
    FileList,
    FileObject,
)
from quire.entrypoints.batches.service import Batches
from quire.entrypoints.batches.store import NotCancellable
from quire.entrypoints.batches.tables import is_full
from quire.entrypoints.database import Missing
from quire.entrypoints.http.decoding import stream_body
from quire.entrypoints.http.errors import HTTPError, bad_field, bad_request
from quire.entrypoints.http.form import FormReader, read_form
from quire.entrypoints.http.route_tools import (
    Endpoint,
    is_ascending,
    json_response,
    number_of,
    page_of,
    read_bytes,
    state_of,
)
from quire.errors import did_you_mean

PURPOSE = "batch"
MAX_FIELD_BYTES = 4096
FORM_BYTES = 64 << 10
"""Room for a form's fields besides its file."""
UPLOAD_TIMEOUT_S = 3600.0
DEFAULT_EXPIRY_S = 30 * 24 * 3600
ResultT = TypeVar("ResultT")


def _batches_of(request: Request) -> Batches:
    batches = state_of(request).batches
    if batches is None:
        message = (
            "Files and batches are off; start the server with --batch-store DIR, a folder that survives a restart."
        )
        raise bad_request(message, code="batches_off")
    return batches


@contextlib.contextmanager
def _store_errors() -> Generator[None]:
    """A disk without room is told as such."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if not is_full(error):
            raise
        raise HTTPError(507, "The batch store's disk is full.", code="store_full") from None


async def _found(kind: str, work: Awaitable[ResultT]) -> ResultT:
    """What the store gives; a 404 where it has no such file or batch."""
    try:
        with _store_errors():
            return await work
    except Missing as error:
        raise HTTPError(
            404, f"There is no {kind} {error.args[0][:100]!r}.", param=f"{kind}_id", code="not_found"
        ) from None


async def create_file(request: Request) -> Response:
    """`POST /v1/files`."""
    batches = _batches_of(request)
    limit = state_of(request).settings.max_batch_file_size
    pieces = stream_body(request, limit + FORM_BYTES, UPLOAD_TIMEOUT_S)
    form = FormReader(request.headers.get("content-type", ""), pieces)
    with _store_errors():
        upload = batches.store.files.begin()
        try:
            filename, fields = await read_form(form, upload.write, limit, "--max-batch-file-size", MAX_FIELD_BYTES)
            expires_after = _check_fields({name: texts[-1] for name, texts in fields.items()})
            await upload.finish()
            file = await batches.store.files.add(upload, filename[:255], PURPOSE, expires_after)
        except BaseException:
            upload.cancel()
            raise
    return json_response(file)


def _check_fields(fields: dict[str, str]) -> int:
    """After how many seconds the file is removed."""
    purpose = fields.get("purpose")
    if purpose != PURPOSE:
        raise bad_field("purpose", f"{(purpose or '')[:60]!r} is not served; allowed: {PURPOSE!r}.")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return DEFAULT_EXPIRY_S
    if anchor != "created_at":
        raise bad_field("expires_after.anchor", f"{(anchor or '')[:60]!r} is unknown; allowed: 'created_at'.")
    if not (seconds and seconds.isascii() and seconds.isdigit() and MIN_EXPIRY_S <= int(seconds[:9]) <= MAX_EXPIRY_S):
        range_text = f"{MIN_EXPIRY_S} to {MAX_EXPIRY_S}"
        raise bad_field("expires_after.seconds", f"{(seconds or '')[:60]!r} is no whole number from {range_text}.")
    return int(seconds)


async def list_files(request: Request) -> Response:
    """`GET /v1/files`."""
    store, query = _batches_of(request).store, request.query_params
    limit = number_of(request, "limit", 10_000, 1, 10_000)
    found = store.files.page(query.get("purpose"), query.get("after"), limit, is_ascending(request))
    files, has_more = await _found("file", found)
    return json_response(page_of(FileList, files, [file.id for file in files], has_more))


async def retrieve_file(request: Request) -> Response:
    """`GET /v1/files/{file_id}`."""
    file = _batches_of(request).store.files.get(request.path_params["file_id"])
    return json_response(await _found("file", file))


async def file_content(request: Request) -> Response:
    """`GET /v1/files/{file_id}/content`."""
    files = _batches_of(request).store.files
    file = await _found("file", files.get(request.path_params["file_id"]))
    pieces = await _found("file", files.read(file.id))
    return StreamingResponse(pieces, media_type="application/jsonl", headers={"content-length": str(file.bytes)})


async def delete_file(request: Request) -> Response:
    """`DELETE /v1/files/{file_id}`."""
    file_id = request.path_params["file_id"]
    await _found("file", _batches_of(request).store.files.delete(file_id))
    return json_response(FileDeleted(id=file_id))


async def create_batch(request: Request) -> Response:
    """`POST /v1/batches`."""
    batches, state = _batches_of(request), state_of(request)
    warnings = request.scope["state"].setdefault("warnings", [])
    body = state.decoder.decode(await read_bytes(request), BatchCreateRequest, warnings)
    if body.endpoint not in batches.endpoints:
        near = did_you_mean(body.endpoint[:200], batches.endpoints, "; {}", ".")
        raise bad_field("endpoint", f"{body.endpoint[:200]!r} is no route that batches can have{near}")
    file = await _found("file", batches.store.files.get(body.input_file_id))
    if file.purpose != PURPOSE:
        raise bad_field("input_file_id", f"the file's purpose is {file.purpose!r}, not {PURPOSE!r}.")
    with _store_errors():
        batch = await batches.store.create(body)
    batches.wake()
    return json_response(batch)


async def list_batches(request: Request) -> Response:
    """`GET /v1/batches`."""
    store = _batches_of(request).store
    found = store.page(request.query_params.get("after"), number_of(request, "limit", 20, 1, 100))
    batches, has_more = await _found("batch", found)
    return json_response(page_of(BatchList, batches, [batch.id for batch in batches], has_more))


async def retrieve_batch(request: Request) -> Response:
    """`GET /v1/batches/{batch_id}`."""
    row = await _found("batch", _batches_of(request).store.get(request.path_params["batch_id"]))
    return json_response(row.batch)


async def cancel_batch(request: Request) -> Response:
    """`POST /v1/batches/{batch_id}/cancel`."""
    batches = _batches_of(request)
    try:
        batch = await _found("batch", batches.store.cancel(request.path_params["batch_id"]))
    except NotCancellable as error:
        raise HTTPError(409, f"The batch is {error.args[0]}; it cannot be cancelled.", code="batch_is_over") from None
    batches.wake()
    return json_response(batch)


_GET = ("GET",)
_EXAMPLE = {"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
FILES_AND_BATCHES = (
    Endpoint(
        "/v1/files",
        create_file,
        "Upload a file of requests, for a batch.",
        answer=FileObject,
        form={"purpose": "string", "file": "binary"},
    ),
    Endpoint(
        "/v1/files",
        list_files,
        "Uploaded files and results of batches.",
        _GET,
        answer=FileList,
        query={"purpose": "string", "limit": "integer", "order": "string", "after": "string"},
    ),
    Endpoint("/v1/files/{file_id}", retrieve_file, "A file, without its content.", _GET, answer=FileObject),
    Endpoint("/v1/files/{file_id}", delete_file, "Remove a file.", ("DELETE",), answer=FileDeleted),
    Endpoint("/v1/files/{file_id}/content", file_content, "A file's content.", _GET),
    Endpoint(
        "/v1/batches",
        create_batch,
        "Answer the requests of a file when there is time.",
        body=(BatchCreateRequest,),
        answer=BatchObject,
        example=_EXAMPLE,
    ),
    Endpoint(
        "/v1/batches",
        list_batches,
        "Batches, the newest first, and how far they are.",
        _GET,
        answer=BatchList,
        query={"limit": "integer", "after": "string"},
    ),
    Endpoint("/v1/batches/{batch_id}", retrieve_batch, "A batch, and how far it is.", _GET, answer=BatchObject),
    Endpoint("/v1/batches/{batch_id}/cancel", cancel_batch, "Start no further line of a batch.", answer=BatchObject),
)
