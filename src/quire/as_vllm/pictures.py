"""What vLLM's scripts use of its modules of media: a picture's mode and address, and the sample files that its examples show.

Samples are files of a folder: nothing is fetched for them. Knows PIL. Knows nothing of models.
"""

import base64
import io
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["AudioAsset", "ImageAsset", "VideoAsset", "convert_image_mode", "encode_image_url", "fetch_image"]

TIMEOUT_S = 10.0
_FOLDER = "vision_model_images"


class ImageAsset:
    """A sample picture by its name: a file in `assets/vision_model_images` of QUIRE_CACHE_ROOT."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_path(self, ext: str) -> Path:
        """Where the file is. Raises ConfigError: it is not there."""
        path = Path(envs.QUIRE_CACHE_ROOT) / "assets" / _FOLDER / f"{self.name}.{ext}"
        if not path.is_file():
            raise ConfigError.of("assets", f"{path} is not there, and Quire fetches no samples: put a picture there")
        return path

    @property
    def pil_image(self) -> "Image":
        """The picture, as stored in JPEG."""
        return self.pil_image_ext("jpg")

    def pil_image_ext(self, ext: str) -> "Image":
        """The picture, as stored in a format."""
        from PIL import Image

        return Image.open(self.get_path(ext))

    def read_bytes(self, ext: str) -> bytes:
        """The file's bytes."""
        return self.get_path(ext).read_bytes()


class _Unread:
    """A sample that no model here can read."""

    kind = ""

    def __init__(self, name: str, **options: Any) -> None:
        del options
        raise ConfigError.of("assets", f"{name!r}: no model of Quire reads {self.kind} (docs/multimodal.md)")


class VideoAsset(_Unread):
    """A sample video."""

    kind = "video"


class AudioAsset(_Unread):
    """A sample of sound."""

    kind = "sound"


def convert_image_mode(image: "Image", to_mode: str) -> "Image":
    """The picture in another mode; what is transparent becomes white where the mode has no transparency."""
    if image.mode == to_mode:
        return image
    if image.mode == "RGBA" and to_mode == "RGB":
        from PIL import Image

        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image)
        return opaque.convert(to_mode)
    return image.convert(to_mode)


def encode_image_url(image: "Image", *, image_mode: str = "RGB", format: str | None = None) -> str:
    """The picture as a data URL."""
    name, buffer = (format or "PNG").upper(), io.BytesIO()
    convert_image_mode(image, image_mode).save(buffer, name)
    return f"data:image/{name.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def fetch_image(image_url: str, *, image_mode: str = "RGB", **options: Any) -> "Image":
    """The picture at an address (http, https, file or data). Raises OSError."""
    from PIL import Image

    del options
    with urllib.request.urlopen(image_url, timeout=TIMEOUT_S) as answer:
        return convert_image_mode(Image.open(io.BytesIO(answer.read())), image_mode)
