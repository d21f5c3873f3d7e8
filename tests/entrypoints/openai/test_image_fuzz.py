"""Images of every kind against a running server that knows no client: what is honest is read, everything else is a 400 that names
its part, texts beside it are answered as if nothing were, nothing private is asked, and memory returns.

The server's names are looked up here: `public.test` has a public address behind which this machine answers, and `rebind.test`
has a public one at the first look and this machine's own at the next.
"""

import base64
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.oracles.media_server import MediaServer, answer, redirect
from tests.oracles.odd_images import dishonest, file_of, honest, spoilt
from tests.oracles.server_process import ServerProcess
from tests.oracles.tiny_vision import draw_image, make_tiny_vision

PIXELS = draw_image(5, 40, 31)
NAMES = """
import itertools, os, socket
os.environ["QUIRE_IMAGE_FETCH_TIMEOUT"] = "1"
looked_up, connect, turn = socket.getaddrinfo, socket.create_connection, itertools.count()
def look_up(host, port, *args, **kwargs):
    if host == "rebind.test":
        host = "127.0.0.1" if next(turn) % 2 else "8.8.4.4"
    if host.endswith(".invalid"):
        raise socket.gaierror
    return looked_up("8.8.8.8" if host == "public.test" else host, port, *args, **kwargs)
def reach(address, *args, **kwargs):
    if address[0] == "8.8.4.4":
        raise ConnectionRefusedError
    return connect(("127.0.0.1", address[1]) if address[0] == "8.8.8.8" else address, *args, **kwargs)
socket.getaddrinfo, socket.create_connection = look_up, reach
if __name__ == "__main__":
    from quire.entrypoints.cli.main import main
    main()
"""
PRIVATE = ["127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "[::ffff:127.0.0.1]:{port}", "0.0.0.0:{port}",
           "2130706433:{port}", "0x7f.1:{port}", "10.0.0.1", "192.168.1.1", "169.254.169.254", "[fd00::1]",
           "rebind.test:{port}"]  # fmt: skip


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64," + base64.b64encode(data).decode()


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def drip(peer: socket.socket) -> None:
    """A byte now and then, until the other side goes."""
    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    peer.settimeout(0.1)
    while True:
        with contextlib.suppress(TimeoutError):
            if not peer.recv(1):
                return
        peer.sendall(b"x")


def head(text: str) -> Any:
    return lambda peer: peer.sendall(text.encode())


def endless(first: bytes, piece: bytes) -> Any:
    def send(peer: socket.socket) -> None:
        peer.sendall(first)
        while True:
            peer.sendall(piece)

    return send


