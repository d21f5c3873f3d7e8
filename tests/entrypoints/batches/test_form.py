"""Forms with files, in pieces of any size: what the client's library wrote is read."""

import random
from collections.abc import AsyncIterator

import httpx
import pytest

from quire.entrypoints.http.errors import HTTPError
from quire.entrypoints.http.form import MAX_HEAD_BYTES, FormReader

pytestmark = pytest.mark.anyio
BODIES = (b"", b"x", b"\r\n", b"--", b"\r\n--x", b"\r\n\r\n--x--\r\n", bytes(range(256)) * 9, b"\r" * 300)


async def pieces(body: bytes, random_: random.Random | None = None) -> AsyncIterator[bytes]:
    while body:
        size = random_.choice((0, 1, 2, 7, 60, 500)) if random_ else len(body)
        yield body[:size]
        body = body[size:]


async def read(reader: FormReader) -> list[tuple[str, str | None, bytes]]:
    found: list[tuple[str, str | None, bytes]] = []
    while (part := await reader.next_part()) is not None:
        data = b""
        while piece := await reader.read():
            data += piece
        found.append((*part, data))
    return found


@pytest.mark.parametrize("seed", range(20))
async def test_what_was_written_is_read_in_pieces_of_any_size(seed: int) -> None:
    random_ = random.Random(seed)
    texts = {f"field[{number}]": random_.choice(("", "ü", "a b\r\nc")) for number in range(random_.randrange(4))}
    files = [("file", (name, random_.choice(BODIES))) for name in ("a", "é.jsonl", "../x")[: random_.randrange(1, 4)]]
    request = httpx.Request("POST", "http://x", data=texts, files=files)
    reader = FormReader(request.headers["content-type"], pieces(request.read(), random_))
    written = [(name, None, text.encode()) for name, text in texts.items()]
    assert await read(reader) == [*written, *((name, *file) for name, file in files)]


async def test_a_part_may_be_passed_over() -> None:
    request = httpx.Request("POST", "http://x", data={"a": "1", "b": "2"}, files={"c": ("n", b"3")})
    reader = FormReader(request.headers["content-type"], pieces(request.read()))
    assert await reader.next_part() == ("a", None) and await reader.next_part() == ("b", None)
    assert await reader.read() == b"2" and await reader.read() == b""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "ends before"),
        (b"--x\r\ncontent-disposition: form-data; name=a\r\n\r\nabc", "ends before"),
        (b"--x\r\n" + b"a" * 2 * MAX_HEAD_BYTES, "head of a part"),
        (b"--x\r\na: b\r\n\r\n\r\n" * 40 + b"--x--", "more than 32 parts"),
    ],
    ids=["empty", "torn", "long head", "many parts"],
)
async def test_what_is_no_form_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(HTTPError, match=words) as refused:
        await read(FormReader("multipart/form-data; boundary=x", pieces(body)))
    assert refused.value.status == 400


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
async def test_another_type_is_refused(kind: str) -> None:
    with pytest.raises(HTTPError, match="multipart/form-data"):
        FormReader(kind, pieces(b""))
