"""Where images, videos and sounds come from that a request names by URL: data in the URL, the web, and files that the operator
opens. And files that `multi_modal_data` names by their paths: for programs that run the engine themselves, never for a server's
clients.

Files are fetched and decoded by a bounded number of threads. Waiting for the network and decoding have threads of their own: slow
hosts hold up nothing that is here already. Knows URLs; knows no message.
"""

import contextvars
import functools
import os
import stat
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from quire import envs
from quire.config import MultiModalConfig, limits
from quire.config.multimodal import VideoReading
from quire.errors import RequestError
from quire.guards import is_mapping
from quire.media import AUDIO, IMAGE, VIDEO
from quire.multimodal.audio import SampleBudget, as_sounds, open_audio
from quire.multimodal.content import PARAM, as_list
from quire.multimodal.image_files import EXAMPLES, NAMES, PixelBudget, decode_image, most_bytes, read_data_url
from quire.multimodal.video import as_videos
from quire.multimodal.video_files import PICTURES, decode_video, read_pictures, reading_of
from quire.multimodal.web_fetch import MediaError, WebFetcher

Parameters = ParamSpec("Parameters")
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")
MAX_DECODERS = 16


Decoders = Mapping[str, Callable[[Any], Any]]
"""What makes an item of a file's bytes, by modality; of a URL, for videos that are sent as pictures (`PICTURES`)."""


def decoders(reading: VideoReading) -> Decoders:
    """Those of one request: its images and frames share a bound, as do its sounds."""
    pixels, samples = PixelBudget(), SampleBudget()
    return {
        IMAGE: lambda data: decode_image(data, pixels),
        VIDEO: lambda data: decode_video(data, pixels, reading),
        PICTURES: lambda url: read_pictures(url, pixels),
        AUDIO: lambda data: open_audio(data, samples),
    }


class MediaSource:
    """Reads images, videos and sounds of URLs.

    Args:
        settings: which hosts and files may be read.
        fetcher: in place of those that the settings describe.

    Attributes:
        video_reading: which frames of videos are read where a request does not say.
    """

    def __init__(self, settings: MultiModalConfig, fetcher: WebFetcher | None = None) -> None:
        self._folder = settings.allowed_local_media_path
        redirects = limits.MAX_MEDIA_REDIRECTS if envs.QUIRE_MEDIA_URL_ALLOW_REDIRECTS else 0
        domains, of_images = settings.allowed_media_domains, envs.QUIRE_IMAGE_FETCH_TIMEOUT
        of_videos = (envs.QUIRE_VIDEO_FETCH_TIMEOUT, limits.MAX_VIDEO_BYTES, redirects)
        self._fetcher = fetcher or WebFetcher(domains, of_images, max_redirects=redirects)
        self._video_fetcher = fetcher or WebFetcher(domains, *of_videos)
        self.video_reading = settings.video_reading
        self._decoders = ThreadPoolExecutor(_num_decoders(), "quire-decode")
        self._fetchers = ThreadPoolExecutor(envs.QUIRE_MEDIA_LOADING_THREAD_COUNT, "quire-fetch")

    def run(
        self, function: Callable[Parameters, ResultT], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> "Future[ResultT]":
        """Call a function in a thread of those that work on images."""
        return self._decoders.submit(function, *args, **kwargs)

    def read(self, url: str, kind: str, decoders: Decoders) -> "Future[Any]":
        """The image, some frames of the video, or the sound and its rate behind a URL. The future raises MediaError: it may
        not be read, or cannot be.

        Args:
            kind: its modality.
        """
        if kind == VIDEO and url.startswith(PICTURES):
            return self.run(decoders[PICTURES], url)
        decode = decoders[kind]
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return self.run(lambda: decode(read_data_url(url, kind)))
        fetch = (self._video_fetcher if kind == VIDEO else self._fetcher).fetch
        getters = {"http": fetch, "https": fetch, "file": functools.partial(self._read_file, most=most_bytes(kind))}
        if (get := getters.get(scheme)) is None:
            return self.run(functools.partial(_refuse, url, kind))
        return self._fetchers.submit(lambda: self.run(decode, get(url)).result())

    def _read_file(self, url: str, most: int) -> bytes:
        """A file below the folder that the operator opens."""
        if not self._folder:
            raise MediaError("no files can be read here: the server has no --allowed-local-media-path")
        parts = urllib.parse.urlsplit(url)
        refused = MediaError("there is no such file below the server's --allowed-local-media-path")
        if parts.netloc not in ("", "localhost"):
            raise refused
        try:
            path = Path(urllib.request.url2pathname(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                raise refused
            # The name may be another file's by now; a pipe without a writer would block.
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise refused
                data = file.read(most + 1)
        except (OSError, ValueError):
            raise refused from None
        if len(data) > most:
            raise MediaError(f"it has more than {most} bytes")
        return data


def in_threads(function: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> list[ResultT]:
    """Call a function that works on images for each of some items, side by side, in the context of who calls; results are in the
    order of the items. Raises what it raised for the first of them that failed."""
    context = contextvars.copy_context()
    with ThreadPoolExecutor(_num_decoders(), "quire-images") as threads:
        return list(threads.map(lambda item: context.copy().run(function, item), items))


def _num_decoders() -> int:
    """Half of the processor's cores: the others are for the engine."""
    cores = os.cpu_count() or 1
    return min(MAX_DECODERS, max(min(cores, 2), cores // 2))


def _refuse(url: str, kind: str) -> Any:
    shown = url[:40] + ("…" if len(url) > 40 else "")
    raise MediaError(f"{shown!r} is not supported; give {NAMES[kind]} as {EXAMPLES[kind]}, or by an https URL")


_LISTS: Mapping[str, Callable[[Any], list[Any]]] = {IMAGE: as_list, VIDEO: as_videos, AUDIO: as_sounds}


OpenMedia = Callable[..., Any]
"""Gives a prompt's media, with what files hold in the place of their paths; it may be told the prompt's `media_io_kwargs`."""


def opener(settings: MultiModalConfig | None) -> OpenMedia:
    """Opens files that a prompt names."""
    usual = VideoReading() if settings is None else settings.video_reading
    return lambda data, io=None: open_named(data, reading_of(usual, io))


def as_given(data: Any, io: Any = None) -> Any:
    """Opens no file."""
    return data


def open_named(data: Any, reading: VideoReading | None = None) -> Any:
    """A prompt's media, with images, videos and sounds in the place of paths (text or `pathlib.Path`).
    Raises RequestError: a file cannot be read."""
    if not is_mapping(data):
        return data
    opened = dict(cast("Mapping[str, Any]", data))
    for modality, listed in _LISTS.items():
        items = listed(opened.get(modality))
        if any(isinstance(item, str | os.PathLike) for item in items):
            decode, most = decoders(reading or VideoReading())[modality], most_bytes(modality)
            opened[modality] = [
                _open(item, f"{modality} {number}", decode, most) if isinstance(item, str | os.PathLike) else item
                for number, item in enumerate(items)
            ]
    return opened


def _open(path: str | os.PathLike[str], where: str, decode: Callable[[bytes], Any], most: int) -> Any:
    try:
        with Path(path).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise MediaError(f"it has more than {most} bytes")
        return decode(content)
    except (OSError, ValueError) as error:  # MediaError is a ValueError, as is what a path with a zero byte raises
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{where} of the prompt: {str(path)[:200]!r} cannot be read: {reason}"
        raise RequestError(message, param=PARAM) from None
