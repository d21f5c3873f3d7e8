"""Lines of batch files: what a line must be. Knows nothing of batches and their order."""

import contextlib
from collections.abc import Container, Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec

from quire.entrypoints.batches.protocol import BatchError, BatchRequest

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
