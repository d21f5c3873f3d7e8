"""Sound as it comes over a line, piece by piece: 16-bit samples, or G.711's bytes.

Recommendation G.711 (https://www.itu.int/rec/T-REC-G.711).
"""

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from quire.entrypoints.http.errors import bad_field
from quire.multimodal.image_files import decode_base64
from quire.multimodal.web_fetch import MediaError

TELEPHONE_RATE = 8000
Ints = npt.NDArray[np.int16]


class SoundFormat(msgspec.Struct, frozen=True):
    """How samples of one channel are sent. `rate`: of `audio/pcm`; the others have 8,000 a second."""

    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Annotated[int, msgspec.Meta(ge=8000, le=48000)] = 24000

    def read(self, data: bytes) -> tuple[Ints, int]:
        """The samples, and how many are a second."""
        if self.type == "audio/pcm":
            return np.frombuffer(data[: len(data) & ~1], "<i2"), self.rate
        table = _MU_LAW if self.type == "audio/pcmu" else _A_LAW
        return table[np.frombuffer(data, np.uint8)], TELEPHONE_RATE


def _mu_law() -> Ints:
    code = np.arange(256) ^ 0xFF
    size = (((code & 0xF) << 3) + 0x84 << (code >> 4 & 7)) - 0x84
    return np.where(code & 0x80, -size, size).astype(np.int16)


def _a_law() -> Ints:
    code = np.arange(256) ^ 0x55
    step, fine = code >> 4 & 7, (code & 0xF) << 4
    size = np.where(step == 0, fine + 8, fine + 0x108 << np.maximum(step - 1, 0))
    return np.where(code & 0x80, size, -size).astype(np.int16)


_MU_LAW, _A_LAW = _mu_law(), _a_law()


def decode_sound(text: str, field: str) -> bytes:
    """The bytes of a piece of sound. Raises HTTPError, a 400: they are not base64."""
    try:
        return decode_base64(text)
    except MediaError as error:
        raise bad_field(field, f"{error}.") from None
