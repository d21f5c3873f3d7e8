"""Image files as clients may send them: odd ones that are honest, and ones that are broken or dangerous; and how to spoil any."""

import io
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from PIL import Image, features

Pixels = npt.NDArray[np.uint8]


def file_of(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    """An image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2, body: bytes = b"") -> bytes:
    """A PNG file, as its head describes it, whatever its body has."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *chunks, chunk(b"IDAT", zlib.compress(body)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def honest(pixels: Pixels) -> Iterator[tuple[str, bytes, Pixels | None]]:
    """Name, file and the pixels that it means (None: a file that loses some)."""
    image, grey = Image.fromarray(pixels), pixels[:, :, 0]
    frames = [Image.fromarray(np.full_like(pixels, value)) for value in (0, 255, 128)]
    for kind in ("gif", "png", "webp"):
        options: dict[str, object] = {"lossless": True} if kind == "webp" else {}
        moving = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        yield f"animated {kind}", moving, np.zeros_like(pixels)
    exif = Image.Exif()
    for orientation, times in ((3, 2), (6, 1), (8, 3)):
        exif[0x0112] = orientation
        yield f"turned {orientation}", file_of(Image.fromarray(np.rot90(pixels, times)), exif=exif), pixels
    yield "cmyk", file_of(image.convert("CMYK"), "jpeg"), None
    yield "cmyk tiff", file_of(image.convert("CMYK"), "tiff"), pixels
    yield "progressive", file_of(image, "jpeg", progressive=True), None
    wide = (grey.astype(np.uint16) * 257).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    three = np.repeat(grey[:, :, None], 3, axis=2)
    yield "16-bit grey", png(grey.shape[1], grey.shape[0], depth=16, colour=0, body=rows), three
    rows = b"".join(b"\0" + row.tobytes() for row in (pixels.astype(np.uint16) * 257).astype(">u2"))
    yield "16-bit colours", png(grey.shape[1], grey.shape[0], depth=16, body=rows), pixels
    palette = Image.fromarray((np.arange(grey.size) % 2).reshape(grey.shape).astype(np.uint8), "P")
    palette.putpalette([0, 0, 0, 10, 20, 30])
    seen = np.where(np.asarray(palette)[:, :, None] == 0, 255, np.array([10, 20, 30])).astype(np.uint8)
    for kind in ("png", "gif"):
        yield f"palette with transparency as {kind}", file_of(palette, kind, transparency=0), seen
    yield "one bit", file_of(Image.fromarray(grey).convert("1", dither=Image.Dither.NONE)), None
    yield "one pixel", file_of(image.crop((0, 0, 1, 1))), pixels[:1, :1]
    yield "a line", file_of(image.crop((0, 0, grey.shape[1], 1))), pixels[:1]
    if features.check("avif"):
        yield "avif", file_of(image, "avif"), None


def dishonest(pixels: Pixels) -> Iterator[tuple[str, bytes]]:
    """Name and file of what is to be refused."""
    whole, zeros = file_of(Image.fromarray(pixels)), zlib.compress(bytes(1 << 26))
    yield "nothing", b""
    yield "a text", b"an image"
    yield "a page", b"<html><img src='file:///etc/passwd'></html>"
    yield "a drawing", b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    yield "a program for a printer", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    for kind in ("png", "jpeg", "webp", "bmp", "tiff"):
        yield f"half of a {kind}", (data := file_of(Image.fromarray(pixels), kind))[: len(data) // 2]
    yield "1 x 10,000", file_of(Image.new("RGB", (1, 10000)))
    yield "10,000 x 1", file_of(Image.new("RGB", (10000, 1)))
    yield "72 million pixels", file_of(Image.new("L", (9000, 8000)))
    yield "a claim of 900 million pixels", png(30000, 30000)
    yield "a gif's claim", b"GIF89a" + struct.pack("<HH", 65535, 65535) + whole[20:]
    yield "a bmp's claim", b"BM" + struct.pack("<IIIIiiHH", 99, 0, 54, 40, 60000, 60000, 1, 24) + bytes(24)
    yield "a picture map's claim", b"P6 60000 60000 255\n" + bytes(99)
    yield "a text that unpacks", png(1, 1, chunk(b"zTXt", b"a\0\0" + zeros))
    yield "a profile that unpacks", png(1, 1, chunk(b"iCCP", b"a\0\0" + zeros))
    yield "a foreign text that unpacks", png(1, 1, chunk(b"iTXt", b"a\0\1\0\0\0" + zeros))


def spoilt(files: list[bytes], seed: int) -> bytes:
    """One of the files with bytes that are changed, left out or repeated."""
    draw = np.random.default_rng(seed)
    data = bytearray(files[int(draw.integers(len(files)))])
    changes: list[Callable[[int], None]] = [
        lambda at: data.__setitem__(at, int(draw.integers(256))),
        lambda at: data.__delitem__(slice(at, at + int(draw.integers(1, 30)))),
        lambda at: data.__setitem__(slice(at, at), data[at : at + int(draw.integers(1, 30))]),
        lambda at: data.__delitem__(slice(at, None)),
    ]
    for _ in range(int(draw.integers(1, 8))):
        changes[int(draw.integers(len(changes)))](int(draw.integers(len(data))))
        data = data or bytearray(b"\0")
    return bytes(data)
