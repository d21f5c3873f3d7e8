"""Tiny random checkpoints with an encoder beside their decoder, made by Transformers; and what that gives for both halves."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_models import HALVES, T5, VOCAB_SIZE, load_oracle, randomize, write_tiny_tokenizer

RATE = 16000
START: int = HALVES["decoder_start_token_id"]
LANGUAGES = ("en", "de", "fr")
SPECIAL = (
    "startoftranscript",
    *LANGUAGES,
    "translate",
    "transcribe",
    "startoflm",
    "startofprev",
    "nospeech",
    "notimestamps",
)
NUM_TIMES = 51
"""Times that the tiny models of Whisper can write: a second, in steps of 20 ms."""
_IDS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_TEXT: dict[str, Any] = HALVES | {"max_position_embeddings": 96, "scale_embedding": True}
GATED = {"feed_forward_proj": "gated-gelu"}
IMAGE = 370
"""The token of Florence-2's images, which no text makes."""
CONFIGS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": _TEXT,
    "MBartForConditionalGeneration": _TEXT,
    "MarianMTModel": _TEXT | {"decoder_vocab_size": VOCAB_SIZE},
    "PegasusForConditionalGeneration": _TEXT,
    "M2M100ForConditionalGeneration": _TEXT,
    "T5ForConditionalGeneration": T5 | {"n_positions": 96},
    "MT5ForConditionalGeneration": T5 | GATED,
    "UMT5ForConditionalGeneration": T5 | GATED | {"tie_word_embeddings": False},
    "VisionEncoderDecoderModel": {
        "encoder": {
            "model_type": "donut-swin", "image_size": [44, 36], "patch_size": 2, "embed_dim": 12, "depths": [2, 2, 1],
            "num_heads": [2, 2, 3], "window_size": 4, "hidden_size": 48,
        },
        "decoder": _IDS | _TEXT | {"model_type": "mbart", "is_decoder": True, "add_cross_attention": True},
        "decoder_start_token_id": START, "tie_word_embeddings": False,
    },
    "Florence2ForConditionalGeneration": {
        "text_config": _IDS | _TEXT | {"model_type": "bart", "scale_embedding": False},
        "vision_config": {
            "depths": [1, 2], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1],
            "patch_prenorm": [False, True], "embed_dim": [12, 24], "num_heads": [2, 3], "num_groups": [3, 4],
            "window_size": 3, "projection_dim": 32, "max_position_embeddings": 12,
        },
        "image_token_id": IMAGE,
    },
    "WhisperForConditionalGeneration": HALVES
    | {
        "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 96, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "VisionEncoderDecoderModel": {
        "image_processor_type": "DonutImageProcessor", "size": {"height": 44, "width": 36},
    },
    "Florence2ForConditionalGeneration": {
        "image_processor_type": "CLIPImageProcessor", "size": {"height": 40, "width": 32}, "do_center_crop": False,
    },
}  # fmt: skip
"""Of images."""


def make_tiny_encoder_decoder(architecture: str, path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny checkpoint into the folder `path`; returns that path. Sounds are at most a second long."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**(_IDS | CONFIGS[architecture] | overrides))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomize(model, seed)
    model.save_pretrained(path)
    write_tiny_tokenizer(path)
    _add_tokens(path)
    if architecture in PROCESSORS:
        (path / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[architecture]))
    if "num_mel_bins" in CONFIGS[architecture]:
        bins = config.num_mel_bins
        transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=1, sampling_rate=RATE).save_pretrained(
            path
        )
    return path


def _add_tokens(path: Path) -> None:
    """Whisper's special tokens, from START on."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([f"<unused{number}>" for number in range(START - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIAL])
    times = [f"<|{step * 0.02:.2f}|>" for step in range(NUM_TIMES)]
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    assert tokenizer.token_to_id("<|startoftranscript|>") == START
    tokenizer.save(str(path / "tokenizer.json"))


@functools.cache
def draw_sound(seed: int, num_samples: int) -> np.ndarray:
    """A few tones and some noise."""
    draw = np.random.default_rng(seed)
    times = np.arange(num_samples) / RATE
    tones = sum(np.sin(2 * np.pi * draw.uniform(80, 4000) * times) * draw.uniform(0.05, 0.3) for _ in range(4))
    return (tones + 0.02 * draw.standard_normal(num_samples)).astype(np.float32)


class EncoderDecoderOracle:
    """Transformers' model of a checkpoint, with Transformers' feature extractor."""

    def __init__(self, path: str | Path) -> None:
        self.model = load_oracle(path)
        self._path = str(path)

    @functools.cached_property
    def extractor(self) -> Any:
        from transformers import AutoFeatureExtractor

        return AutoFeatureExtractor.from_pretrained(self._path)

    @functools.cached_property
    def processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._path, backend="pil")

    @torch.no_grad()
    def logprobs(
        self,
        decoder_ids: Sequence[int],
        *,
        sound: np.ndarray | None = None,
        image: np.ndarray | None = None,
        ids: Sequence[int] = (),
    ) -> torch.Tensor:
        """Of each position of the decoder's tokens: [tokens, V]."""
        inputs: dict[str, Any] = {"decoder_input_ids": torch.tensor([list(decoder_ids)]), "use_cache": False}
        places = list[int]()
        if sound is not None:
            inputs["input_features"] = self.extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        if image is not None:
            inputs["pixel_values"] = self.processor(
                image, return_tensors="pt", input_data_format="channels_last"
            ).pixel_values
            if ids:
                rows = self.model.get_image_features(inputs["pixel_values"]).pooler_output.shape[1]
                places = [IMAGE] * rows
        if ids:
            inputs["input_ids"] = torch.tensor([[*places, *ids]])
        return self.model(**inputs).logits[0].log_softmax(-1)
