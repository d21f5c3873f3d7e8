"""Image files of clients as pixels: every kind that is honest, and none that is dangerous."""

import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from tests.oracles.odd_images import chunk, file_of, png
from tests.oracles.tiny_vision import draw_image

from quire.config import limits
from quire.errors import RequestError
from quire.multimodal import image_files
from quire.multimodal.content import read_image, require_library
from quire.multimodal.image_files import PixelBudget, decode_image
from quire.multimodal.web_fetch import MediaError

PIXELS = draw_image(3, 24, 36)


def decode(data):
    return decode_image(data, PixelBudget())


@pytest.mark.parametrize("kind", ["png", "bmp", "tiff", "webp", "ppm"])
def test_files_without_loss_are_their_pixels(kind):
    assert (
        decode(file_of(Image.fromarray(PIXELS), kind, **({"lossless": True} if kind == "webp" else {}))) == PIXELS
    ).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_data_say(orientation):
    image = Image.fromarray(PIXELS)
    exif = Image.Exif()
    exif[0x0112] = orientation
    decoded = decode(file_of(image, exif=exif))
    image.getexif()[0x0112] = orientation
    assert (decoded == np.asarray(ImageOps.exif_transpose(image))).all()
    assert decoded.shape[:2] == ((24, 36) if orientation < 5 else (36, 24))


@pytest.mark.parametrize("kind", ["gif", "png", "webp"])
def test_of_an_animation_the_first_frame_is_read(kind):
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (0, 255, 128)]
    options = {"lossless": True} if kind == "webp" else {}
    assert not decode(file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)).any()


@pytest.mark.parametrize(("dtype", "scale"), [("uint8", 1), (">u2", 257), ("<u2", 257)])
def test_grey_images_of_16_bits_keep_their_shades(dtype, scale):
    shades = np.arange(256, dtype=np.uint16).reshape(16, 16)
    image = Image.fromarray((shades * scale).astype(dtype))
    assert (read_image(image, "it")[:, :, 0] == shades).all()
    if scale > 1:
        body = b"".join(b"\0" + row.tobytes() for row in (shades * scale).astype(">u2"))
        assert (decode(png(16, 16, depth=16, colour=0, body=body)) == shades[:, :, None]).all()


def test_what_is_transparent_is_white():
    clear = np.dstack([np.zeros((4, 4, 3), np.uint8), np.array([0, 255] * 8, np.uint8).reshape(4, 4)])
    for image in (Image.fromarray(clear), Image.fromarray(clear).convert("LA")):
        pixels = decode(file_of(image))
        assert (pixels[:, ::2] == 255).all() and (pixels[:, 1::2] == 0).all()
        assert (read_image(image, "it") == pixels).all()
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert decode(file_of(palette, transparency=0)).tolist() == [[[255] * 3, [10, 20, 30]]]


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LAB", "HSV", "RGBA", "LA", "I", "F"])
def test_every_mode_becomes_red_green_and_blue(mode):
    pixels = read_image(Image.fromarray(PIXELS).convert("L" if mode == "LA" else "RGB").convert(mode), "it")
    assert pixels.shape == (24, 36, 3) and pixels.dtype == np.uint8
    if mode in ("CMYK", "RGBA"):
        assert (pixels == PIXELS).all()


def test_a_cmyk_file_is_read():
    assert decode(file_of(Image.fromarray(PIXELS).convert("CMYK"), "jpeg", quality=95)).shape == PIXELS.shape


@pytest.mark.parametrize(
    ("width", "height", "is_read"), [(1, 1, True), (200, 1, True), (1, 201, False), (10000, 1, False)]
)
def test_an_image_may_be_long_but_not_a_thread(width, height, is_read):
    image = Image.new("RGB", (width, height), "red")
    if is_read:
        assert decode(file_of(image)).shape == (height, width, 3)
        return
    for read in (lambda: decode(file_of(image)), lambda: read_image(image, "it")):
        with pytest.raises((MediaError, RequestError), match="one side may be at most 200 times the other"):
            read()


ZEROS = zlib.compress(bytes(1 << 26), 1)
BOMBS = {
    "pixels": (png(30000, 30000), "at most 67108864 are allowed|decompression bomb"),
    "a few pixels too many": (png(8193, 8192), "at most 67108864 are allowed"),
    "a text": (png(1, 1, chunk(b"zTXt", b"a\0\0" + ZEROS)), "cannot be decoded"),
    "an international text": (
        png(1, 1, chunk(b"iTXt", b"a\0\1\0\0\0" + ZEROS)),
        "cannot be decoded",
    ),
    "a colour profile": (png(1, 1, chunk(b"iCCP", b"a\0\0" + ZEROS)), "cannot be decoded"),
    "a drawing in PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
    "nothing": (b"", "cannot be decoded"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_takes_no_memory(name):
    import tracemalloc

    data, why = BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match=why):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_all_images_of_a_request_share_a_bound_of_pixels():
    budget = PixelBudget(2 * PIXELS[:, :, 0].size)
    data = file_of(Image.fromarray(PIXELS))
    for _ in range(2):
        decode_image(data, budget)
    with pytest.raises(MediaError, match="more than 1728 pixels together"):
        decode_image(data, budget)
    assert limits.MAX_REQUEST_PIXELS >= limits.MAX_IMAGE_PIXELS


@pytest.mark.parametrize("kind", ["png", "jpeg", "gif", "webp", "bmp", "tiff"])
def test_a_broken_file_is_an_error_in_words_or_an_image(kind):
    """Bytes are changed, left out and repeated, from seeds."""
    whole = file_of(Image.fromarray(PIXELS), kind)
    for seed in range(60):
        draw = np.random.default_rng(seed)
        data = bytearray(whole)
        for _ in range(int(draw.integers(1, 8))):
            at = int(draw.integers(len(data)))
            match draw.integers(3):
                case 0:
                    data[at] = int(draw.integers(256))
                case 1:
                    del data[at : at + int(draw.integers(1, 30))]
                case _:
                    data[at:at] = data[at : at + int(draw.integers(1, 30))]
            data = data or bytearray(b"\0")
        try:
            assert decode(bytes(data)).ndim == 3
        except MediaError as error:
            assert str(error)


def test_one_open_file_is_read_by_several_threads(tmp_path: Path) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)).save(tmp_path / "it.png")
    for _ in range(20):
        image = Image.open(tmp_path / "it.png")
        with ThreadPoolExecutor(4) as threads:
            first, *others = threads.map(lambda _, image=image: read_image(image, "it"), range(4))
        assert all((each == first).all() for each in others)


@pytest.mark.parametrize(("extra", "media"), [("vision", "images"), ("video", "video files"), ("audio", "sounds")])
def test_a_library_that_is_absent_is_named_with_the_command_that_installs_it(extra: str, media: str) -> None:
    with pytest.raises(RequestError, match=f"{media} need the package no_such_library .*pip install"):
        require_library("no_such_library", extra)


def test_without_pillow_an_image_file_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    image_files._formats.cache_clear()
    with pytest.raises(RequestError, match=r"pip install .*pillow"):
        decode_image(b"x", PixelBudget())
