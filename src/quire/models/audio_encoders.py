"""Encoders of sound that language models hear with: Whisper's, each with a projector of its own behind it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quire.config.hf_config import HFConfig
from quire.errors import ConfigError
from quire.models.encoder_decoder.whisper import encoder_names, whisper_trunk
from quire.models.residual import LayerNorm, RMSNorm
from quire.models.rope import Sinusoids
from quire.models.sight import Gated, Group, Normed, Product, Queries, Stage, Standard
from quire.models.sound import BlockConformer, Chunks, Conformer
from quire.models.spec import EncoderSpec, WeightNames
from quire.models.vision.gemma4 import EPS, embedder, without_layers

LONGEST = 750
"""Rows of 40 ms in half a minute, the longest sound of Gemma 4."""
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


CHUNK_ROWS = 13
"""Rows of a chunk of a hundred frames, which three convolutions halve."""


def omni3(hf: HFConfig) -> EncoderSpec:
    """Qwen3-Omni: convolutions within a second, attention within eight.

    Raises:
        ConfigError: chunks are of another length.
    """
    audio = hf.audio_config
    if audio.get("n_window", 50) != 50:
        raise ConfigError("config.json: Qwen3-Omni hears with n_window=50 alone", setting="model")
    fields, hidden = audio_fields(hf), audio.get("d_model", audio.get("hidden_size", 1280))
    act = audio.get("activation_function", "gelu")
    stages = (Product("up_projection", hidden, act=act), Product("down_projection", audio.get("output_dim", 3584)))
    fronts = {f"front{n}": f"{TOWER}conv2d{n}.weight" for n in (1, 2, 3)}
    names = fronts | {f"front{n}_bias": f"{TOWER}conv2d{n}.bias" for n in (1, 2, 3)}
    names |= {"input": TOWER + "conv_out", "final_norm": TOWER + "ln_post"}
    names |= {"up_projection": TOWER + "proj1", "down_projection": TOWER + "proj2"}
    sines = Sinusoids(audio.get("max_source_positions", 1500), shift=1)
    frames = Chunks(fields.num_mel_bins, 100, audio.get("downsample_hidden_size", 480), hidden, sines)
    theirs = {"prefixes": ("thinker.", "model.", ""), "unbiased": (), "flattened": tuple(fronts)}
    theirs |= {"ignored": ("talker.*", "code2wav.*")}
    spec = _hearing(fields, stages, names, theirs, learned_positions=None, frames=frames, reads_items=True)
    return dataclasses.replace(spec, length=CHUNK_ROWS * (audio.get("n_window_infer", 800) // 100))


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


LAYER = TOWER + "layers.{layer}."
GEMMA4_NAMES = WeightNames(
    prefixes=("", "model."),
    layer=LAYER,
    modules={
        **{f"front{n + 1}": f"{TOWER}subsample_conv_projection.layer{n}.conv.weight" for n in (0, 1)},
        **{f"front{n + 1}_norm": f"{TOWER}subsample_conv_projection.layer{n}.norm" for n in (0, 1)},
        **{f"ff{n}_before": f"feed_forward{n}.pre_layer_norm" for n in (1, 2)},
        **{f"ff{n}_up": f"feed_forward{n}.ffw_layer_1.linear" for n in (1, 2)},
        **{f"ff{n}_down": f"feed_forward{n}.ffw_layer_2.linear" for n in (1, 2)},
        **{f"ff{n}_after": f"feed_forward{n}.post_layer_norm" for n in (1, 2)},
        "input": TOWER + "subsample_conv_projection.input_proj_linear",
        "before_mixer": "norm_pre_attn",
        "qkv": ("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
        "relative": "self_attn.relative_k_proj",
        "head_scale": "self_attn.per_dim_scale",
        "out": "self_attn.post.linear",
        "after_mixer": "norm_post_attn",
        "before_conv": "lconv1d.pre_layer_norm",
        "conv_in": "lconv1d.linear_start.linear",
        "conv": "lconv1d.depthwise_conv1d.weight",
        "conv_norm": "lconv1d.conv_norm",
        "conv_out": "lconv1d.linear_end.linear",
        "after_layer": "norm_out",
        "output": TOWER + "output_proj",
        "projection": "embed_audio.embedding_projection",
    },
    flattened=("front1", "front2"),
)


def gemma4_hearing(hf: HFConfig) -> EncoderSpec:
    """Gemma 4 E2B and E4B.

    Raises:
        ConfigError: rows see those behind themselves.
    """
    audio, width = hf.audio_config, hf.text_config.get("hidden_size", 2304)
    if audio.get("attention_context_right", 0):
        raise ConfigError("config.json: Gemma 4 hears with attention_context_right=0 alone", setting="model")
    behind, norm = audio.get("attention_context_left", 13) - 1, RMSNorm(audio.get("rms_norm_eps", EPS))
    frames = Conformer(
        bins=128,
        channels=tuple(audio.get("subsampling_conv_channels", [128, 32])),
        layers=audio.get("num_hidden_layers", 12),
        hidden=audio.get("hidden_size", 1024),
        heads=audio.get("num_attention_heads", 8),
        kernel=audio.get("conv_kernel_size", 5),
        window=behind,
        start=(audio.get("attention_chunk_size", 12) + behind) // 2 - behind,
        soft_cap=float(audio.get("attention_logit_cap", 50.0)),
        share=float(audio.get("residual_weight", 0.5)),
        act=audio.get("hidden_act", "silu"),
        eps=norm.eps,
        outputs=audio.get("output_proj_dims", 1536),
    )
    others = {"reads_items": True, "frames": frames, "bounded": bool(audio.get("use_clipped_linears", True))}
    return EncoderSpec(without_layers(frames.outputs, norm, GEMMA4_NAMES, **others), LONGEST, embedder(norm, width))


def unified_hearing(hf: HFConfig) -> EncoderSpec:
    """Gemma 4 12B: 640 samples are an embedding, behind a norm and a matrix."""
    norm = RMSNorm(hf.audio_config.get("rms_norm_eps", EPS))
    names = WeightNames(prefixes=("", "model."), modules={"projection": GEMMA4_NAMES.modules["projection"]})
    trunk = without_layers(hf.audio_config.get("audio_embed_dim", 640), norm, names, reads_items=True)
    return EncoderSpec(trunk, LONGEST, embedder(norm, hf.text_config.get("hidden_size", 2304)))


GRANITE_NAMES = WeightNames(
    prefixes=("", "model."),
    layer="encoder.layers.{layer}.",
    modules={
        "input": "encoder.input_linear",
        **{f"ff{n}_before": f"ff{n}.pre_norm" for n in (1, 2)},
        **{f"ff{n}_up": f"ff{n}.up_proj" for n in (1, 2)},
        **{f"ff{n}_down": f"ff{n}.down_proj" for n in (1, 2)},
        "before_mixer": "attn.pre_norm",
        "qkv": ("attn.to_q", "attn.to_kv"),
        "distances": "attn.rel_pos_emb.weight",
        "out": "attn.to_out",
        "before_conv": "conv.norm",
        "conv_in": "conv.up_conv",
        "conv": "conv.depth_conv.conv.weight",
        "conv_norm": "conv.batch_norm",
        "conv_mean": "conv.batch_norm.running_mean",
        "conv_variance": "conv.batch_norm.running_var",
        "conv_out": "conv.down_conv",
        "after_layer": "post_norm",
        "guess": "encoder.out",
        "guessed": "encoder.out_mid",
        "queries": "projector.query",
        "queries_norm": "projector.qformer.layernorm",
        "projection": "projector.linear",
    },
    flattened=("conv_in", "conv_out", "queries"),
    ignored=("*.num_batches_tracked",),
)


def _names_of_queries(layers: int) -> dict[str, str | tuple[str, ...]]:
    """Blip-2's."""
    found: dict[str, str | tuple[str, ...]] = {}
    for layer in range(layers):
        at, ours = f"projector.qformer.encoder.layer.{layer}.", f"queries{layer}"
        for kind, theirs in (("self", at + "attention."), ("rows", at + "crossattention.")):
            found[f"{ours}_{kind}_q"] = theirs + "attention.query"
            found[f"{ours}_{kind}_kv"] = (theirs + "attention.key", theirs + "attention.value")
            found[f"{ours}_{kind}_out"] = theirs + "output.dense"
            found[f"{ours}_{kind}_norm"] = theirs + "output.LayerNorm"
        found[f"{ours}_up"], found[f"{ours}_down"] = at + "intermediate_query.dense", at + "output_query.dense"
        found[f"{ours}_norm"] = at + "output_query.LayerNorm"
    return found