@pytest.fixture(scope="module")
def hosts() -> Iterator[MediaServer]:
    """What is on the web, some of it bad."""
    image, piece = file_of(Image.fromarray(PIXELS)), b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    served: dict[str, Any] = {
        "/good": answer(image, Content_Type="text/html"),
        "/moved": redirect("/good"),
        "/bad/page": answer(b"<html>", Content_Type="image/png"),
        "/bad/gone": answer(b"", "404 Not Found"),
        "/bad/broken": answer(b"", "500 Internal Server Error"),
        "/bad/loop": redirect("/bad/loop"),
        "/bad/packed": answer(image, Content_Encoding="gzip"),
        "/bad/short": answer(image, Content_Length=str(len(image) + 9)),
        "/bad/huge": answer(b"", Content_Length=str(1 << 40)),
        "/bad/endless": endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", piece),
        "/bad/endless-head": endless(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        "/bad/line": endless(b"HTTP/1.1 200 OK\r\na: ", b"b" * 1000),
        "/bad/chunks": head("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        "/bad/no-http": head("SSH-2.0-OpenSSH\r\n"),
        "/bad/silent": lambda peer: None,
        "/bad/slow": drip,
        "/secret": answer(image),
    }
    with MediaServer(served) as server:
        places = [place.format(port=server.port) for place in PRIVATE]
        targets = [f"http://{place}/secret" for place in places] + ["file:///etc/passwd", "gopher://a", "//", "http://"]
        served |= {f"/bad/to/{index}": redirect(target) for index, target in enumerate(targets)}
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_vision("LlavaForConditionalGeneration", tmp_path_factory.mktemp("vision"))
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "512", "--cpu-threads", "1"]
    (script := tmp_path_factory.mktemp("names") / "names.py").write_text(NAMES)
    server = ServerProcess(str(script), "serve", *flags, "--kv-cache-memory-bytes", "16M")
    yield server
    server.kill()


class Client:
    """Sends images to a server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self.model = self._http.get("/v1/models").json()["data"][0]["id"]

    def send(self, *parts: Any) -> httpx.Response:
        content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        asked = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 2,
            "temperature": 0,
            "logprobs": True,
        }
        return self._http.post("/v1/chat/completions", json={"model": self.model, "ignore_eos": True, **asked})

    def seen(self, url: str) -> list[float]:
        """What the model makes of an image, as numbers."""
        got = self.send("See", image_part(url))
        assert got.status_code == 200, got.text
        return [each["logprob"] for each in got.json()["choices"][0]["logprobs"]["content"]]

    def refusal(self, part: Any, before: int = 0) -> str:
        """Why a part is refused, which stands behind others; its path must be told."""
        place = f"messages[0].content[{before}]"
        got = self.send(*["a"] * before, part)
        assert got.status_code == 400, (part, got.text)
        error = got.json()["error"]
        assert error["param"].startswith(place) and error["message"], (part, error)
        return error["message"]

    def text(self, stop: threading.Event) -> list[list[int]]:
        """Streams of text, one after the other until told to stop; their token ids."""
        body = {"model": self.model, "prompt": "Tell", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        streams: list[list[int]] = []
        while not streams or not stop.is_set():
            streams.append([])
            with self._http.stream(
                "POST", "/v1/completions", json={**body, "stream": True, "return_token_ids": True}
            ) as got:
                for line in got.iter_lines():
                    if line.startswith("data: {"):
                        streams[-1] += [
                            token for choice in json.loads(line[6:])["choices"] for token in choice["token_ids"]
                        ]
        return streams

    def memory(self) -> float:
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("process_resident_memory_bytes"))


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server.url)


@contextlib.contextmanager
def texts_beside(client: Client) -> Iterator[None]:
    """Texts are streamed meanwhile, and each is as if it were alone."""
    (stop := threading.Event()).set()
    (alone,) = client.text(stop)
    stop.clear()
    with ThreadPoolExecutor(1) as pool:
        streams = pool.submit(client.text, stop)
        try:
            yield
        finally:
            stop.set()
        assert len(alone) == 100 and all(stream == alone for stream in streams.result())


def bad_parts(hosts: MediaServer) -> list[Any]:
    """What is to be refused, as parts of a message."""
    urls: list[Any] = [data_url(data) for _, data in dishonest(PIXELS)]
    good = file_of(Image.fromarray(PIXELS))
    urls += [
        data_url(good, "text/html"),
        data_url(good)[:-3],
        "data:image/png,abc",
        "data:image/png;base64,@@",
        "data:",
        "",
    ]
    urls += [f"http://public.test:{hosts.port}{path}" for path in hosts.files if path.startswith("/bad/")]
    urls += [f"http://{place.format(port=hosts.port)}/secret" for place in PRIVATE]
    urls += [
        "file:///etc/passwd",
        "/etc/passwd",
        "ftp://a/b",
        "http://",
        "http://no-such-host.invalid/",
        "http://a@b/",
        3,
        None,
        [],
        {},
    ]
    parts: list[Any] = [image_part(url) for url in urls]
    for value in ("/etc/passwd", ["/etc/passwd"], 3, {"path": "/etc/passwd"}, [[[1, 2, 3]]], True):
        parts += [{"type": "image", "image": value}, {"type": "image_url", "image_url": value}]
    return parts


def test_odd_images_that_are_honest_are_read_as_what_they_show(client: Client, hosts: MediaServer) -> None:
    for name, data, pixels in honest(PIXELS):
        seen = client.seen(data_url(data, "image/anything"))
        assert pixels is None or seen == client.seen(data_url(file_of(Image.fromarray(pixels)))), name
    plain = client.seen(data_url(file_of(Image.fromarray(PIXELS))))
    assert [client.seen(f"http://public.test:{hosts.port}{path}") for path in ("/good", "/moved")] == [plain] * 2


def test_bad_images_are_refused_by_name_and_disturb_nobody(client: Client, hosts: MediaServer) -> None:
    parts, memory = bad_parts(hosts), []
    with texts_beside(client), ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            places = [index % 5 for index in range(len(parts))]
            reasons = list(pool.map(client.refusal, parts, places))
            memory.append(client.memory())
    assert "/secret" not in hosts.asked and "/bad/slow" in hosts.asked
    assert not any("root:" in reason or " at 0x" in reason for reason in reasons)
    assert 0 < memory[-1] < memory[1] + (64 << 20)


@pytest.mark.parametrize("rounds", [40, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_spoilt_files_are_read_or_refused(client: Client, rounds: int) -> None:
    """A seed each: what still decodes is an image, and the rest is told at its place."""
    files, memory = [data for _, data, _ in honest(PIXELS)], []

    def send(seed: int) -> int:
        got = client.send("a", image_part(data_url(spoilt(files, seed))))
        if got.status_code != 200:
            error = got.json()["error"]
            assert got.status_code == 400 and error["param"] == "messages[0].content[1].image_url", (seed, error)
        return got.status_code

    with texts_beside(client), ThreadPoolExecutor(4) as pool:
        for half in range(2):
            statuses = set(pool.map(send, range(half * rounds, (half + 1) * rounds)))
            memory.append(client.memory())
    assert statuses == {200, 400}
    assert memory[1] < memory[0] + (64 << 20)
