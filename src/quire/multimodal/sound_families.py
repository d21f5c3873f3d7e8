"""How each architecture's sounds stand in a prompt, as `image_families` tells of images. Knows token ids and shapes.

A sound's arrays are frames of several parts [parts, B, F], each of which the encoder reads by itself, and `counts` [parts, 2]:
the rows that a part becomes, and the embeddings that these become. Two frames are a row.
"""

from typing import Any

import numpy as np

from quire.config.hf_config import HFConfig
from quire.multimodal.image_families import EMBEDDED, Arrays, Encode, Expansion, Family

TOKEN = ("audio_token_index", "audio_token_id")


def _expansion(mel: Any, counts: list[tuple[int, int]]) -> Expansion:
    tokens = [EMBEDDED] * sum(embeds for _, embeds in counts)
    return Expansion(tokens, {"mel": mel, "counts": np.array(counts, dtype=np.int64)})


def _qwen2(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Qwen2-Audio: one part of at most 30 seconds; two rows are an embedding. The silence behind a sound is not heard, but for
    the frames that the last row reads."""
    mel = arrays["input_features"]
    rows = (int(arrays["attention_mask"].sum()) + 1) // 2
    return _expansion(mel[None, :, : 2 * rows + 2], [(rows, rows // 2)])


QWEN2_AUDIO = Family(TOKEN, 151646, _qwen2, options=lambda hf: {"padding": "max_length", "return_attention_mask": True})

SOUND_FAMILIES: dict[str, Family] = {
    "Qwen2AudioForConditionalGeneration": QWEN2_AUDIO,
}
"""By architecture: who hears sounds in a prompt."""
