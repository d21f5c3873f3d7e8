"""What users give as images, as arrays of one kind, and the hash of an array's content.

Knows pixels. Knows no model, no file and no network.
"""

import hashlib
import importlib
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire.config import limits
from quire.errors import RequestError
from quire.extras import install_command
from quire.guards import is_sequence

Pixels = npt.NDArray[np.uint8]
"""[H, W, 3], red, green and blue."""
DIGEST_SIZE = 16
"""Bytes of a content's hash: 128 bits of a cryptographic hash, so that nobody finds two contents with one key."""
PARAM = "multi_modal_data"
WANTED = {
    "image": "a PIL image, or an array or tensor of bytes (uint8) with the shape [height, width, 3]",
    "video": "bytes (uint8) with the shape [frames, height, width, 3], or a list of pictures of one size, "
    "or a pair of these and a dict",
    "sound": "an array or tensor of samples, or a pair of these and their rate",
}
"""What programs may give."""
_LOADING = [threading.Lock() for _ in range(64)]
"""Pillow reads an open file when its pixels are first asked for, which two threads must not do at once."""


def require_library(name: str, extra: str) -> ModuleType:
    """A library that media need, of the extra that names it.
    Raises RequestError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        media = {"vision": "images", "video": "video files", "audio": "sounds"}[extra]
        message = f"{media} need the package {name} ({error}); install it with: {install_command(extra)}"
        raise RequestError(message, param=PARAM) from error


def as_list(given: Any) -> list[Any]:
    """One item or several as a list; an array of four dimensions is several."""
    if isinstance(given, list | tuple):
        return list(cast("Sequence[Any]", given))
    if getattr(given, "ndim", 0) == 4:
        return list(given)
    return [given]


def read_image(given: Any, where: str) -> Pixels:
    """An image as pixels: a PIL image of any mode, or an array or tensor of bytes [H, W, 3], [3, H, W] or [H, W]. What is
    transparent is white.

    Args:
        where: the item's name, for errors.

    Raises:
        RequestError: it is none of these.
    """
    if hasattr(given, "convert") and hasattr(given, "getexif"):  # PIL's
        with _LOADING[id(given) // 16 % len(_LOADING)]:
            given.load()
        return _checked(_red_green_blue(given), where)
    if hasattr(given, "detach"):  # a tensor, wherever it is
        given = given.detach().cpu().numpy()
    if not isinstance(given, np.ndarray):
        raise refusal("image", where, f"it is a {type(given).__name__}")
    array = cast("npt.NDArray[Any]", given)
    if array.dtype != np.uint8:
        raise refusal("image", where, f"its numbers are {array.dtype}")
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    return _checked(array, where)


def _red_green_blue(image: Any) -> Pixels:
    """A PIL image's pixels. Pillow itself cuts numbers of 16 bits off at 255, and shows what lies below transparency."""
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.float64)
        if image.mode != "I" or values.max(initial=0) > 255:
            values = values / 257
        return np.repeat(values.clip(0, 255).round().astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        from PIL import Image

        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"), dtype=np.uint8)


def _checked(array: npt.NDArray[Any], where: str) -> Pixels:
    if array.ndim != 3 or array.shape[2] != 3 or not array.size:
        raise refusal("image", where, f"its shape is {list(array.shape)}")
    height, width = array.shape[:2]
    if max(height, width) > limits.MAX_IMAGE_ASPECT * min(height, width):
        raise RequestError(
            f"{where} is {width} x {height}: one side may be at most {limits.MAX_IMAGE_ASPECT} times the other",
            param=PARAM,
        )
    return np.ascontiguousarray(array)


def refusal(what: str, where: str, why: str) -> RequestError:
    """The error for an item that is none of what its kind may be; `where`: the item's name."""
    return RequestError(f"{where} is no {what}: {why}; it must be {WANTED[what]}", param=PARAM)


def content_key(pixels: npt.NDArray[Any], options: bytes) -> str:
    """The name of an image's content, and of what is done with it."""
    digest = hashlib.blake2b(options, digest_size=DIGEST_SIZE)
    digest.update(repr(pixels.shape).encode())
    digest.update(pixels.data)
    return digest.hexdigest()


def name_key(uuid: str, options: bytes) -> str:
    """The name of a content that the user names, and of what is done with it."""
    return content_key(np.frombuffer(uuid.encode(), np.uint8), b"uuid" + options)


def read_uuids(given: Any, modality: str, count: int) -> list[str | None]:
    """The names that the user gives to items in place of the hashes of their content.

    Raises:
        RequestError: not one name, or None, for each.
    """
    uuids = given.get(modality) if isinstance(given, dict) else given  # type: ignore[reportUnknownMemberType]
    if uuids is None:
        return [None] * count
    names: list[Any] = list(cast("Sequence[Any]", uuids)) if is_sequence(uuids) else [uuids]
    if len(names) != count or not all(name is None or (isinstance(name, str) and name) for name in names):
        raise RequestError(
            f"multi_modal_uuids must have one text (or None) for each of the {count} items of {modality}, not {names!r}",
            param="multi_modal_uuids",
        )
    return names
