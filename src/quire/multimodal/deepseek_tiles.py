"""What DeepSeek-VL2's encoder reads of an image: the whole of it in one square, and squares of a larger one, grey at the edges.
Its processor is in no library."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.multimodal.image_families import best_fit

Pixels = npt.NDArray[Any]


class DeepseekTiles:
    """DeepSeek's `DeepseekVLV2Processor`, as far as it reads images.

    Args:
        fields: of processor_config.json.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._sizes = [(height, width) for width, height in fields["candidate_resolutions"]]
        self._mean, self._std = (
            np.array(fields.get(name, [0.5] * 3), np.float32) for name in ("image_mean", "image_std")
        )
        self._normalizes = bool(fields.get("normalize", True))

    def __call__(
        self,
        images: Pixels,
        *,
        return_tensors: str = "np",
        input_data_format: str = "channels_last",
        cropping: bool = True,
    ) -> dict[str, Pixels]:
        """Pixels [1, squares, 3, S, S] of one image [H, W, 3]: the whole first, then row by row; and how many squares stand side
        by side, and how many under one another. Without `cropping` there is one."""
        side = self._sizes[0][1]
        height, width = best_fit(images.shape[0], images.shape[1], self._sizes) if cropping else (side, side)
        whole, large = self._padded(images, side, side), self._padded(images, height, width)
        down, across = height // side, width // side
        squares = large.reshape(down, side, across, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        pixels = np.concatenate((whole[None], squares)).astype(np.float32) / np.float32(255)
        pixels = (pixels - self._mean) / self._std if self._normalizes else pixels
        crop = np.array([[across, down]], dtype=np.int64)
        return {"pixel_values": pixels.transpose(0, 3, 1, 2)[None], "images_spatial_crop": crop}

    def _padded(self, image: Pixels, height: int, width: int) -> Pixels:
        from PIL import Image, ImageOps

        grey = (int(self._mean[0] * 255), int(self._mean[1] * 255), int(self._mean[2] * 255))
        return np.asarray(ImageOps.pad(Image.fromarray(image), (width, height), color=grey))
