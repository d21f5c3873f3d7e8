"""How each architecture's videos stand in a prompt, as `image_families` tells of images, and what is made of their frames.

Transformers' own processors of videos compute with torchvision, which must fit to torch; here frames are brought to their size by
Pillow and cut with NumPy (tests compare the two). Options are those of the checkpoint's video processor, by the same names.
Knows token ids, shapes and pixels.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.hf_config import HFConfig
from quire.multimodal.image_families import (
    EMBEDDED,
    GEMMA4,
    GLM_V,
    IDEFICS,
    INTERN,
    LLAVA_ONEVISION,
    MOLMO,
    QWEN3_OMNI,
    QWEN_OMNI,
    QWEN_VL,
    Arrays,
    Encode,
    Expansion,
    Family,
    no_options,
    shrink,
)
from quire.multimodal.video import USUAL_RATE, Frames, Video

Options = Mapping[str, Any]
Pixels = npt.NDArray[np.float32]
CLIP_PIXELS: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "resample": 3,
}
ONLY_VIDEO = ("fps", "num_frames", "min_frames", "max_frames", "do_sample_frames")
"""Options that images do not have."""


@dataclasses.dataclass(frozen=True)
class VideoFamily(Family):
    """One family of models that see videos.

    Attributes:
        size: the height and width that so many frames are brought to.
        preset: options where the checkpoint has none.
        through: a size that frames are brought to before.
        ends: the text before the first frame and behind the last one, from a video.
        label: the text before and behind a frame (or as many as are cut together), from the processor's options, its seconds
            and its number; frames are items of their own then. None: the video is one item.
        around: tokens before and behind the marker that the labels have for each frame.
        ticks: positions in a second, where the time between frames counts.
    """

    size: Callable[[Options, int, int, int], tuple[int, int]] = lambda options, frames, height, width: (height, width)
    preset: Options = dataclasses.field(default_factory=dict[str, Any])
    label: Callable[[Options, Sequence[float], int], tuple[str, str]] | None = None
    through: Callable[[Options, int, int], tuple[int, int]] | None = None
    ends: Callable[[Video], tuple[str, str]] = lambda video: ("", "")
    around: tuple[str, str] = ("", "")
    ticks: Callable[[HFConfig], float] | None = None

    def expansions(
        self, video: Video, asked: Options, options: Options, hf: HFConfig, encode: Encode
    ) -> list[Expansion]:
        """What stands in the prompt for a video: one part, or one for each of its frames.

        Args:
            asked: options of the request and of the engine.
            options: of the checkpoint.
        """
        options = {**self.preset, **options, **(options.get("video_sampling") or {}), **asked}
        video = _chosen(video, asked, options)
        together = int(options.get("temporal_patch_size", 1))
        pad = -len(video.frames) % together
        frames = np.concatenate([video.frames, *[video.frames[-1:]] * pad])
        times = [*video.times.tolist(), *[float(video.times[-1])] * pad]
        if self.through is not None:
            frames = _resized(frames, *self.through(options, *frames.shape[1:3]), options)
        height, width = self.size(options, max(len(video.frames), together), *frames.shape[1:3])
        groups = _arrays(_normalized(_resized(frames, height, width, options), options), options)
        if self.label is None:
            whole = self.expand(hf, _joined(groups), encode)
            interval = 1.0 if self.ticks is None else self.ticks(hf) * together / video.shown_rate
            return [dataclasses.replace(whole, interval=interval)]
        parts: list[Expansion] = []
        first, last = self.ends(video)
        for number, arrays in enumerate(groups):
            before, after = self.label(options, times[number * together :][:together], number)
            before, after = before if number else first + before, after + last if number + 1 == len(groups) else after
            part = self.expand(hf, arrays, encode)
            before_ids, after_ids = (encode(text) if text else [] for text in (before, after))
            around = {"before": [*before_ids, *part.before], "after": [*part.after, *after_ids]}
            parts.append(dataclasses.replace(part, **around))
        return parts


def _chosen(video: Video, asked: Options, options: Options) -> Video:
    """The frames that the model sees: as many as the request asks for, or of a whole film what its processor takes."""
    for name in ("fps", "num_frames"):
        value = asked.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6):
            raise ValueError(f"{name}={value!r:.80} must be a number above 0")
    if "max_fps" in options:
        return _spread(video, asked, options)
    if asked.get("do_sample_frames") is False:
        return video
    count, rate = asked.get("num_frames"), asked.get("fps")
    if video.rate is None and rate is not None:  # it says how fast these frames are
        return dataclasses.replace(video, rate=float(rate))
    if rate is None and video.is_whole and options.get("do_sample_frames"):
        rate = options.get("fps")
        count = options.get("num_frames") if count is None and rate is None else count
    if count is None and rate is not None:
        count = video.total / (video.rate or USUAL_RATE) * rate
        count = min(max(count, options.get("min_frames", 1)), options.get("max_frames", math.inf))
    return video if count is None else video.thinned(int(count))


def _spread(video: Video, asked: Options, options: Options) -> Video:
    """Molmo 2: so many frames in steps of one length, from the first one on."""
    count, wanted = asked.get("num_frames"), asked.get("fps")
    rate = float(video.rate or wanted or options["max_fps"])
    video, seconds = dataclasses.replace(video, rate=rate), video.total / rate
    is_asked = count is not None or wanted is not None
    is_thinned = is_asked or (video.is_whole and options.get("do_sample_frames"))
    if not is_thinned or asked.get("do_sample_frames") is False:
        return video
    if count is None and wanted is not None:
        count = seconds * wanted
    else:
        count = options["num_frames"] if count is None else count
        count = min(count, int(seconds * options["max_fps"])) if rate > options["max_fps"] else count
    count = max(min(int(count), len(video.frames)), 1)
    kept = (np.arange(count) * (len(video.frames) / count)).astype(np.float32).astype(np.int64)
    return dataclasses.replace(video, frames=video.frames[kept], places=video.places[kept])


def _resized(frames: Frames, height: int, width: int, options: Options) -> Frames:
    if frames.shape[1:3] == (height, width):
        return frames
    if options.get("antialias") is False:
        return np.stack([between_pixels(frame, height, width) for frame in frames])
    from PIL import Image

    how = Image.Resampling(options["resample"])
    return np.stack([np.asarray(Image.fromarray(frame).resize((width, height), how)) for frame in frames])


def between_pixels(frame: Frames, height: int, width: int) -> Frames:
    """A frame [H, W, 3] brought to a size, each pixel from the nearest four, whatever is left out between: PyTorch's bilinear
    interpolation without antialiasing, to the bit where that multiplies and adds at once."""
    above, below, shares_H = _neighbours(frame.shape[0], height)
    left, right, shares_W = _neighbours(frame.shape[1], width)
    rows = (frame[above].astype(np.float32), frame[below].astype(np.float32))
    upper, lower = (_blend(row[:, left], row[:, right], shares_W[:, None]) for row in rows)
    return np.round(_blend(upper, lower, shares_H[:, None, None])).astype(np.uint8)


def _neighbours(size: int, wanted: int) -> tuple[Any, Any, Pixels]:
    """Of each wanted pixel on an axis, the pixels before and behind its centre, and the latter's share."""
    scale = np.float32(size) / np.float32(wanted)
    centres = np.maximum(((np.arange(wanted) + 0.5) * scale - 0.5).astype(np.float32), 0)
    first = np.minimum(centres.astype(np.int64), size - 1)
    return first, np.minimum(first + 1, size - 1), (centres - first).astype(np.float32)


