"""Forms with files (`multipart/form-data`), read while they arrive: a file is never in memory as a whole."""

from collections.abc import AsyncIterator, Awaitable, Callable
from email import message_from_string
from email.message import Message

from quire.entrypoints.http.errors import HTTPError, bad_field, bad_request

MAX_HEAD_BYTES = 8 << 10
MAX_PARTS = 32


class FormReader:
    """The parts of a form, one after the other.

    Args:
        content_type: the request's, which has the boundary.
        pieces: the body as it comes.

    Raises:
        HTTPError: a 400, here and in every method, if this is no such form.
    """

    def __init__(self, content_type: str, pieces: AsyncIterator[bytes]) -> None:
        head = message_from_string(f"Content-Type: {content_type}\n\n")
        boundary = head.get_boundary()
        if head.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
            message = f"Content-Type: {content_type[:100]!r} cannot be read; send multipart/form-data with a boundary."
            raise bad_request(message, code="unsupported_media_type")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._pieces = pieces
        self._buffer = bytearray(b"\r\n")
        self._num_parts = 0

    async def next_part(self) -> tuple[str, str | None] | None:
        """The name of the next field, and the file's name if it is one; None at the end."""
        while await self.read():
            pass
        del self._buffer[: len(self._delimiter)]
        await self._fill(2)
        if self._buffer[:2] == b"--":
            return None
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise bad_request(f"The form has more than {MAX_PARTS} parts.", code="invalid_form")
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise bad_request(f"The head of a part is longer than {MAX_HEAD_BYTES} bytes.", code="invalid_form")
            await self._fill(len(self._buffer) + 1)
        head = message_from_string(self._buffer[2:end].decode("utf-8", "replace"))
        del self._buffer[: end + 4]
        return _parameter(head, "name") or "", _parameter(head, "filename")

    async def read(self) -> bytes:
        """A piece of the part's data; empty at its end."""
        while (end := self._buffer.find(self._delimiter)) < 0 and len(self._buffer) <= len(self._delimiter):
            await self._fill(len(self._buffer) + 1)
        size = end if end >= 0 else len(self._buffer) - len(self._delimiter)
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    async def _fill(self, size: int) -> None:
        """Have at least so many bytes in the buffer."""
        while len(self._buffer) < size:
            try:
                self._buffer += await anext(self._pieces)
            except StopAsyncIteration:
                raise bad_request("The form ends before its last boundary.", code="invalid_form") from None


async def read_form(
    form: FormReader, write: Callable[[bytes], Awaitable[None]], limit: int, setting: str, field_limit: int
) -> tuple[str, dict[str, list[str]]]:
    """A form with one file: its name, and the texts of the other fields. The file's pieces go to `write` as they come.

    Args:
        limit: bytes that the file may have; `setting` changes it. `field_limit`: of another field.

    Raises:
        HTTPError: a 400 with the field at fault, or a 413 for a file that is too large.
    """
    filename: str | None = None
    fields: dict[str, list[str]] = {}
    while (part := await form.next_part()) is not None:
        name, given = part
        is_file, size, value = name == "file", 0, bytearray()
        if is_file and given is None:
            raise bad_field("file", "it has no file name: send it as a file.")
        if is_file and filename is not None:
            raise bad_field("file", "the form has more than one.")
        while piece := await form.read():
            size += len(piece)
            if is_file and size > limit:
                message = f"file: it is larger than {limit} bytes ({setting})."
                raise HTTPError(413, message, param="file", code="file_too_large", headers={"connection": "close"})
            if not is_file and size > field_limit:
                raise bad_field(name[:60], f"longer than {field_limit} bytes.")
            if is_file:
                await write(piece)
            else:
                value += piece
        if is_file:
            filename = given
        else:
            fields.setdefault(name.removesuffix("[]"), []).append(value.decode("utf-8", "replace"))
    if filename is None:
        raise bad_field("file", "the form has no such part.")
    return filename, fields


def _parameter(head: Message, name: str) -> str | None:
    value = head.get_param(name, header="content-disposition")
    return value[2] if isinstance(value, tuple) else value
