"""How media of prompts are read and kept; for models that read any."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.config import limits
from quire.errors import ConfigError
from quire.guards import is_mapping

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class VideoReading:
    """Which frames of a video's file are read: evenly spread ones. Named as in vLLM.

    Attributes:
        num_frames: most of them; -1: all.
        fps: most of a second; -1: any number.
    """

    num_frames: int = 32
    fps: float = -1.0

    def count(self, total: int, seconds: float) -> int:
        """How many of a file's frames are read."""
        count = total if self.num_frames < 0 else min(self.num_frames, total)
        return max(1, count if self.fps < 0 else min(count, int(seconds * self.fps)))

    def but(self, given: Any) -> "VideoReading":
        """What `media_io_kwargs` change of it. Raises ValueError: they have no such options."""
        if given is None:
            return self
        video = given.get("video", {}) if is_mapping(given) and set(given) <= {"video"} else None
        if not is_mapping(video) or not set(video) <= {"num_frames", "fps"}:
            raise ValueError(
                f'it may be {{"video": {{"num_frames": 32, "fps": 2}}}}, one of the two or both, not {given!r:.200}'
            )
        frames, fps = video.get("num_frames", self.num_frames), video.get("fps", self.fps)
        if (
            isinstance(frames, bool)
            or not isinstance(frames, int)
            or not (frames == -1 or 0 < frames <= limits.MAX_VIDEO_FRAMES)
        ):
            raise ValueError(f"video.num_frames={frames!r:.80} must be -1 (all) or 1 to {limits.MAX_VIDEO_FRAMES}")
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not (fps == -1 or 0 < fps <= 1000):
            raise ValueError(f"video.fps={fps!r:.80} must be -1 (any), or more than 0 and at most 1000")
        return VideoReading(frames, float(fps))


def video_reading(media_io_kwargs: Any) -> VideoReading:
    """The setting. Raises ConfigError: it has no such options."""
    try:
        return VideoReading().but(media_io_kwargs)
    except ValueError as error:
        raise ConfigError.of("media_io_kwargs", str(error)) from None


def read_limit(given: Mapping[str, Any], modality: str) -> int | None:
    """Most items of a modality: a number, or vLLM's object with a `count`. Raises ConfigError for anything else."""
    limit = given.get(modality)
    if is_mapping(limit):
        limit = limit.get("count")
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0):
        return limit
    message = f"limit_mm_per_prompt.{modality}={limit!r} is not valid: it must be a whole number, 0 or more"
    raise ConfigError(message, setting="limit_mm_per_prompt")


@dataclasses.dataclass(frozen=True)
class MultiModalConfig:
    """Media settings, named as in vLLM.

    Attributes:
        limit_mm_per_prompt: most items of each modality in one prompt; a modality that is not named has no limit of its own.
        mm_processor_kwargs: options of the model's processor, for all requests.
        video_reading: which frames of videos' files are read.
        mm_processor_cache_gb: GiB of host memory in which what was processed is kept; 0 keeps nothing.
        mm_shm_cache_max_object_size_mb: MiB of the largest item that several frontends share.
        shared_cache: the folder in which they share it; None: there is one frontend.
        encoder_budget: embeddings that one step may compute; also the most that one item may have.
        encoder_cache_size: embeddings that a worker keeps.
        mm_encoder_tp_mode: `weights`: each rank of tensor parallelism encodes every item; `data`: its share of a step's items.
        prompt_embeds: a prompt may consist of embeddings.
        mm_embeds: an image may be given as its embeddings.
        allowed_local_media_path: the folder whose files requests may name, with no link in its path; empty: none.
        allowed_media_domains: the only hosts from which media are fetched, private ones too; None: any public one.
    """

    limit_mm_per_prompt: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    mm_processor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    video_reading: VideoReading = VideoReading()
    mm_processor_cache_gb: float = 4.0
    mm_shm_cache_max_object_size_mb: int = 128
    shared_cache: str | None = None
    encoder_budget: int = 16384
    encoder_cache_size: int = 16384
    mm_encoder_tp_mode: str = "weights"
    prompt_embeds: bool = False
    mm_embeds: bool = False
    allowed_local_media_path: str = ""
    allowed_media_domains: tuple[str, ...] | None = None

    def limit_of(self, modality: str) -> int | None:
        """Most items of a modality in one prompt; None: any number."""
        return self.limit_mm_per_prompt.get(modality)