def _blend(first: Pixels, second: Pixels, share: Pixels) -> Pixels:
    return (first.astype(np.float64) * (1 - share) + second * share).astype(np.float32)


def _normalized(frames: Frames, options: Options) -> Pixels:
    """Numbers of the usual size [T, 3, H, W]."""
    mean, std = (
        np.array(options[name], np.float32) / options["rescale_factor"] for name in ("image_mean", "image_std")
    )
    return np.ascontiguousarray(((frames.astype(np.float32) - mean) / std).astype(np.float32).transpose(0, 3, 1, 2))


def _arrays(pixels: Pixels, options: Options) -> list[Arrays]:
    """What the encoder reads of each frame, or of as many as are cut together; see `Patches.is_cut`."""
    if "temporal_patch_size" not in options:
        pooled = {"groups": _groups(pixels, options)} if "pooling_size" in options else {}
        return [{"pixel_values": frame, **pooled} for frame in pixels]
    size, merge, together = (int(options[name]) for name in ("patch_size", "merge_size", "temporal_patch_size"))
    frames, channels, height, width = pixels.shape
    rows, columns = height // size, width // size
    shape = (frames // together, together, channels, rows // merge, merge, size, columns // merge, merge, size)
    cut = pixels.reshape(shape).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(shape[0], rows * columns, -1)
    return [{"pixel_values": patches, "image_grid_thw": np.array([[1, rows, columns]])} for patches in cut]


def _groups(pixels: Pixels, options: Options) -> npt.NDArray[np.int64]:
    """Molmo 2: the patches of a frame that become an embedding [E, G]; -1: none, at the edges of what they do not fill."""
    rows, columns = (size // int(options["patch_size"]) for size in pixels.shape[2:])
    down, across = map(int, options["pooling_size"])
    edges = [(more // 2, (more + 1) // 2) for more in (-rows % down, -columns % across)]
    padded = np.pad(np.arange(rows * columns).reshape(rows, columns), edges, constant_values=-1)
    cells = padded.reshape(len(padded) // down, down, -1, across).transpose(0, 2, 1, 3)
    return cells.reshape(-1, down * across)


def _joined(groups: Sequence[Arrays]) -> Arrays:
    """The arrays of a whole video."""
    if "image_grid_thw" not in groups[0]:
        return {"pixel_values": np.stack([each["pixel_values"] for each in groups])}
    grid = groups[0]["image_grid_thw"].copy()
    grid[0, 0] = len(groups)
    return {"pixel_values": np.concatenate([each["pixel_values"] for each in groups]), "image_grid_thw": grid}


def _in_cells(options: Options, height: int, width: int, frames: int = 1, whole: int = 1) -> tuple[int, int]:
    """The nearest size in whole cells of merged patches of which so many frames have as many pixels as are allowed."""
    size, cell = options["size"], int(options["patch_size"]) * int(options["merge_size"])
    least = options.get("min_pixels") or size["shortest_edge"]
    most = options.get("max_pixels") or size["longest_edge"]
    rows, columns = round(height / cell) * cell, round(width / cell) * cell
    if whole * rows * columns > most:
        shrunk = math.sqrt(frames * height * width / most)
        return max(cell, int(height / shrunk / cell) * cell), max(cell, int(width / shrunk / cell) * cell)
    if whole * rows * columns < least:
        grown = math.sqrt(least / (frames * height * width))
        return math.ceil(height * grown / cell) * cell, math.ceil(width * grown / cell) * cell
    return rows, columns


def _each_bounded(options: Options, frames: int, height: int, width: int) -> tuple[int, int]:
    """Qwen2-VL and Qwen2.5-VL: bounds are for one frame."""
    return _in_cells(options, height, width)


def _all_bounded(options: Options, frames: int, height: int, width: int) -> tuple[int, int]:
    """Qwen3-VL and GLM-V: bounds are for all frames together."""
    cell, together = int(options["patch_size"]) * int(options["merge_size"]), int(options["temporal_patch_size"])
    if min(height, width) < cell:
        grown = max(cell / height, cell / width)
        height, width = int(height * grown), int(width * grown)
    return _in_cells(options, height, width, frames, round(frames / together) * together)


def _within(options: Options, frames: int, height: int, width: int) -> tuple[int, int]:
    """Gemma 4: the largest size in whole squares with these proportions that makes no more embeddings than are allowed."""
    cell, most = int(options["patch_size"]) * int(options["pooling_kernel_size"]), int(options["max_soft_tokens"])
    scale = math.sqrt(most / (height * width))
    rows, columns = int(height * scale), int(width * scale)
    if not rows or not columns:  # a thin one
        rows, columns = min(height // width, most) or 1, min(width // height, most) or 1
    return rows * cell, columns * cell


def _one_size(options: Options, frames: int, height: int, width: int) -> tuple[int, int]:
    """InternVL and LLaVA-OneVision: whatever the frames' proportions are."""
    return int(options["size"]["height"]), int(options["size"]["width"])


def _qwen3_label(options: Options, times: Sequence[float], number: int) -> tuple[str, str]:
    return f"<{(times[0] + times[-1]) / 2:.1f} seconds><|vision_start|>", "<|vision_end|>"


def _glm_label(options: Options, times: Sequence[float], number: int) -> tuple[str, str]:
    """GLM-4.1V and 4.5V write whole seconds, GLM-4.6V tenths."""
    is_later = "Glm46V" in f"{options.get('video_processor_type')} {options.get('processor_class')}"
    return "<|begin_of_image|>", "<|end_of_image|>" + (f"{times[0]:.1f} seconds" if is_later else f"{int(times[0])}")


def _clock(seconds: float) -> str:
    return "{:02d}:{:02d}".format(*divmod(int(seconds), 60))


def _gemma4_label(options: Options, times: Sequence[float], number: int) -> tuple[str, str]:
    return f"{' ' if number else ''}{_clock(times[0])} ", ""


def _intern_label(options: Options, times: Sequence[float], number: int) -> tuple[str, str]:
    return ("\n" if number else "") + f"Frame{number + 1}: ", ""


ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(count: int) -> str:
    """A number below a hundred in English; digits from there on."""
    if count < 20:
        return ONES[count]
    tens, ones = divmod(count, 10)
    return str(count) if tens > 9 else TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")


def _smol_ends(video: Video) -> tuple[str, str]:
    seconds = int(video.times[-1] if video.rate is None else video.total / video.rate)
    length, frames = datetime.timedelta(seconds=seconds), in_words(len(video.frames))
    return f"You are provided the following series of {frames} frames from a {length} [H:MM:SS] video.\n", "\n\n"


def _smol_label(options: Options, times: Sequence[float], number: int) -> tuple[str, str]:
    return f"\nFrame from {_clock(times[0])}:", ""


def _longest_side(options: Options, height: int, width: int) -> tuple[int, int]:
    """SmolVLM: frames in their proportions, whose shorter side is even."""
    longest = int((options.get("video_size") or options["size"])["longest_edge"])
    shorter = int(longest * min(height, width) / max(height, width))
    shorter = max(shorter + shorter % 2, 1)
    return (shorter, longest) if width >= height else (longest, shorter)


def _smol_square(options: Options, frames: int, height: int, width: int) -> tuple[int, int]:
    side = int(options["max_image_size"]["longest_edge"])
    return side, side


def _onevision(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """LLaVA-OneVision: of each frame's patches one in four, blended; one row's end behind the last frame."""
    pixels = arrays["pixel_values"]
    side = pixels.shape[-1] // int(hf.vision_config.get("patch_size", 14))
    places, shares = shrink(np.arange(side**2).reshape(side, side), -(-side // 2), -(-side // 2))
    starts = np.arange(len(pixels))[:, None, None] * side**2
    places = np.concatenate([(starts + places.reshape(1, -1, 4)).reshape(-1, 4), np.full((1, 4), -1)])
    shares = np.concatenate([np.tile(shares.reshape(-1, 4), (len(pixels), 1)), np.full((1, 4), 0.25, np.float32)])
    return Expansion([EMBEDDED] * len(places), {"pixels": pixels, "places": places, "shares": shares})


def _molmo(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Molmo 2: a frame between two tokens, which are behind the vocabulary as those of its patches are."""
    groups, names = arrays["groups"], {"frame_start_token_id": 151943, "frame_end_token_id": 151944}
    own = [hf.text_config.get("vocab_size", 151936) - 1 - hf.get(name, usual) for name, usual in names.items()]
    places = np.array([own[0], *range(len(groups)), own[1]])
    found = {"pixels": arrays["pixel_values"], "groups": groups, "places": places}
    return Expansion([EMBEDDED] * len(places), found)


def _molmo_label(options: Options, times: Sequence[float], number: int) -> tuple[str, str]:
    return f"{' ' if number else ''}{times[0]:.1f} ", ""


_CUT: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_HALF: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SQUARE: dict[str, Any] = {"size": {"height": 384, "width": 384}}


def _of(images: Family, expand: Any = None, **others: Any) -> VideoFamily:
    """A family that sees images, and videos."""
    fields = {field.name: getattr(images, field.name) for field in dataclasses.fields(images)}
    fields |= {"options": no_options, "of_embeds": None} | ({} if expand is None else {"expand": expand})
    return VideoFamily(**(fields | others))


_BOUNDS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
QWEN2_VIDEO = _of(
    QWEN_VL, token=("video_token_id",), usual=151656, size=_each_bounded, preset=CLIP_PIXELS | _CUT | {"size": _BOUNDS}
)
QWEN2_5_VIDEO = dataclasses.replace(QWEN2_VIDEO, ticks=lambda hf: float(hf.vision_config.get("tokens_per_second", 4)))
OMNI_VIDEO = dataclasses.replace(
    QWEN2_VIDEO,
    token=("video_token_index", "video_token_id"),
    ticks=lambda hf: float(hf.get("position_id_per_seconds", 25)),
)
OMNI3_BOUNDS = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
OMNI3_VIDEO = dataclasses.replace(OMNI_VIDEO, preset={**OMNI_VIDEO.preset, "size": OMNI3_BOUNDS})
QWEN3_VIDEO = dataclasses.replace(
    QWEN2_VIDEO,
    size=_all_bounded,
    label=_qwen3_label,
    around=("<|vision_start|>", "<|vision_end|>"),
    preset=CLIP_PIXELS
    | _CUT
    | _HALF
    | {"patch_size": 16, "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}}
    | {"do_sample_frames": True, "fps": 2, "min_frames": 4, "max_frames": 768},
)
QWEN3_5_VIDEO = dataclasses.replace(QWEN3_VIDEO, usual=248057)
GLM_VIDEO = _of(
    GLM_V,
    marker=("video_token_id",),
    usual_marker=151344,
    size=_all_bounded,
    label=_glm_label,
    preset=CLIP_PIXELS
    | _CUT
    | {"size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000}}
    | {"do_sample_frames": True, "fps": 2, "max_frames": 600},
)
GEMMA4_VIDEO = _of(
    GEMMA4,
    token=("video_token_id",),
    usual=258884,
    size=_within,
    label=_gemma4_label,
    preset=CLIP_PIXELS
    | {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "patch_size": 16, "pooling_kernel_size": 3}
    | {"max_soft_tokens": 70, "do_sample_frames": True, "num_frames": 32},
)
INTERN_VIDEO = _of(
    INTERN,
    marker=("video_token_id",),
    usual_marker=-1,
    marker_text="<video>",
    size=_one_size,
    label=_intern_label,
    preset=CLIP_PIXELS | _SQUARE,
)
ONEVISION_VIDEO = _of(
    LLAVA_ONEVISION,
    _onevision,
    token=("video_token_index", "video_token_id"),
    usual=151647,
    size=_one_size,
    preset=CLIP_PIXELS | _SQUARE,
)

MOLMO_VIDEO = _of(
    MOLMO,
    _molmo,
    marker_text="<|video|>",
    is_whole=False,
    size=_one_size,
    label=_molmo_label,
    preset=CLIP_PIXELS
    | _HALF
    | {"resample": 2, "antialias": False, "size": {"height": 378, "width": 378}, "patch_size": 14}
    | {"pooling_size": [3, 3], "do_sample_frames": True, "num_frames": 64, "max_fps": 2},
)

SMOL_VIDEO = _of(
    IDEFICS,
    marker=("video_token_id",),
    usual_marker=-1,
    marker_text="<video>",
    size=_smol_square,
    through=_longest_side,
    ends=_smol_ends,
    label=_smol_label,
    preset=CLIP_PIXELS
    | _HALF
    | {"resample": 1, "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
    | {"do_sample_frames": True, "fps": 1, "max_frames": 64},
)

VIDEO_FAMILIES: dict[str, VideoFamily] = {
    **dict.fromkeys(
        ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"),
        GLM_VIDEO,
    ),
    **dict.fromkeys(("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"), GEMMA4_VIDEO),
    "InternVLForConditionalGeneration": INTERN_VIDEO,
    "LlavaOnevisionForConditionalGeneration": ONEVISION_VIDEO,
    "Molmo2ForConditionalGeneration": MOLMO_VIDEO,
    "SmolVLMForConditionalGeneration": SMOL_VIDEO,
    **dict.fromkeys(QWEN_OMNI, OMNI_VIDEO),
    **dict.fromkeys(QWEN3_OMNI, OMNI3_VIDEO),
    "Qwen2VLForConditionalGeneration": QWEN2_VIDEO,
    "Qwen2_5_VLForConditionalGeneration": QWEN2_5_VIDEO,
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), QWEN3_VIDEO),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), QWEN3_5_VIDEO),
}
"""By architecture: who sees videos."""
