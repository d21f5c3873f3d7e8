"""How each architecture's sounds stand in a prompt, as `image_families` tells of images. Knows token ids and shapes.

A sound's arrays are frames of several parts [parts, B, F], each of which the encoder reads by itself, and `counts` [parts, 3]:
the rows that a part becomes, the embeddings that these become, and the frames that it has. Two frames are a row.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.config.hf_config import HFConfig
from quire.multimodal.image_families import (
    EMBEDDED,
    QWEN3_OMNI,
    QWEN_OMNI,
    Arrays,
    Encode,
    Expansion,
    Family,
    borrowed_item,
)

TOKEN = ("audio_token_index", "audio_token_id")
FRAMES_A_ROW = 2
HOP = 160
"""Samples from one of Whisper's frames to the next."""


def _of_embeds(hf: HFConfig, count: int, grid: Sequence[int]) -> Expansion:
    if grid:
        raise ValueError("sounds have no image_grid_thw")
    return Expansion([EMBEDDED] * count, {})


def _expansion(mel: Any, counts: list[tuple[int, int]], frames: Sequence[int] = ()) -> Expansion:
    """`frames`: of each part; without them all are whole."""
    tokens = [EMBEDDED] * sum(embeds for _, embeds in counts)
    each = frames or [mel.shape[-1]] * len(counts)
    told = [(*count, number) for count, number in zip(counts, each, strict=True)]
    return Expansion(tokens, {"mel": mel, "counts": np.array(told, dtype=np.int64)})


