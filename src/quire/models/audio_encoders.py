"""Encoders of sound that language models hear with: Whisper's, each with a projector of its own behind it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quire.config.hf_config import HFConfig
from quire.models.encoder_decoder.whisper import encoder_names, whisper_trunk
from quire.models.residual import LayerNorm
from quire.models.sight import Group, Normed, Product, Stage
from quire.models.spec import EncoderSpec

TOWER = "audio_tower."
"""What checkpoints call an encoder."""
PROJECTOR = "multi_modal_projector."
USUAL: dict[str, Any] = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
}
"""What an `audio_config` need not say."""
OTHER_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
"""Fields of an `audio_config` under the names that configs of text have, and as Whisper's has them."""


def audio_fields(hf: HFConfig, usual: dict[str, Any] = USUAL) -> HFConfig:
    """`audio_config` in Whisper's words."""
    given = {str(OTHER_NAMES.get(name, name)): value for name, value in hf.audio_config.to_dict().items()}
    return HFConfig(usual | given)


def _hearing(fields: HFConfig, stages: tuple[Stage, ...], final_norm: bool = True, **names: str) -> EncoderSpec:
    trunk = whisper_trunk(fields, encoder_names(TOWER).but((), **names))
    return EncoderSpec(dataclasses.replace(trunk, final_norm=final_norm), trunk.max_positions, stages)


def qwen2_audio(hf: HFConfig) -> EncoderSpec:
    """Qwen2-Audio: the mean of two rows, which Whisper's last norm reads, and a matrix."""
    stages = (
        Group(2, is_mean=True),
        Normed("pooled_norm", LayerNorm(1e-5)),
        Product("projection", hf.text_config.get("hidden_size", 4096)),
    )
    names = {"pooled_norm": TOWER + "layer_norm", "projection": PROJECTOR + "linear"}
    return _hearing(audio_fields(hf), stages, final_norm=False, **names)


HEARING: dict[str, Callable[[HFConfig], EncoderSpec]] = {
    "qwen2_audio": qwen2_audio,
}
"""By the `model_type` of the whole: how it hears."""
