"""Encoders of sound that language models hear with: Whisper's, each with a projector of its own behind it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.encoder_decoder.whisper import encoder_names, whisper_trunk
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.sight import Gated, Group, Normed, Product, Stage
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
USUAL_WHISPER: dict[str, Any] = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "num_mel_bins": 80,
}
"""The same of Whisper's own configs."""
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


def check_whole(hf: HFConfig) -> None:
    """Raises ConfigError: parts of the model are in other checkpoints."""
    for field in ("text_model_id", "audio_model_id"):
        if hf.get(field) is not None:
            message = (
                f"{field}={hf.get(field)!r} of config.json: part of the model is in another checkpoint; save the model "
                f"whole, with its text_config and without {field}"
            )
            raise ConfigError(message, setting="model")


def _hearing(
    fields: HFConfig, stages: tuple[Stage, ...], names: dict[str, str], *, final_norm: bool = True
) -> EncoderSpec:
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
    return _hearing(audio_fields(hf), stages, names, final_norm=False)


def voxtral(hf: HFConfig) -> EncoderSpec:
    """Voxtral: as many rows side by side as the encoder's feed-forward is wide, and two matrices."""
    fields, hidden = audio_fields(hf), hf.text_config.get("hidden_size", 3072)
    stages = (
        Group(fields.encoder_ffn_dim // fields.d_model),
        Product("up_projection", hidden, bias=False, act=hf.get("projector_hidden_act", "gelu")),
        Product("down_projection", hidden, bias=False),
    )
    names = {"up_projection": PROJECTOR + "linear_1", "down_projection": PROJECTOR + "linear_2"}
    return _hearing(fields, stages, names)


def ultravox(hf: HFConfig) -> EncoderSpec:
    """Ultravox: rows side by side between norms, gated. From 0.5 on the second norm is between the matrices.

    Raises:
        ConfigError: the projector is another one.
    """
    if hf.get("num_projector_layers", 0) or hf.get("projector_act", "swiglu") != "swiglu":
        message = (
            "config.json: Ultravox's projector is read with num_projector_layers=0 and projector_act='swiglu' alone"
        )
        raise ConfigError(message, setting="model")
    norm, is_mid = RMSNorm(1e-6), bool(hf.get("projector_ln_mid", False))
    stages = (
        Group(hf.get("stack_factor", 8)),
        Normed("stacked_norm", norm),
        Product("up_projection", hf.get("hidden_size", 4096), bias=False),
        Gated("silu"),
        *([Normed("merge_norm", norm)] if is_mid else []),
        Product("down_projection", hf.text_config.get("hidden_size", 4096), bias=False),
        *([] if is_mid else [Normed("merge_norm", norm)]),
    )
    names = {"stacked_norm": "ln_pre", "up_projection": "linear_1", "down_projection": "linear_2"}
    names |= {"merge_norm": "ln_mid" if is_mid else "ln_post"}
    theirs = {name: PROJECTOR + module for name, module in names.items()}
    hearing = _hearing(audio_fields(hf, USUAL_WHISPER), stages, theirs)
    weights = dataclasses.replace(hearing.trunk.weights, aliases={TOWER + "model.encoder.": TOWER})
    return dataclasses.replace(hearing, trunk=dataclasses.replace(hearing.trunk, weights=weights))


HEARING: dict[str, Callable[[HFConfig], EncoderSpec]] = {
    "ultravox": ultravox,
    "voxtral": voxtral,
    "qwen2_audio": qwen2_audio,
}
"""By the `model_type` of the whole: how it hears."""
