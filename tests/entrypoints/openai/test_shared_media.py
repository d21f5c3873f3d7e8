"""`quire serve --api-server-count 2` with a model that sees: an image costs once, whichever frontends it comes to."""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.entrypoints.openai.test_image_parts import data_url, image_part, message
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_vision import draw_image, make_tiny_vision

pytestmark = pytest.mark.timeout(180)


class Frontends:
    """Both frontends of a server, asked through the sockets that they have for one another."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        (sockets,) = folder.glob("quire-*")
        paths = [str(sockets / f"http-{number}") for number in range(2)]
        self.server = server
        self.clients = [
            httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://here", timeout=60) for path in paths
        ]

    def ask(self, number: int, *parts: Any) -> httpx.Response:
        body = {"messages": message(*parts, "x"), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return self.clients[number].post("/v1/chat/completions", json=body)

    def counts(self) -> tuple[float, ...]:
        """Items that both were asked for, items that were processed, tokens that the cache of pages gave."""
        text = "".join(client.get("/metrics?own=1").text for client in self.clients)
        names = ("mm_cache_queries_total", "mm_cache_hits_total", "prompt_tokens_cached_total")
        queries, hits, cached = (sum(map(float, re.findall(rf"quire:{name}\{{.*?\}} (\S+)", text))) for name in names)
        return queries, queries - hits, cached


@pytest.fixture(scope="module")
def frontends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontends]:
    model = make_tiny_vision("LlavaForConditionalGeneration", tmp_path_factory.mktemp("vision"))
    flags = ["--max-model-len", "256", "--cpu-threads", "1", "--kv-cache-memory-bytes", "16M"]
    with tempfile.TemporaryDirectory(prefix="q") as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("QUIRE_RPC_BASE_PATH", folder)  # sockets have short names
        server = ServerProcess(*SERVE, "--model", str(model), "--port", "0", "--api-server-count", "2", *flags)
        yield Frontends(server, Path(folder))
        server.kill()


def answer_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_an_image_that_both_frontends_get_is_processed_once(frontends: Frontends) -> None:
    image = image_part(data_url(draw_image(1, 40, 31)))
    queries, processed, cached = frontends.counts()
    first = answer_of(frontends.ask(0, image))
    assert frontends.counts() == (queries + 1, processed + 1, cached)
    assert answer_of(frontends.ask(1, image)) == first
    assert frontends.counts()[:2] == (queries + 2, processed + 1)
    assert frontends.counts()[2] > cached  # pages are known by the image's content, not by who has sent it


def test_an_image_that_one_frontend_was_given_may_be_named_to_the_other(frontends: Frontends) -> None:
    named = {**image_part(data_url(draw_image(2, 40, 31))), "uuid": "cat"}
    first = answer_of(frontends.ask(0, named))
    assert answer_of(frontends.ask(1, {"type": "image_url", "image_url": None, "uuid": "cat"})) == first
    unknown = frontends.ask(1, {"type": "image_url", "image_url": None, "uuid": "dog"})
    assert unknown.status_code == 400 and "not known" in unknown.text


def test_the_cache_ends_with_a_server_that_is_killed(frontends: Frontends) -> None:
    answer_of(frontends.ask(0, image_part(data_url(draw_image(3, 40, 31)))))
    folders = set[Path]()
    for each in Path(f"/proc/{frontends.server.popen.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            folders.add(Path(os.readlink(each)))
    (folder,) = (each for each in folders if each.name.startswith("quire-media-"))
    assert list(folder.glob("??/*")) and folder.stat().st_mode & 0o777 == 0o700
    frontends.server.kill()
    while folder.exists():
        time.sleep(0.01)
