"""OpenAI's batch files: a request a line in, an answer a line out; local paths, or http(s) addresses.

Knows the form of the lines and where files are. Knows nothing of engines.
"""

import contextlib
import os
import shutil
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from quire.errors import ConfigError

TIMEOUT_S = 300.0


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
    """A line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class _Answered(msgspec.Struct):
    custom_id: str | None


_decode = msgspec.json.Decoder(BatchRequest).decode
_decode_answered = msgspec.json.Decoder(_Answered).decode
_encode = msgspec.json.Encoder().encode


def read_request(line: bytes) -> BatchRequest | BatchResult:
    """A line's request, or the error line that it gets."""
    try:
        request = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return failed(_custom_id(line), "invalid_line", f"This line is not a batch request: {error}.")
    if request.method != "POST":
        return failed(request.custom_id, "invalid_method", f"method: {request.method[:50]!r} is not 'POST'.")
    return request


def failed(custom_id: str | None, code: str, message: str) -> BatchResult:
    """The result of a line that reached no route."""
    return BatchResult(_new_id(), custom_id, None, BatchError(code, message))


def answered(request: BatchRequest, status: int, request_id: str, body: bytes) -> BatchResult:
    """The result of a line that a route answered; a refusal is told in `error` as well."""
    error = None
    if status >= 400:
        detail = _error_detail(body)
        error = BatchError(str(detail.get("code") or status), str(detail.get("message") or f"status {status}"))
    if not body.startswith((b"{", b"[")):
        body = _encode({"text": body.decode("utf-8", "replace")})
    return BatchResult(_new_id(), request.custom_id, BatchResponse(status, request_id, msgspec.Raw(body)), error)


def as_line(result: BatchResult) -> bytes:
    """A result as it stands in the file; one line, whatever white space the body has."""
    line = _encode(result)
    if b"\n" in line:
        line = _encode(msgspec.json.decode(line))
    return line + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _custom_id(line: bytes) -> str | None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decode_answered(line).custom_id
    return None


def _error_detail(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=dict[str, dict[str, Any]]).get("error", {})
    return {}


def read_lines(path: str) -> Iterator[bytes]:
    """The lines that are not blank. Raises ConfigError: the file cannot be read."""
    with _open(path, "rb", "input_file") as file:
        for line in file:
            if line.strip():
                yield line


def count_lines(path: str) -> int:
    return sum(1 for _ in read_lines(path))


def find_resume_point(output: str, requests: str) -> int:
    """How many lines of the input are answered; a torn last line of the output is cut off.
    Raises ConfigError: the output does not belong to this input."""
    answered_lines, size = 0, 0
    lines = read_lines(requests)
    with _open(output, "rb", "output_file") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            custom_id, expected = _custom_id(line), next(lines, None)
            if expected is None or custom_id != _custom_id(expected):
                asked = "no such line" if expected is None else f"{_custom_id(expected)!r} there"
                message = (
                    f"output_file: line {answered_lines + 1} of {output!r} answers {custom_id!r}, the input has {asked}"
                )
                raise ConfigError(f"{message}: it belongs to another input.", setting="output_file")
            answered_lines += 1
            size += len(line)
    os.truncate(output, size)
    return answered_lines


def _open(path: str, mode: str, setting: str) -> BinaryIO:
    try:
        return open(path, mode)  # type: ignore[return-value]  # every mode here is binary; the caller closes it
    except OSError as error:
        raise ConfigError.of(setting, f"cannot open {path!r}: {error.strerror}.") from None


def open_output(path: str, *, append: bool) -> BinaryIO:
    """The output, to be written. Raises ConfigError: it cannot be."""
    return _open(path, "ab" if append else "wb", "output_file")


def is_url(path: str) -> bool:
    """Whether a path is an http(s) address."""
    return path.startswith(("http://", "https://"))


def new_temporary_file(folder: str | None) -> str:
    """An empty file of one's own."""
    try:
        handle, path = tempfile.mkstemp(prefix="quire-batch-", suffix=".jsonl", dir=folder)
    except OSError as error:
        raise ConfigError.of("output_tmp_dir", f"cannot write there: {error}.") from None
    os.close(handle)
    return path


def download(url: str, path: str) -> None:
    """Get an address' content into a file. Raises ConfigError: it cannot be got."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, open(path, "wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, ValueError) as error:
        raise ConfigError.of("input_file", f"cannot get {url!r}: {error}.") from None


def upload(path: str, url: str) -> None:
    """Put a file to an address (a signed one of an object store, for example).
    Raises ConfigError: it was not taken; the file is kept, and named."""
    request = urllib.request.Request(url, method="PUT", headers={"Content-Type": "application/jsonl"})
    try:
        with open(path, "rb") as file:
            request.data = file
            request.add_header("Content-Length", str(os.path.getsize(path)))
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass
    except (OSError, ValueError) as error:
        raise ConfigError.of("output_file", f"cannot put to {url!r}: {error}. The answers are in {path!r}.") from None