def _qwen2(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Qwen2-Audio: one part of at most 30 seconds; two rows are an embedding. The silence behind a sound is not heard, but for
    the frames that the last row reads."""
    mel = arrays["input_features"]
    rows = (int(arrays["attention_mask"].sum()) + 1) // 2
    return _expansion(mel[None, :, : 2 * rows + 2], [(rows, rows // 2)])


QWEN2_AUDIO = Family(
    TOKEN,
    151646,
    _qwen2,
    options=lambda hf: {"padding": "max_length", "return_attention_mask": True},
    of_embeds=_of_embeds,
)


def _omni(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Qwen2.5-Omni: parts of two seconds, the last one as long as it is; two rows are an embedding."""
    total, longest = int(arrays["attention_mask"].sum()), FRAMES_A_ROW * int(hf.audio_config.get("n_window", 100))
    parts = _in_parts(arrays["input_features"][:, :total], longest)
    frames = [min(longest, total - start) for start in range(0, total, longest)]
    rows = [-(-count // FRAMES_A_ROW) for count in frames]
    return _expansion(parts, [(count, count // 2) for count in rows], frames)


OMNI = dataclasses.replace(QWEN2_AUDIO, expand=_omni)


CHUNK = 100
"""Frames of a second, which Qwen3-Omni's convolutions read by themselves."""


def _omni3(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Qwen3-Omni: windows of whole seconds, of which the last is filled with silence where there is another; each row is an
    embedding, and a second has 13."""
    mask = arrays["attention_mask"]
    total, window = int(mask.sum()), int(hf.audio_config.get("n_window_infer", 800))
    mel = arrays["input_features"][:, :total]
    filled = mel if total < CHUNK else _in_parts(mel, CHUNK).transpose(1, 0, 2).reshape(len(mel), -1)
    parts = _in_parts(filled, window) if filled.shape[1] > window else filled[None]
    starts = range(0, total, window)
    rows = [_rows_of_chunks(min(window, total - start)) for start in starts]
    return _expansion(parts, [(count, count) for count in rows], [min(window, filled.shape[1] - at) for at in starts])


def _rows_of_chunks(frames: int) -> int:
    whole, left = divmod(frames, CHUNK)
    return 13 * whole + -(-left // 8)


OMNI3 = dataclasses.replace(
    QWEN2_AUDIO,
    expand=_omni3,
    options=lambda hf: {"padding": "longest", "truncation": False, "return_attention_mask": True},
    samples_each=CHUNK * HOP // 13,
)


def _between(hf: HFConfig, expansion: Expansion) -> Expansion:
    """Gemma 4's tokens around a sound."""
    begin, end = [int(hf.get("boa_token_id", 256000))], [int(hf.get("eoa_token_index", 258883))]
    return dataclasses.replace(expansion, before=begin, after=end)


def _gemma4(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Gemma 4 E2B and E4B: four frames are an embedding."""
    frames = int(arrays["input_features_mask"].sum())
    mel, rows = np.ascontiguousarray(arrays["input_features"][:frames].T), -(-frames // 4)
    return _between(hf, _expansion(mel[None], [(rows, rows)]))


def _gemma4_unified(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Gemma 4 12B: 640 samples are an embedding."""
    rows = arrays["input_features"].reshape(-1, arrays["input_features"].shape[-1])
    return _between(hf, Expansion([EMBEDDED] * len(rows), {"rows": rows}))


def _gemma4_embeds(hf: HFConfig, count: int, grid: Sequence[int]) -> Expansion:
    return _between(hf, _of_embeds(hf, count, grid))


GEMMA4 = Family(("audio_token_id",), 258881, _gemma4, of_embeds=_gemma4_embeds)
GEMMA4_UNIFIED = dataclasses.replace(GEMMA4, expand=_gemma4_unified, samples_each=640)


def _gemma3n(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Gemma 3n: as many embeddings for each sound, those behind its own are of silence."""
    count, token = int(hf.get("audio_soft_tokens_per_image", 188)), int(hf.get("audio_token_id", 262273))
    given = {name: arrays[name][None] for name in ("input_features", "input_features_mask")}
    around = {"begin": hf.get("boa_token_id", 256000), "end": hf.get("eoa_token_id", 262272)}
    return borrowed_item(given, [token] * count, encode, **around)


GEMMA3N = Family(("audio_token_id",), 262273, _gemma3n, joins_newlines=True)


def _granite(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Granite-Speech: a few embeddings of each window of rows, the last of which may be filled with zeros."""
    rows, window = arrays["input_features"], int(hf.get("window_size", 15))
    embeds = -(-len(rows) // window) * (window // int(hf.get("downsample_rate", 5)))
    return _expansion(np.ascontiguousarray(rows.T)[None], [(len(rows), embeds)])


GRANITE = Family(TOKEN, 49155, _granite, of_embeds=_of_embeds, samples_each=10 * HOP, marker_text="<|audio|>")


def _phi4(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Phi-4-multimodal: eight frames are an embedding."""
    rows = int(arrays["audio_embed_sizes"])
    return _expansion(np.ascontiguousarray(arrays["audio_input_features"].T)[None], [(rows, rows)])


PHI4 = Family(
    ("audio_config.audio_token_id",), 200011, _phi4, of_embeds=_of_embeds, samples_each=8 * HOP, sees_images=True
)


def _in_parts(mel: Any, frames: int) -> Any:
    """Frames in parts of so many, behind the last ones zeros [parts, B, F]."""
    padded = np.pad(mel, ((0, 0), (0, -mel.shape[1] % frames)))
    return padded.reshape(len(mel), -1, frames).transpose(1, 0, 2)


def _longest(hf: HFConfig) -> int:
    """Frames of the longest part that the encoder reads."""
    return FRAMES_A_ROW * int(hf.audio_config.get("max_source_positions", 1500))


def _voxtral(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Voxtral: parts of 30 seconds, all of them full."""
    audio, frames = hf.audio_config, _longest(hf)
    ratio = audio.get("intermediate_size", 5120) // audio.get("hidden_size", 1280)
    parts = _in_parts(arrays["input_features"], frames)
    rows = frames // FRAMES_A_ROW
    return _expansion(parts, [(rows, rows // ratio)] * len(parts))


def _voxtral_options(hf: HFConfig) -> dict[str, Any]:
    return {"padding": True, "truncation": False, "pad_to_multiple_of": HOP * _longest(hf)}


def _ultravox(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Ultravox: parts of 30 seconds, the last one as long as it is."""
    mel, frames, stack = arrays["input_features"], _longest(hf), int(hf.get("stack_factor", 8))
    parts = mel[None] if mel.shape[1] <= frames else _in_parts(mel, frames)
    rows = [-(-min(frames, mel.shape[1] - start) // FRAMES_A_ROW) for start in range(0, mel.shape[1], frames)]
    return _expansion(parts, [(count, -(-count // stack)) for count in rows])


VOXTRAL = Family(TOKEN, 24, _voxtral, options=_voxtral_options, of_embeds=_of_embeds, samples_each=8 * HOP)
ULTRAVOX = Family(
    TOKEN,
    32000,
    _ultravox,
    options=lambda hf: {"padding": "longest", "truncation": False, "pad_to_multiple_of": HOP},
    of_embeds=_of_embeds,
    samples_each=16 * HOP,
    marker_text="<|audio|>",
)


def _whisper(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Whisper: one part of 30 seconds, beside the prompt."""
    mel = arrays["input_features"]
    return Expansion([EMBEDDED] * (mel.shape[-1] // FRAMES_A_ROW), {"mel": mel})


WHISPER = Family((), 0, _whisper, is_alone=True)

SOUND_FAMILIES: dict[str, Family] = {
    **dict.fromkeys(QWEN_OMNI, OMNI),
    **dict.fromkeys(QWEN3_OMNI, OMNI3),
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": GEMMA4_UNIFIED,
    "GraniteSpeechForConditionalGeneration": GRANITE,
    "Phi4MultimodalForCausalLM": PHI4,
    "Qwen2AudioForConditionalGeneration": QWEN2_AUDIO,
    "UltravoxModel": ULTRAVOX,
    "VoxtralForConditionalGeneration": VOXTRAL,
    "WhisperForConditionalGeneration": WHISPER,
}
"""By architecture: who hears sounds in a prompt."""
