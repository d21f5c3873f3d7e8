"""Images by URL: data, files below the operator's folder, and the web."""

import base64
import io
import os

import pytest
from PIL import Image
from tests.oracles.media_server import MediaServer, answer
from tests.oracles.tiny_vision import draw_image

from quire.config import MultiModalConfig
from quire.config.multimodal import VideoReading
from quire.media import IMAGE
from quire.multimodal.media_source import MediaSource, decoders
from quire.multimodal.web_fetch import MediaError

PIXELS = draw_image(7, 20, 30)


@pytest.fixture(scope="module")
def png():
    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "png")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path, png):
    (tmp_path / "open" / "deep").mkdir(parents=True)
    for name in ("open/one.png", "open/deep/two ä.png", "secret.png"):
        (tmp_path / name).write_bytes(png)
    return tmp_path


def make_source(**settings):
    return MediaSource(MultiModalConfig(**settings))


def read(source, url):
    return source.read(url, IMAGE, decoders(VideoReading())).result(60)


def test_an_image_in_a_url_is_read(png):
    text = base64.b64encode(png).decode()
    for url in (f"data:image/png;base64,{text}", f"DATA:IMAGE/JPEG;BASE64,{text}", f"data:image/png;a=b;base64,{text}"):
        assert (read(make_source(), url) == PIXELS).all()


def test_files_below_the_folder_are_read(folder):
    source = make_source(allowed_local_media_path=str(folder / "open"))
    for name in ("one.png", "deep/two ä.png", "deep/two%20%C3%A4.png", "deep/../one.png"):
        assert (read(source, f"file://{folder}/open/{name}") == PIXELS).all()
    assert (read(source, f"file://localhost{folder}/open/one.png") == PIXELS).all()


def test_no_other_file_is_read_and_none_is_told_of(folder):
    (folder / "open" / "link.png").symlink_to(folder / "secret.png")
    (folder / "open-too").mkdir()
    (folder / "open-too" / "one.png").write_bytes((folder / "secret.png").read_bytes())
    os.mkfifo(folder / "open" / "pipe")
    names = [
        "missing.png",
        "link.png",
        "../secret.png",
        "%2e%2e/secret.png",
        "../open-too/one.png",
        "pipe",
        "deep",
        "a%00b",
    ]
    urls = [f"file://{folder}/open/{name}" for name in names]
    urls += ["file:///etc/passwd", f"file://other.test{folder}/open/one.png", "file:", f"file:{'/x' * 5000}"]
    source = make_source(allowed_local_media_path=str(folder / "open"))
    for url in urls:
        with pytest.raises(MediaError, match="there is no such file below the server's --allowed-local-media-path"):
            read(source, url)


def test_no_file_is_read_without_a_folder(folder):
    with pytest.raises(MediaError, match="has no --allowed-local-media-path"):
        read(make_source(), f"file://{folder}/open/one.png")


def test_the_web_is_asked_for_the_others(png):
    with MediaServer({"/one.png": answer(png), "/page": answer(b"<html>")}) as server:
        source = make_source(allowed_media_domains=("127.0.0.1",))
        assert (read(source, f"{server.url}/one.png") == PIXELS).all()
        assert (read(source, f"HTTP{server.url[4:]}/one.png") == PIXELS).all()
        with pytest.raises(MediaError, match="cannot be decoded"):
            read(source, f"{server.url}/page")
        with pytest.raises(MediaError, match="not one of the public internet"):
            read(make_source(), f"{server.url}/one.png")


@pytest.mark.parametrize("url", ["ftp://a/b", "gopher://a", "javascript:1", "one.png", "", "/etc/passwd"])
def test_another_kind_of_url_is_refused(url):
    with pytest.raises(
        MediaError, match="is not supported; give an image as data:image/png;base64,…, or by an https URL"
    ):
        read(make_source(), url)


def test_hosts_that_do_not_answer_hold_up_no_image_that_is_here(png):
    import threading

    release = threading.Event()
    with MediaServer({"/slow": lambda peer: release.wait(60)}) as server:
        source = make_source(allowed_media_domains=("127.0.0.1",))
        waiting = [source.read(f"{server.url}/slow", IMAGE, decoders(VideoReading())) for _ in range(20)]
        assert (read(source, "data:image/png;base64," + base64.b64encode(png).decode()) == PIXELS).all()
        release.set()
        for one in waiting:
            with pytest.raises(MediaError):
                one.result(60)
