"""From the bytes of a sound file to samples, and long sounds in parts.

`soundfile` reads WAV, FLAC, MP3, Ogg and others; `soxr` changes the rate. Knows files; knows no model.
"""

import io
from typing import Any

import numpy as np

from quire.config import limits
from quire.errors import RequestError
from quire.multimodal.audio import Samples, mono, resampled
from quire.multimodal.budget import Budget
from quire.multimodal.content import require_library
from quire.multimodal.web_fetch import MediaError

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