def granite_hearing(hf: HFConfig) -> EncoderSpec:
    """Granite-Speech 3: three queries read fifteen rows each; embeddings are multiplied as those of text are."""
    audio, asks, text = hf.encoder_config, hf.projector_config, hf.text_config
    hidden, heads, window = audio.get("hidden_dim", 1024), audio.get("num_heads", 8), hf.get("window_size", 15)
    frames = BlockConformer(
        columns=audio.get("input_dim", 160),
        layers=audio.get("num_layers", 10),
        hidden=hidden,
        heads=heads,
        head_dim=audio.get("dim_head") or hidden // heads,
        wide=hidden * audio.get("feedforward_mult", 4),
        channels=hidden * audio.get("conv_expansion_factor", 2),
        kernel=audio.get("conv_kernel_size", 15),
        block=audio.get("context_size", 200),
        farthest=audio.get("max_pos_emb", 512),
        letters=audio.get("output_dim", 42),
    )
    norm = LayerNorm(asks.get("layer_norm_eps", 1e-12))
    queries = Queries(
        window,
        window // hf.get("downsample_rate", 5),
        asks.get("num_hidden_layers", 12),
        asks.get("hidden_size", 768),
        asks.get("num_attention_heads", 12),
        asks.get("intermediate_size", 3072),
        asks.get("hidden_act", "gelu"),
        norm,
        asks.get("cross_attention_frequency", 2),
    )
    names = GRANITE_NAMES.but((), **_names_of_queries(queries.layers))
    trunk = without_layers(hidden, norm, names, reads_items=True, frames=frames)
    scale = Standard(float(text.get("embedding_multiplier", 1.0)), learned=False)
    return EncoderSpec(trunk, 1500, (queries, Product("projection", text.get("hidden_size", 2048)), scale))


HEARING: dict[str, Callable[[HFConfig], EncoderSpec]] = {
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), omni),
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), omni3),
    "gemma4": gemma4_hearing,
    "granite_speech": granite_hearing,
    "gemma4_unified": unified_hearing,
    "ultravox": ultravox,
    "voxtral": voxtral,
    "qwen2_audio": qwen2_audio,
}
"""By the `model_type` of the whole: how it hears."""
