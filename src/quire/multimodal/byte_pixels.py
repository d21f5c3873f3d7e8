"""Pixels as bytes: the encoder's device finds in a table what the host would make of each of the 256 values.

An image of 1,024 x 1,024 is 3 MB so, not 26, on its way from the processor through caches and processes to the encoder.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

VALUES = "values"
"""What a processor gives beside `pixel_values` that are bytes: for each channel [C, 256] the numbers that bytes stand for."""
CHANNELS = 3
_PLAIN = {"do_rescale": False, "do_normalize": False, "temporal_patch_size": 1}
_CHANGING = {*_PLAIN, "rescale_factor", "image_mean", "image_std", "patch_size", "merge_size"}


def leaves_bytes(processor: Any) -> bool:
    """Whether the last steps of Hugging Face's processor change each pixel by itself, and repeat a patch for each frame."""
    return type(processor).__name__ == "Qwen2VLImageProcessorPil" and processor.do_rescale and processor.do_normalize


class BytePixels:
    """An image processor that leaves pixels as they are, and says what they stand for.

    Args:
        processor: Hugging Face's, one that `leaves_bytes`.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        side = processor.patch_size  # of a patch for each byte
        ramp = np.arange(256, dtype=np.uint8).reshape(16, 16).repeat(side, 0).repeat(side, 1)
        same = {"do_resize": False, "input_data_format": "channels_last", "return_tensors": "np"}
        image = np.stack([ramp] * CHANNELS, axis=2)
        numbers = processor(image, temporal_patch_size=1, **same)["pixel_values"].reshape(256, CHANNELS, -1)[..., 0]
        places = self._bytes(image, same)["pixel_values"].reshape(256, CHANNELS, -1)[..., 0]
        self.values = np.empty((CHANNELS, 256), np.float32)
        for values, number, place in zip(self.values, numbers.T, places.T, strict=True):
            values[place] = number

    def __call__(self, images: npt.NDArray[np.uint8], *, return_tensors: str, **options: Any) -> Mapping[str, Any]:
        """Patches [T, P] as bytes, of one frame each, with what they stand for; numbers, if a request changes these."""
        options["return_tensors"] = return_tensors
        if options.keys() & _CHANGING:
            return self._processor(images, **options)
        return self._bytes(images, options) | {VALUES: self.values}

    def _bytes(self, images: npt.NDArray[np.uint8], options: Mapping[str, Any]) -> dict[str, Any]:
        given = self._processor(images, **options, **_PLAIN)
        return {**given, "pixel_values": given["pixel_values"].astype(np.uint8)}
