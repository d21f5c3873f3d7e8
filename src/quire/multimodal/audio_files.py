"""From the bytes of a sound file to samples, and long sounds in parts.

`soundfile` reads WAV, FLAC, MP3, Ogg and others; `soxr` changes the rate. Knows files; knows no model.
"""

import io
from typing import Any

import numpy as np

from quire.config import limits
from quire.errors import RequestError
from quire.multimodal.audio import Samples, mono, require_audio_library, resampled

BLOCK = 1 << 18
SEARCH_S = 1.0
"""How far before the end of a part a quiet place is looked for."""
QUIET_S = 0.05


def decode_audio(data: bytes, rate: int, where: str = "file") -> Samples:
    """A file's samples at this rate: of several channels the mean, of a file that breaks off what is there.
    Raises RequestError: it is no sound, has no sample, or is too long."""
    library = require_audio_library("soundfile")
    try:
        with library.SoundFile(io.BytesIO(data)) as file:
            own, channels = int(file.samplerate), int(file.channels)
            low, high = limits.SAMPLE_RATES
            if not low <= own <= high or channels > limits.MAX_AUDIO_CHANNELS:
                message = f"{where} has {own} samples a second and {channels} channels: it cannot be read"
                raise RequestError(message, param=where)
            samples = _read(file, where)
    except (library.SoundFileError, RuntimeError, ValueError, OSError) as error:
        message = f"{where} cannot be read as sound ({error}); send WAV, FLAC, MP3 or Ogg"
        raise RequestError(message, param=where) from None
    return resampled(mono(samples, where), own, rate, where)


def _read(file: Any, where: str) -> Samples:
    """One channel of all blocks, as far as they can be read."""
    blocks: list[Samples] = []
    count = 0
    while True:
        try:
            block = file.read(BLOCK, dtype="float32", always_2d=True)
        except RuntimeError:  # it breaks off within a block
            if blocks:
                break
            raise
        if not len(block):
            break
        count += len(block)
        if count > limits.MAX_AUDIO_SAMPLES:
            message = f"{where} has more than {limits.MAX_AUDIO_SAMPLES} samples; send it in parts"
            raise RequestError(message, param=where)
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
