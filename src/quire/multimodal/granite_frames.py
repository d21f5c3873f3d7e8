"""What Granite-Speech's encoder reads of a sound: log-mel frames, two side by side.

Transformers' own extractor computes with torchaudio, which must fit to torch; here its other audio functions do the same.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class GraniteFrames:
    """Hugging Face's `GraniteSpeechFeatureExtractor`.

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
