"""Sounds, as samples of one channel at one rate: what users give, and the bytes of a file; and long ones in parts.

`soundfile` reads WAV, FLAC, MP3, Ogg and others; `soxr` changes the rate. Knows samples and files. Knows no model and no network.
"""

import io
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire.config import limits
from quire.errors import RequestError
from quire.guards import is_sequence
from quire.multimodal.budget import Budget
from quire.multimodal.content import PARAM, refusal, require_library
from quire.multimodal.web_fetch import MediaError

Samples = npt.NDArray[np.float32]
"""Of one channel, between -1 and 1."""


def read_audio(given: Any, rate: int, where: str) -> Samples:
    """A sound as samples at this rate: an array, a tensor or a list of samples at that rate already, or a pair of these and
    their own rate. Several channels become their mean.

    Args:
        where: the item's name, for errors.

    Raises:
        RequestError: it is none of these, or too long.
    """
    samples, own = _parts(given, rate, where)
    if hasattr(samples, "detach"):  # a tensor, wherever it is
        samples = samples.detach().cpu().float().numpy()
    try:
        array = np.asarray(samples)
    except (TypeError, ValueError) as error:
        raise refusal("sound", where, str(error)) from None
    return resampled(mono(array, where), own, rate, where)


def _parts(given: Any, rate: int, where: str) -> tuple[Any, int]:
    if not isinstance(given, tuple):
        return given, rate
    pair = cast("tuple[Any, ...]", given)
    if len(pair) != 2:
        raise refusal("sound", where, f"it is a tuple of {len(pair)}")
    samples, own = pair
    if isinstance(own, bool) or not isinstance(own, int | float | np.integer | np.floating):
        raise refusal("sound", where, f"its rate is {own!r}")
    low, high = limits.SAMPLE_RATES
    if not low <= own <= high or own != int(own):
        raise RequestError(f"{where} has {own} samples a second; {low} to {high} can be read", param=PARAM)
    return samples, int(own)


def mono(array: npt.NDArray[Any], where: str) -> Samples:
    """Samples of one channel: whole numbers become parts of the largest of their type, channels their mean.
    Raises RequestError: these are no samples."""
    if array.dtype.kind in "iu" and array.size:
        info = np.iinfo(array.dtype)
        middle = 0.0 if array.dtype.kind == "i" else (info.max + 1) / 2
        array = (array.astype(np.float64) - middle) / (info.max + 1 - middle)
    if array.dtype.kind != "f" and array.size:
        raise refusal("sound", where, f"its numbers are {array.dtype}")
    if array.ndim == 2 and 0 < min(array.shape) <= limits.MAX_AUDIO_CHANNELS:
        array = array.mean(axis=int(array.shape[1] < array.shape[0]))
    if array.ndim != 1:
        raise refusal("sound", where, f"its shape is {list(array.shape)}")
    if not array.size:
        raise RequestError(f"{where} is empty: it has no samples", param=PARAM)
    samples = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(samples).all():
        raise refusal("sound", where, "some of its samples are not finite")
    return samples


def resampled(samples: Samples, own: int, rate: int, where: str) -> Samples:
    """The sound at another rate.
    Raises RequestError: it is too long, or the library is not installed."""
    seconds = len(samples) / own
    if seconds > limits.MAX_AUDIO_SECONDS:
        message = f"{where} is {seconds:.0f} seconds long; at most {limits.MAX_AUDIO_SECONDS:.0f} are allowed"
        raise RequestError(message, param=PARAM)
    if own == rate:
        return samples
    return np.ascontiguousarray(require_library("soxr", "audio").resample(samples, own, rate), dtype=np.float32)


def as_sounds(given: Any) -> list[Any]:
    """One sound or several as a list: lists hold sounds, unless they hold samples."""
    if not isinstance(given, list):
        return [given]
    items = cast("list[Any]", given)
    return [items] if items and isinstance(items[0], int | float) and not is_sequence(items[0]) else items


BLOCK = 1 << 18
SEARCH_S = 1.0
"""How far before the end of a part a quiet place is looked for."""
QUIET_S = 0.05


class SampleBudget(Budget):
    """The samples that all sounds of one request may have together, of one channel."""

    def __init__(self, samples: int = limits.MAX_AUDIO_SAMPLES) -> None:
        super().__init__(samples, "sounds", "samples")


def decode_audio(data: bytes, rate: int, where: str = "file") -> Samples:
    """A file's samples at this rate: of several channels the mean, of a file that breaks off what is there.
    Raises RequestError: it is no sound, has no sample, or is too long."""
    try:
        samples, own = open_audio(data, SampleBudget())
    except MediaError as error:
        raise RequestError(f"{where}: {error}", param=where) from None
    return resampled(mono(samples, where), own, rate, where)


def open_audio(data: bytes, budget: SampleBudget) -> tuple[Samples, int]:
    """As `decode_audio`, at the file's own rate, which is behind the samples. Raises MediaError: it is no sound."""
    library = require_library("soundfile", "audio")
    try:
        with library.SoundFile(io.BytesIO(data)) as file:
            own, channels = int(file.samplerate), int(file.channels)
            low, high = limits.SAMPLE_RATES
            if not low <= own <= high or channels > limits.MAX_AUDIO_CHANNELS:
                raise MediaError(f"it has {own} samples a second and {channels} channels: it cannot be read")
            return _read(file, budget), own
    except MediaError:
        raise
    except (library.SoundFileError, RuntimeError, ValueError, OSError) as error:
        raise MediaError(f"it cannot be read as sound ({error}); send WAV, FLAC, MP3 or Ogg") from None


def _read(file: Any, budget: SampleBudget) -> Samples:
    """One channel of all blocks, as far as they can be read."""
    blocks: list[Samples] = []
    while True:
        try:
            block = file.read(BLOCK, dtype="float32", always_2d=True)
        except RuntimeError:  # it breaks off within a block
            if blocks:
                break
            raise
        if not len(block):
            break
        budget.take(len(block))
        blocks.append(np.nan_to_num(block.mean(axis=1, dtype=np.float32)))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def split_sound(samples: Samples, rate: int, longest_s: float) -> list[tuple[float, Samples]]:
    """Parts of at most so many seconds, each with the second at which it begins, cut where it is quietest near their ends."""
    longest, parts, start = int(longest_s * rate), list[tuple[float, Samples]](), 0
    while len(samples) - start > longest:
        end = start + longest
        search = min(int(SEARCH_S * rate), longest // 2)
        cut = end - search + _quietest(samples[end - search : end], max(1, int(QUIET_S * rate)))
        parts.append((start / rate, samples[start:cut]))
        start = cut
    return [*parts, (start / rate, samples[start:])]


def _quietest(samples: Samples, width: int) -> int:
    """The middle of the part of this width with the least energy; at least 1."""
    energy = np.cumsum(np.square(samples, dtype=np.float64))
    if len(energy) <= width:
        return len(energy)
    return max(1, int(np.argmin(energy[width:] - energy[:-width])) + width // 2)
