"""Video files of clients, as some of their frames.

PyAV (FFmpeg) reads them from memory. What a file claims of itself is not believed: its packets are counted, and the frames that
are wanted are decoded, each from the last key frame before it. Knows files of videos and their dangers; knows no model.
"""

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from quire.config import limits
from quire.config.multimodal import VideoReading
from quire.errors import RequestError
from quire.multimodal.content import require_library
from quire.multimodal.image_files import PixelBudget, decode_base64, decode_image
from quire.multimodal.video import Frames, Video, evenly
from quire.multimodal.web_fetch import MediaError

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,gif,ogg,asf"
"""FFmpeg's names of the formats that are read: none that names other files (playlists)."""
PICTURES = "data:video/jpeg;base64,"
"""How vLLM's clients send a video as pictures: base64 of each JPEG, with commas between them."""
_INDEXED = ("mp4", "matroska", "avi")
"""Formats that can be entered at a key frame's own time; files of others are decoded from their beginning."""
_COVER = 0x400
"""FFmpeg's flag of a stream that is no video but a sound's cover."""


def reading_of(usual: VideoReading, media_io_kwargs: Any) -> VideoReading:
    """Which frames a request wants. Raises RequestError: its `media_io_kwargs` are no options."""
    try:
        return usual.but(media_io_kwargs)
    except ValueError as error:
        raise RequestError(f"media_io_kwargs: {error}", param="media_io_kwargs") from None


class _Packet(NamedTuple):
    stamp: int
    is_key: bool


def decode_video(data: bytes, budget: PixelBudget, reading: VideoReading) -> Video:
    """Some of a file's frames, turned as it says; of a file that breaks off those that are there.
    Raises MediaError: it is no video, has no frame that can be decoded, or is too large."""
    library = require_library("av", "video")
    try:
        with _open(library, data) as container:
            rate, packets = _list_packets(_pictures_of(container))
        count = reading.count(len(packets), len(packets) / rate if rate else 0.0)
        if count > limits.MAX_VIDEO_FRAMES:
            raise MediaError(f"{count} of its frames are wanted, and at most {limits.MAX_VIDEO_FRAMES} can be read")
        places = evenly(len(packets), count)
        with _open(library, data) as container:
            frames = list(_decode(library, _pictures_of(container), packets, places.tolist(), budget))
    except (MediaError, RequestError) as error:
        raise MediaError(str(error)) from None
    except Exception as error:  # whatever a decoder of foreign bytes raises
        why = getattr(error, "strerror", None) or type(error).__name__
        raise MediaError(f"it cannot be read as video ({why}); send MP4, WebM, MKV, AVI or GIF") from None
    if not frames:
        raise MediaError("none of its frames can be decoded")
    return Video(np.stack(frames), places[: len(frames)], rate, len(packets), count == len(packets))


def _open(library: ModuleType, data: bytes) -> Any:
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    return library.open(io.BytesIO(data), container_options=options, io_open=_refuse)


def _refuse(url: str, flags: int, options: Any) -> Any:
    raise MediaError("it names other files")


def _pictures_of(container: Any) -> Any:
    """The file's first stream of pictures."""
    for stream in container.streams.video:
        if not int(stream.disposition) & _COVER:
            stream.codec_context.thread_count = 1  # several files are decoded at once
            stream.codec_context.options = {"max_pixels": str(limits.MAX_IMAGE_PIXELS)}
            return stream
    raise MediaError("it has no pictures")


def _list_packets(stream: Any) -> tuple[float | None, list[_Packet]]:
    """How many frames a second there are, and what each is in, in the order of their times."""
    packets: list[_Packet] = []
    with contextlib.suppress(OSError, ValueError):  # of a file that breaks off: what is there
        for packet in stream.container.demux(stream):
            if packet.size and (stamp := _stamp(packet)) is not None:
                packets.append(_Packet(stamp, packet.is_keyframe))
            if len(packets) > limits.MAX_VIDEO_PACKETS:
                break
    if not 0 < len(packets) <= limits.MAX_VIDEO_PACKETS:
        raise MediaError(f"it has more than {limits.MAX_VIDEO_PACKETS} frames" if packets else "it has no frames")
    packets.sort()
    rate = float(stream.average_rate or 0)
    return (rate if 0 < rate < 1000 else None), packets


def _stamp(given: Any) -> int | None:
    """The time of a packet or a frame, in the stream's own unit."""
    return given.pts if given.pts is not None else given.dts


def _decode(
    library: ModuleType, stream: Any, packets: Sequence[_Packet], places: Sequence[int], budget: PixelBudget
) -> Iterator[Frames]:
    """The frames at these places; fewer where the decoder gives no more."""
    is_indexed = any(name in stream.container.format.name for name in _INDEXED)
    keys = [packet.stamp for packet in packets if packet.is_key] if is_indexed else []
    last, at, deadline = packets[0].stamp, 0, time.monotonic() + limits.MAX_VIDEO_SECONDS
    frames: Iterator[Any] = stream.container.decode(stream)
    size: tuple[int, int] | None = None
    for place in places:
        wanted = packets[place].stamp
        while at < len(keys) and keys[at] <= wanted:
            at += 1
        if at and keys[at - 1] > last:
            stream.container.seek(keys[at - 1], stream=stream)
            frames = stream.container.decode(stream)
        while True:
            if time.monotonic() > deadline:
                raise MediaError(f"decoding it takes longer than {limits.MAX_VIDEO_SECONDS:g} s")
            try:
                frame = next(frames)
            except (StopIteration, library.FFmpegError):
                return
            stamp = _stamp(frame)
            last = last if stamp is None else stamp
            if stamp is None or stamp >= wanted:
                break
        size = size or (frame.width, frame.height)
        budget.take(size[0] * size[1])
        pixels = frame.to_ndarray(format="rgb24", width=size[0], height=size[1])
        yield np.rot90(pixels, round(frame.rotation / 90))


def read_pictures(url: str, budget: PixelBudget) -> Video:
    """A video that is sent as pictures (`PICTURES`), of which nobody tells the times. Raises MediaError: one cannot be read."""
    texts = url.removeprefix(PICTURES).split(",", limits.MAX_VIDEO_FRAMES)
    frames = [decode_image(decode_base64(text), budget) for text in texts]
    if len(frames) > limits.MAX_VIDEO_FRAMES or len({frame.shape for frame in frames}) > 1:
        raise MediaError(f"its pictures have several sizes, or are more than {limits.MAX_VIDEO_FRAMES}")
    return Video(np.stack(frames), np.arange(len(frames)), None, len(frames))
