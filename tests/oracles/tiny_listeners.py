"""Tiny random checkpoints of models that hear sounds in their prompts, with the feature extractor's config beside them; and what
Transformers itself gives for a prompt with sounds.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from tests.oracles.tiny_encoder_decoder import RATE
from tests.oracles.tiny_gemma3n import ARCHITECTURE as GEMMA3N
from tests.oracles.tiny_gemma3n import PROCESSOR, Gemma3nOracle, gemma3n_fields, make_tiny_gemma3n
from tests.oracles.tiny_models import TEXT, load_oracle, randomize, write_tiny_tokenizer
from tests.oracles.tiny_phi4 import ARCHITECTURE as PHI4
from tests.oracles.tiny_phi4 import phi4_embeddings, phi4_fields
from tests.oracles.tiny_video import Film, in_pairs

AUDIO = 300
"""The marker of a sound in the tiny models' prompts: an id that no text makes."""
SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|IMAGE|>", "<|vision_bos|>", "<|vision_eos|>", "<|VIDEO|>")
_WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 50,
}  # fmt: skip
OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"
OMNI3 = "Qwen3OmniMoeThinkerForConditionalGeneration"
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2AudioForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "audio_config": _WHISPER | {"model_type": "qwen2_audio_encoder"},
        "audio_token_index": AUDIO,
    },
    OMNI: {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
            "window_size": 16, "fullatt_block_indexes": [1],
        },
        "audio_config": _WHISPER | {"model_type": "qwen2_5_omni_audio_encoder", "n_window": 12, "output_dim": 64},
        "audio_token_index": AUDIO,
        "image_token_index": AUDIO + 3,
        "video_token_index": AUDIO + 6,
        "vision_start_token_id": AUDIO + 4,
        "audio_start_token_id": AUDIO + 1,
        "audio_end_token_id": AUDIO + 2,
    },
    OMNI3: {
        "text_config": TEXT
        | {
            "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 3, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
            "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1],
        },
        "audio_config": _WHISPER
        | {"model_type": "qwen3_omni_moe_audio_encoder", "n_window_infer": 100, "downsample_hidden_size": 6, "output_dim": 64},
        "audio_token_id": AUDIO,
        "image_token_id": AUDIO + 3,
        "video_token_id": AUDIO + 6,
        "vision_start_token_id": AUDIO + 4,
        "audio_start_token_id": AUDIO + 1,
        "audio_end_token_id": AUDIO + 2,
    },
    "VoxtralForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama", "head_dim": 16},
        "audio_config": {
            "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_mel_bins": 16, "max_source_positions": 52,
        },
        "audio_token_id": AUDIO,
    },
    "Gemma4ForConditionalGeneration": {
        "text_config": TEXT
        | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 10, "layer_types": ["full_attention"] * 3}
        | {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": TEXT["vocab_size"]},
        "audio_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "subsampling_conv_channels": [128, 4],
            "conv_kernel_size": 3, "attention_chunk_size": 6, "attention_context_left": 7, "output_proj_dims": 40,
        },
        "vision_config": None,
        "image_token_id": AUDIO + 3, "video_token_id": AUDIO + 4, "audio_token_id": AUDIO, "boa_token_id": AUDIO + 1,
        "eoa_token_index": AUDIO + 2, "tie_word_embeddings": False,
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "text_config": TEXT
        | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 10, "layer_types": ["full_attention"] * 3},
        "audio_config": {"audio_embed_dim": 640},
        "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 90},
        "image_token_id": AUDIO + 3, "video_token_id": AUDIO + 4, "audio_token_id": AUDIO, "boa_token_id": AUDIO + 1,
        "eoa_token_index": AUDIO + 2,
        "tie_word_embeddings": False,
    },
    "GraniteSpeechForConditionalGeneration": {
        "text_config": TEXT
        | {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
        "encoder_config": {
            "model_type": "granite_speech_encoder", "input_dim": 160, "num_layers": 2, "hidden_dim": 32, "num_heads": 2,
            "feedforward_mult": 2, "dim_head": 12, "output_dim": 7, "context_size": 9, "max_pos_emb": 12, "conv_kernel_size": 5,
        },
        "projector_config": {
            "model_type": "blip_2_qformer", "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 48, "encoder_hidden_size": 32,
        },
        "window_size": 6, "downsample_rate": 3, "audio_token_index": AUDIO, "has_lora_adapter": False,
        "tie_word_embeddings": False,
    },
    PHI4: phi4_fields(AUDIO + 3, AUDIO),
    GEMMA3N: gemma3n_fields(AUDIO + 3, AUDIO),
    "UltravoxModel": {
        "model_type": "ultravox",
        "text_config": TEXT | {"model_type": "llama"},
        "audio_config": _WHISPER | {"model_type": "whisper"},
        "audio_token_index": AUDIO,
        "hidden_size": 80,
        "stack_factor": 8,
        "projector_ln_mid": True,
    },
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_listener(architecture: str, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny checkpoint that hears into the folder `path`; returns that path. Its encoder reads a second at once."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    fields = CONFIGS[architecture] | overrides
    if architecture == "UltravoxModel":
        UltravoxReference(fields).save(path, seed)
    elif architecture == GEMMA3N:
        make_tiny_gemma3n(path, fields, seed)
    else:
        model_class = getattr(transformers, architecture)
        config = model_class.config_class(**fields)
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        randomize(model, seed)
        model.save_pretrained(path)
    _write_tokenizer(path)
    if architecture.startswith("Gemma"):
        extractor = architecture.removesuffix("ForConditionalGeneration") + "AudioFeatureExtractor"
        getattr(transformers, extractor)().save_pretrained(path)
        if architecture == GEMMA3N:
            own = path / "preprocessor_config.json"
            own.write_text(json.dumps(json.loads(own.read_bytes()) | PROCESSOR))
    elif architecture.startswith("Granite"):
        fields = {"feature_extractor_type": "GraniteSpeechFeatureExtractor"}
        (path / "preprocessor_config.json").write_text(json.dumps(fields))
    elif architecture == PHI4:
        transformers.Phi4MultimodalFeatureExtractor().save_pretrained(path)
    elif architecture != "UltravoxModel":  # it has none
        extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, sampling_rate=RATE)
        extractor.save_pretrained(path)
    return path


def _write_tokenizer(path: Path) -> None:
    """The tiny tokenizer, with markers of sounds, and a chat template that takes parts."""
    from tokenizers import Tokenizer

    write_tiny_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([f"<unused{number}>" for number in range(AUDIO - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(list(SPECIAL))
    assert tokenizer.token_to_id(SPECIAL[0]) == AUDIO
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_bytes())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))


class UltravoxReference(torch.nn.Module):
    """Ultravox, whose code is not Transformers', of Transformers' parts: Whisper's encoder over the frames that there are, rows
    side by side, and a gated projector with RMS norms.

    Args:
        fields: of config.json.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        super().__init__()
        self.fields = fields
        audio, text = WhisperConfig(**fields["audio_config"]), LlamaConfig(**fields["text_config"])
        audio._attn_implementation = text._attn_implementation = "eager"
        self.config = SimpleNamespace(model_type="ultravox", get_text_config=lambda: text)
        self.audio_tower, self.language_model = WhisperEncoder(audio), LlamaForCausalLM(text)
        stacked, width = audio.d_model * fields["stack_factor"], fields["hidden_size"]
        is_mid, norm = fields["projector_ln_mid"], functools.partial(torch.nn.RMSNorm, eps=1e-6)
        self.multi_modal_projector = torch.nn.ModuleDict(
            {
                "ln_pre": norm(stacked),
                "linear_1": torch.nn.Linear(stacked, width, bias=False),
                "linear_2": torch.nn.Linear(width // 2, text.hidden_size, bias=False),
                "ln_mid" if is_mid else "ln_post": norm(width // 2 if is_mid else text.hidden_size),
            }
        )
        self.eval()

    def save(self, path: Path, seed: int) -> None:
        """Write it as a checkpoint, with random weights."""
        from safetensors.torch import save_file

        randomize(self, seed)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"architectures": ["UltravoxModel"]} | self.fields))

    def load(self, path: str | Path) -> Self:
        from safetensors.torch import load_file

        self.load_state_dict(load_file(Path(path) / "model.safetensors"))
        return self

    def forward(self, input_ids: torch.Tensor, sounds: Sequence[torch.Tensor] = ()) -> Any:
        embeds = self.language_model.model.embed_tokens(input_ids)
        if sounds:
            embeds[input_ids == AUDIO] = torch.cat([self._hear(sound) for sound in sounds])
        return self.language_model(inputs_embeds=embeds)

    def _hear(self, mel: torch.Tensor) -> torch.Tensor:
        longest = 2 * self.fields["audio_config"]["max_source_positions"]
        parts = list(mel.split(longest, dim=1))
        lengths = [part.shape[1] for part in parts]
        if len(parts) > 1:
            parts[-1] = torch.nn.functional.pad(parts[-1], (0, longest - lengths[-1]))
        return torch.cat([self._hear_part(part, length) for part, length in zip(parts, lengths, strict=True)])

    def _hear_part(self, mel: torch.Tensor, length: int) -> torch.Tensor:
        encoder, parts, stack = self.audio_tower, self.multi_modal_projector, self.fields["stack_factor"]
        gelu = torch.nn.functional.gelu
        rows = gelu(encoder.conv2(gelu(encoder.conv1(mel[None])))).transpose(1, 2)
        rows = (rows + encoder.embed_positions.weight[: rows.shape[1]])[:, : (length + 1) // 2]
        for layer in encoder.layers:
            rows = layer(rows, None)
            rows = rows[0] if isinstance(rows, tuple) else rows
        rows = encoder.layer_norm(rows)[0]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % stack)).reshape(-1, stack * rows.shape[1])
        value, gate = parts["linear_1"](parts["ln_pre"](rows)).chunk(2, dim=-1)
        rows = torch.nn.functional.silu(gate) * value
        if "ln_mid" in parts:
            return parts["linear_2"](parts["ln_mid"](rows))
        return parts["ln_post"](parts["linear_2"](rows))


def _stacked_frames(sound: np.ndarray, **options: Any) -> torch.Tensor:
    """What Granite-Speech reads [1, rows, 160], as torchaudio defines it."""
    from transformers.audio_utils import mel_filter_bank

    filters = torch.from_numpy(mel_filter_bank(257, 80, 0.0, 8000.0, RATE, mel_scale="htk")).float()
    window = torch.hann_window(400)
    bins = torch.stft(torch.from_numpy(sound).float(), 512, 160, 400, window, return_complex=True).abs() ** 2
    logs = (bins.T @ filters).clamp(min=1e-10).log10()
    logs = torch.maximum(logs, logs.max() - 8.0) / 4 + 1
    return logs[: len(logs) // 2 * 2].reshape(1, -1, 160)


def oracle_of(path: str | Path) -> "HearingOracle | Gemma3nOracle":
    """Transformers' model of a checkpoint."""
    is_3n = json.loads((Path(path) / "config.json").read_bytes())["model_type"] == "gemma3n"
    return Gemma3nOracle(path) if is_3n else HearingOracle(path)


class HearingOracle:
    """Transformers' model of a checkpoint, with Transformers' feature extractor."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

        fields, self._path = json.loads((Path(path) / "config.json").read_bytes()), str(path)
        self.model: Any = UltravoxReference(fields).load(path) if "stack_factor" in fields else load_oracle(path)
        if fields["model_type"] == "granite_speech":  # whose extractor needs torchaudio
            self.extractor: Any = _stacked_frames
        elif "stack_factor" in fields:
            self.extractor = WhisperFeatureExtractor(feature_size=16)
        else:
            self.extractor = AutoFeatureExtractor.from_pretrained(str(path))

    @torch.no_grad()
    def logprobs(
        self,
        token_ids: Sequence[int],
        sounds: Sequence[np.ndarray],
        num_prompt: int = 0,
        images: Sequence[np.ndarray] = (),
        film: Film | None = None,
    ) -> torch.Tensor:
        """Of each position of an expanded prompt: [tokens, V]. `film`: of an even number of frames, in the size that is read."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(token_ids)])}
        if images or film:
            from transformers import AutoImageProcessor

            processor = AutoImageProcessor.from_pretrained(self._path, backend="pil")
            inputs |= processor(list(images), return_tensors="pt") if images else {}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if film is not None:
                pixels, grid = in_pairs(processor, film.frames, film.frames.shape[1:3])
                inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
                inputs["video_second_per_grid"] = torch.tensor([2 / (film.rate or 24.0)])
        if sounds:
            inputs |= self._inputs(list(sounds), apart=not (images or film))
        if (given := inputs.pop("phi4", None)) is not None:
            inputs = {"inputs_embeds": phi4_embeddings(self.model, inputs["input_ids"], {}, given)}
            return self.model(**inputs).logits[0].log_softmax(-1)
        self.model.rope_deltas = None
        if (
            sounds and "inputs_embeds" in inputs
        ):  # each sound by itself: Transformers lets shorter ones hear what fills them
            ids = inputs.pop("input_ids")
            embeds = self.model.get_input_embeddings()(ids)
            heard = [self._heard(each) for each in inputs["inputs_embeds"]]
            embeds[ids == AUDIO] = torch.cat(heard)
            inputs["inputs_embeds"] = embeds
        return self.model(**inputs).logits[0].log_softmax(-1)

    def _heard(self, given: Any) -> torch.Tensor:
        if isinstance(given, torch.Tensor):
            return self.model.model.get_audio_features(given).pooler_output[0]
        return self.model.model.get_audio_features(**given).pooler_output

    def _inputs(self, sounds: list[np.ndarray], apart: bool = True) -> dict[str, Any]:
        """`apart`: of each sound by itself, where others change what is heard of it."""
        extract = functools.partial(self.extractor, sampling_rate=RATE, return_tensors="pt")
        config = self.model.config
        if config.model_type == "ultravox":
            options = {"padding": "longest", "truncation": False, "pad_to_multiple_of": 160}
            return {"sounds": [extract(sound, **options).input_features[0] for sound in sounds]}
        if config.model_type == "phi4_multimodal":
            return {"phi4": [extract(sound) for sound in sounds]}
        if config.model_type == "granite_speech":
            return {"inputs_embeds": [extract(sound) for sound in sounds]}
        if config.model_type == "voxtral":
            frames = 2 * config.audio_config.max_source_positions
            options = {"padding": True, "truncation": False, "pad_to_multiple_of": 160 * frames}
            bins = config.audio_config.num_mel_bins
            each = [extract(sound, **options).input_features.reshape(bins, -1, frames) for sound in sounds]
            return {"input_features": torch.cat([one.transpose(0, 1) for one in each])}
        if config.model_type.startswith("gemma4"):
            got, pad = [extract([sound]) for sound in sounds], torch.nn.utils.rnn.pad_sequence
            names = ("input_features", "input_features_mask")
            return {name: pad([one[name][0] for one in got], batch_first=True) for name in names}
        if config.model_type.startswith("qwen3_omni"):
            options = {"padding": "longest", "truncation": False, "return_attention_mask": True}
            each = [extract(sound, **options) for sound in sounds]
            given = [
                {"input_features": one.input_features, "feature_attention_mask": one.attention_mask} for one in each
            ]
            if apart:
                return {"inputs_embeds": given}
            (only,) = given
            return only
        if config.model_type.startswith("qwen2_5_omni"):
            each = [extract(sound, padding="max_length", return_attention_mask=True) for sound in sounds]
            masks = [one.attention_mask for one in each]
            features = torch.cat([one.input_features for one in each])
            return {"input_features": features, "feature_attention_mask": torch.cat(masks)}
        given = extract(sounds, padding="max_length", return_attention_mask=True)
        return {"input_features": given.input_features, "feature_attention_mask": given.attention_mask}
