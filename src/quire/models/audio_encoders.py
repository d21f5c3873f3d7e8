"""Encoders of sound that language models hear with: Whisper's, each with a projector of its own behind it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.encoder_decoder.whisper import encoder_names, whisper_trunk
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.rope import Sinusoids
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


def _hearing(
    fields: HFConfig,
    stages: tuple[Stage, ...],
    names: dict[str, str],
    weights: dict[str, Any] | None = None,
    **layers: Any,
) -> EncoderSpec:
    """`weights`, `layers`: what is otherwise than Whisper's, of the checkpoint's names and of the layers."""
    trunk = whisper_trunk(fields, dataclasses.replace(encoder_names(TOWER).but((), **names), **(weights or {})))
    return EncoderSpec(dataclasses.replace(trunk, **layers), trunk.max_positions, stages)


def qwen2_audio(hf: HFConfig) -> EncoderSpec:
    """Qwen2-Audio: the mean of two rows, which Whisper's last norm reads, and a matrix."""
    stages = (
        Group(2, is_mean=True),
        Normed("pooled_norm", LayerNorm(1e-5)),
        Product("projection", hf.text_config.get("hidden_size", 4096)),
    )
    names = {"pooled_norm": TOWER + "layer_norm", "projection": PROJECTOR + "linear"}
    return _hearing(audio_fields(hf), stages, names, final_norm=False)


def omni(hf: HFConfig) -> EncoderSpec:
    """Qwen2.5-Omni: sines as positions within parts of two seconds, the mean of two rows, a norm and a matrix."""
    stages = (
        Group(2, is_mean=True),
        Normed("pooled_norm", LayerNorm(1e-5)),
        Product("projection", hf.audio_config.get("output_dim", 3584)),
    )
    names = {"pooled_norm": TOWER + "ln_post", "projection": TOWER + "proj"}
    ignored = ("*audio_bos_eos_token.weight", "talker.*", "token2wav.*")
    sines = Sinusoids(hf.audio_config.get("max_source_positions", 1500), shift=1)
    theirs = {"prefixes": ("thinker.", "model.", ""), "ignored": ignored}
    return _hearing(audio_fields(hf), stages, names, theirs, final_norm=False, learned_positions=sines)


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
    ignored = (TOWER + "model.decoder.*", TOWER + "proj_out.weight")  # where the encoder is a checkpoint of its own
    weights = {"aliases": {TOWER + "model.encoder.": TOWER}, "ignored": ignored}
    return _hearing(audio_fields(hf, USUAL_WHISPER), stages, theirs, weights)


HEARING: dict[str, Callable[[HFConfig], EncoderSpec]] = {
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), omni),
    "ultravox": ultravox,
    "voxtral": voxtral,
    "qwen2_audio": qwen2_audio,
}
"""By the `model_type` of the whole: how it hears."""
