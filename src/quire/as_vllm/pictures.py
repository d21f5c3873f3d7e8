"""What vLLM's scripts use of its modules of media: a picture's mode and address, and the sample files that its examples show.

A sample is fetched once, from the address where vLLM keeps it, and is then a file of a folder. Knows PIL, and how
`quire.multimodal` reads sounds and videos. Knows nothing of models.
"""

import base64
import dataclasses
import functools
import io
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.config.multimodal import VideoReading
from quire.errors import ConfigError
from quire.kept_files import write_whole
from quire.multimodal.image_files import PixelBudget
from quire.multimodal.video import Frames, Video
from quire.multimodal.video_files import decode_video

if TYPE_CHECKING:
    from PIL.Image import Image

    from quire.multimodal.audio import Samples

__all__ = [
    "AudioAsset",
    "ImageAsset",
    "VideoAsset",
    "convert_image_mode",
    "encode_image_url",
    "fetch_image",
    "load_audio",
]

SAMPLES = "https://vllm-public-assets.s3.us-west-2.amazonaws.com/"
VIDEOS = {"baby_reading": "sample_demo_1.mp4"}
TIMEOUT_S = 10.0


def sample(name: str) -> Path:
    """The file of a sample: in `assets` of QUIRE_CACHE_ROOT, where it is put once. Raises ConfigError: it cannot be fetched."""
    path = Path(envs.QUIRE_CACHE_ROOT) / "assets" / name
    if not path.is_file():
        try:
            with urllib.request.urlopen(SAMPLES + name, timeout=TIMEOUT_S) as answer:
                content = answer.read()
        except OSError as error:
            raise ConfigError.of(
                "assets", f"{SAMPLES}{name} cannot be fetched ({error}): put a file at {path}"
            ) from None
        write_whole(path, content)
    return path


class ImageAsset:
    """A sample picture by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_path(self, ext: str) -> Path:
        """Where the file is. Raises ConfigError: it is not there, and cannot be fetched."""
        return sample(f"vision_model_images/{self.name}.{ext}")

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


@dataclasses.dataclass(frozen=True)
class VideoAsset:
    """A sample video by its name, of which some frames are read."""

    name: str
    num_frames: int = -1
    fps: float = -1

    @property
    def video_path(self) -> str:
        """Where the file is. Raises ConfigError: it is not there, and cannot be fetched."""
        return str(sample(f"video-example-data/{VIDEOS.get(self.name, self.name)}"))

    @functools.cached_property
    def _video(self) -> Video:
        reading = VideoReading(self.num_frames, self.fps)
        return decode_video(Path(self.video_path).read_bytes(), PixelBudget(), reading)

    @property
    def np_ndarrays(self) -> Frames:
        """The frames [T, H, W, 3]."""
        return self._video.frames

    @property
    def pil_images(self) -> "list[Image]":
        """The frames as pictures."""
        from PIL import Image

        return [Image.fromarray(frame) for frame in self._video.frames]

    @property
    def metadata(self) -> dict[str, Any]:
        """What is known of the frames, as it stands beside them in `multi_modal_data`."""
        video = self._video
        known = {"fps": video.rate, "total_num_frames": video.total, "frames_indices": video.places.tolist()}
        return {**known, "do_sample_frames": video.is_whole}


@dataclasses.dataclass(frozen=True)
class AudioAsset:
    """A sample of sound by its name."""

    name: str

    @property
    def url(self) -> str:
        """Where vLLM keeps it."""
        return f"{SAMPLES}multimodal_asset/{self.name}.ogg"

    @property
    def audio_and_sample_rate(self) -> "tuple[Samples, float]":
        """The samples of one channel, and how many a second has."""
        return load_audio(self.get_local_path(), sr=None)

    def get_local_path(self) -> Path:
        """Where the file is. Raises ConfigError: it is not there, and cannot be fetched."""
        return sample(f"multimodal_asset/{self.name}.ogg")


def load_audio(path: str | Path | io.BytesIO, *, sr: float | None = 22050, **options: Any) -> "tuple[Samples, float]":
    """The samples of a sound file, of several channels the mean, and how many a second has: `sr`, or the file's own number.
    Raises RequestError: it is no sound."""
    from quire.multimodal.audio import SampleBudget, mono, open_audio, resampled

    data = path.read() if isinstance(path, io.BytesIO) else Path(path).read_bytes()
    samples, own = open_audio(data, SampleBudget())
    rate = own if sr is None else int(sr)
    return resampled(mono(samples, "sound"), own, rate, "sound"), rate


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
    """The picture at an address (http, https, file or data); a sample is fetched once. Raises OSError."""
    from PIL import Image

    if image_url.startswith(SAMPLES):
        image_url = sample(image_url.removeprefix(SAMPLES)).as_uri()
    with urllib.request.urlopen(image_url, timeout=TIMEOUT_S) as answer:
        return convert_image_mode(Image.open(io.BytesIO(answer.read())), image_mode)
