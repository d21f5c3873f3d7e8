"""What users give as videos, as frames and their times.

Knows frames. Knows no model, no file and no network.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire.config import limits
from quire.errors import RequestError
from quire.guards import is_mapping, is_sequence
from quire.multimodal.content import PARAM, read_image, refusal

Frames = npt.NDArray[np.uint8]
"""[T, H, W, 3], red, green and blue."""
USUAL_RATE = 24.0
"""Frames a second where nobody tells, as in Transformers."""


def evenly(total: int, count: int) -> npt.NDArray[np.int64]:
    """The places of so many of `total`, from the first to the last."""
    return np.linspace(0, total - 1, min(count, total), dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class Video:
    """Some frames of a film.

    Attributes:
        places: of the frames in the film.
        rate: the film's frames a second; None: nobody tells.
        total: frames of the film.
        is_whole: these are all of them, of which a model may want fewer.
    """

    frames: Frames
    places: npt.NDArray[np.int64]
    rate: float | None
    total: int
    is_whole: bool = False

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """Seconds at which the frames stand in the film."""
        return self.places / (self.rate or USUAL_RATE)

    @property
    def shown_rate(self) -> float:
        """These frames a second."""
        return USUAL_RATE if self.rate is None else len(self.frames) / self.total * self.rate

    def thinned(self, count: int) -> "Video":
        """So many of its frames, evenly spread."""
        kept = evenly(len(self.frames), max(1, count))
        return dataclasses.replace(self, frames=self.frames[kept], places=self.places[kept])


def as_videos(given: Any) -> list[Any]:
    """One video or several as a list. A list of pictures is one, as is a pair of frames and what is known of them."""
    if is_sequence(given):
        items = list(given)
        is_pair = isinstance(given, tuple) and len(items) == 2 and is_mapping(items[1])
        return [given] if is_pair or (items and all(map(_is_picture, items))) else items
    return list(given) if getattr(given, "ndim", 0) == 5 else [given]


def _is_picture(given: Any) -> bool:
    return hasattr(given, "getexif") or getattr(given, "ndim", 0) == 3


def read_video(given: Any, where: str) -> Video:
    """A video: an array or a tensor of bytes [T, H, W, 3] or [T, 3, H, W], a list of pictures of one size, or a pair of either
    and what is known of it, a dict as vLLM has it: `fps`, `frames_indices`, `total_num_frames`, `do_sample_frames`.

    Args:
        where: the item's name, for errors.

    Raises:
        RequestError: it is none of these.
    """
    if isinstance(given, Video):
        return given
    known: Any = {}
    if isinstance(given, tuple) and len(cast("tuple[Any, ...]", given)) == 2:
        given, known = given
        if not is_mapping(known):
            raise refusal("video", where, f"a {type(known).__name__} stands beside its frames")
    return _described(_frames(given, where), known, where)


def _frames(given: Any, where: str) -> Frames:
    if hasattr(given, "detach"):  # a tensor, wherever it is
        given = given.detach().cpu().numpy()
    if not is_sequence(given) and getattr(given, "ndim", 0) != 4:
        shape = getattr(given, "shape", None)
        raise refusal(
            "video", where, f"it is a {type(given).__name__}" if shape is None else f"its shape is {list(shape)}"
        )
    if not 0 < len(given) <= limits.MAX_VIDEO_FRAMES:
        raise refusal("video", where, f"it has {len(given)} frames; 1 to {limits.MAX_VIDEO_FRAMES} can be read")
    frames = [read_image(frame, f"{where}, frame {number}") for number, frame in enumerate(given)]
    if len({frame.shape for frame in frames}) > 1:
        raise refusal("video", where, "its frames have several sizes")
    return np.stack(frames)


def _described(frames: Frames, known: Mapping[str, Any], where: str) -> Video:
    rate, indices = known.get("fps"), known.get("frames_indices")
    try:
        places = np.array(range(len(frames)) if indices is None else indices, dtype=np.int64).reshape(len(frames))
        total = max(int(places.max()) + 1, int(known.get("total_num_frames") or 0))
        rate = None if rate is None else float(rate)
        if places.min() < 0 or total > 1 << 40 or not 0 < (rate or 1.0) < 1e6:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted = "fps must be a number, frames_indices a number for each frame, total_num_frames a number"
        raise RequestError(f"{where}: what is known of it cannot be used: {wanted}", param=PARAM) from None
    return Video(frames, places, rate, total, bool(known.get("do_sample_frames")))
