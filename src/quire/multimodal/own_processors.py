"""Processors that are in no library, or in one that must fit to torch: what DeepSeek-VL2's encoder reads of an image, and
Granite-Speech's of a sound."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.multimodal.image_families import best_fit

Pixels = npt.NDArray[Any]


class DeepseekTiles:
    """DeepSeek's `DeepseekVLV2Processor`, as far as it reads images: the whole of one in one square, and squares of a larger one,
    grey at the edges.

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


FloatArray = npt.NDArray[np.float32]


class GraniteFrames:
    """Hugging Face's `GraniteSpeechFeatureExtractor`: log-mel frames, two side by side. That one computes with torchaudio; here
    Transformers' other audio functions do the same.

    Args:
        fields: of the extractor's config.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.sampling_rate = int(fields.get("sampling_rate", 16000))
        self._length, self._hop = int(fields.get("win_length", 400)), int(fields.get("hop_length", 160))
        self._fft, self._bins = (
            int(fields.get("n_fft", 512)),
            int(fields.get("feature_size") or fields.get("n_mels", 80)),
        )

    @cached_property
    def _filters(self) -> FloatArray:
        from transformers.audio_utils import mel_filter_bank

        return mel_filter_bank(
            self._fft // 2 + 1, self._bins, 0.0, self.sampling_rate / 2, self.sampling_rate, mel_scale="htk"
        )

    def __call__(
        self, raw_speech: Sequence[FloatArray], *, sampling_rate: int, return_tensors: str
    ) -> dict[str, FloatArray]:
        """`input_features` [1, rows, 2 * bins] of one sound."""
        from transformers.audio_utils import spectrogram, window_function

        mel = spectrogram(
            raw_speech[0],
            window_function(self._length, "hann"),
            frame_length=self._length,
            hop_length=self._hop,
            fft_length=self._fft,
            power=2.0,
            mel_filters=self._filters,
        )
        logs = np.log10(np.maximum(mel.T, 1e-10))
        logs = (np.maximum(logs, logs.max() - 8.0) / 4 + 1).astype(np.float32)
        return {"input_features": logs[: len(logs) // 2 * 2].reshape(1, -1, 2 * self._bins)}
