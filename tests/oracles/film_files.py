"""Files of videos, honest and otherwise."""

import io
from collections.abc import Iterator

import av
import numpy as np

FORMATS = {
    "mp4": ("libx264", "mp4"),
    "webm": ("libvpx-vp9", "webm"),
    "mkv": ("mpeg4", "matroska"),
    "avi": ("mpeg4", "avi"),
    "ts": ("libx264", "mpegts"),
}
"""Kinds of files: codec and container."""


def grey_frames(count: int, height: int = 48, width: int = 64) -> np.ndarray:
    """Frames [T, H, W, 3] that can be told apart, whatever a codec does to them: each a shade of grey, its upper half darker."""
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[:] = (np.arange(count) * 97 % 200 + 40).astype(np.uint8)[:, None, None, None]
    frames[:, : height // 2] -= 30
    return frames


def film_file(frames: np.ndarray, kind: str = "mp4", rate: int = 24, group: int = 12, rotation: int = 0) -> bytes:
    """A file of these frames, with a key frame for each group of them."""
    codec, container_format = FORMATS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=container_format) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.codec_context.gop_size, stream.codec_context.bit_rate = "yuv420p", group, 4_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def shades(frames: np.ndarray) -> list[float]:
    """The lower halves' shades, by which frames are told apart."""
    return [float(frame[len(frame) // 2 + 4 :].mean()) for frame in frames]


def sound_file() -> bytes:
    """An MP4 without pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        samples = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        samples.sample_rate = 16000
        container.mux(stream.encode(samples))
        container.mux(stream.encode())
    return file.getvalue()


def bad_films() -> Iterator[tuple[str, bytes]]:
    """What is no video, or cannot be read as one."""
    good = film_file(grey_frames(20))
    yield "empty", b""
    yield "text", b"hello, this is no video at all" * 9
    yield "cut before its index", good[: len(good) // 2]
    yield "only its head", good[:40]
    yield "sound alone", sound_file()
    yield "a playlist", b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    yield "a list of files", b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield "a session", b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 4000 RTP/AVP 96\n"
    yield "noise behind a head", good[:40] + bytes(np.random.default_rng(1).integers(0, 256, 4000, dtype=np.uint8))


def spoilt_film(files: list[bytes], seed: int) -> bytes:
    """One of these files with some bytes changed, left out or doubled."""
    draw = np.random.default_rng(seed)
    data = bytearray(files[seed % len(files)])
    for _ in range(int(draw.integers(1, 12))):
        at, kind = int(draw.integers(0, len(data))), draw.integers(0, 4)
        if kind == 0:
            data[at] = int(draw.integers(0, 256))
        elif kind == 1:
            del data[at : at + int(draw.integers(1, 40))]
        elif kind == 2:
            data[at:at] = data[at : at + int(draw.integers(1, 40))]
        else:
            data[at : at + 4] = b"\xff\xff\xff\xff"
    return bytes(data)
