"""What clients and the routes of files and batches say to each other: OpenAI's objects, and the lines of its files.

Knows what a line must be. Knows nothing of batches' order.
"""

import contextlib
import uuid
from collections.abc import Container, Iterator
from typing import Annotated, Any, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

from quire.entrypoints.http.long_bodies import Page
from quire.entrypoints.openai.protocol import Metadata

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 24 * 3600


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """When a file is removed: so many seconds after it was made."""

    anchor: Annotated[str, Meta(pattern="^created_at$")] = "created_at"
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]


class FileObject(msgspec.Struct, kw_only=True):
    """A file, without its content."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class FileList(Page, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class FileDeleted(msgspec.Struct, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: str = "file"
    deleted: bool = True


class BatchCreateRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/batches`.

    Attributes:
        input_file_id: a file of purpose `batch`.
        endpoint: the route of all its lines.
        completion_window: after so long, lines without an answer get an error: `24h`, or another number of hours or days.
    """

    input_file_id: str
    endpoint: str
    completion_window: Annotated[str, Meta(pattern="^[1-9][0-9]{0,2}[hd]$")] = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class LineFault(msgspec.Struct, kw_only=True):
    """Why an input file is refused, at one of its lines."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class FaultList(msgspec.Struct, kw_only=True):
    """Why an input file is refused."""

    object: str = "list"
    data: list[LineFault]


class RequestCounts(msgspec.Struct):
    """How far a batch is."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are seconds since the epoch."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: FaultList | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchList(Page, kw_only=True):
    """A page of batches, the newest first."""

    data: list[BatchObject]


class BatchRequest(msgspec.Struct, kw_only=True):
    """A line of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line has no good answer."""

    code: str
    message: str


class BatchResponse(msgspec.Struct):
    """What the route answered; `body` is its JSON as it came."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct):
    """A line of the output. A refusal of a route is in `response` and in `error`."""

    id: str = msgspec.field(default_factory=lambda: f"batch_req_{uuid.uuid4().hex}")
    custom_id: str | None = None
    response: BatchResponse | None = None
    error: BatchError | None = None

    def as_line(self) -> bytes:
        """This result as JSON on one line, whatever white space the body has."""
        line = msgspec.json.encode(self)
        if b"\n" in line:
            line = msgspec.json.encode(msgspec.json.decode(line))
        return line + b"\n"


MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Line(NamedTuple):
    """A line of an input file.

    Attributes:
        number: from 1; blank lines count, and are left out.
        custom_id: its name, where one can be read.
        text: the request as it came; empty where the line is too long.
        error: why it cannot be answered.
    """

    number: int
    custom_id: str | None
    text: bytes
    error: BatchError | None = None


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Modes(msgspec.Struct):
    stream: Any = None
    background: Any = None


decode_request = msgspec.json.Decoder(BatchRequest).decode
_decode_named = msgspec.json.Decoder(_Named).decode


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The lines that are not blank, with their numbers; None for a line of more than `max_bytes`."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := file.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


class LineChecker:
    """Says which lines can be given to a route.

    Args:
        closed: paths of operators' routes.
        endpoint: the path that all lines must have; None: any that is not closed.
        max_bytes: the longest line.
    """

    def __init__(self, closed: Container[str], endpoint: str | None, max_bytes: int) -> None:
        self._closed = closed
        self._endpoint = endpoint
        self._max_bytes = max_bytes

    def read(self, file: BinaryIO) -> Iterator[Line]:
        """The lines of a file that are not blank."""
        for number, text in read_lines(file, self._max_bytes):
            if text is None:
                why = f"This line is longer than {self._max_bytes} bytes."
                yield Line(number, None, b"", BatchError("line_too_long", why))
            else:
                yield self.check(number, text)

    def check(self, number: int, text: bytes) -> Line:
        """A line, and whether it can be answered."""
        try:
            request = decode_request(text)
        except MALFORMED as error:
            is_json = isinstance(error, msgspec.ValidationError)
            fault = BatchError(
                "invalid_line" if is_json else "invalid_json_line", f"This line is not a batch request: {error}."
            )
            return Line(number, _custom_id_of(text), text, fault)
        return Line(number, request.custom_id, text, self._fault_of(request))

    def _fault_of(self, request: BatchRequest) -> BatchError | None:
        """Why a request cannot be given to its route."""
        if request.method != "POST":
            return BatchError("invalid_method", f"method: {request.method[:50]!r} is not 'POST'.")
        path = request.url.partition("?")[0]
        if path in self._closed:
            text = f"url: {request.url[:200]!r} is an operator's route, not one for requests."
            return BatchError("invalid_url", text)
        if self._endpoint is not None and path != self._endpoint:
            text = f"url: {request.url[:200]!r} is not the batch's endpoint {self._endpoint!r}."
            return BatchError("mismatched_url", text)
        with contextlib.suppress(*MALFORMED):
            modes = msgspec.json.decode(request.body, type=_Modes)
            if modes.stream or modes.background:
                field = "stream" if modes.stream else "background"
                return BatchError("invalid_request", f"{field}: a batch file's answers are whole.")
        return None


def _custom_id_of(line: bytes) -> str | None:
    with contextlib.suppress(*MALFORMED):
        return _decode_named(line).custom_id
    return None
