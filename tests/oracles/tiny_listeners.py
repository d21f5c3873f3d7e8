"""Tiny random checkpoints of models that hear sounds in their prompts, with the feature extractor's config beside them; and what
Transformers itself gives for a prompt with sounds.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_encoder_decoder import RATE
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, randomize, write_tiny_tokenizer

AUDIO = 300
"""The marker of a sound in the tiny models' prompts: an id that no text makes."""
SPECIAL = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "num_mel_bins": 16,
    "max_source_positions": 50,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2AudioForConditionalGeneration": {
        "text_config": _TEXT | {"model_type": "qwen2"},
        "audio_config": _WHISPER | {"model_type": "qwen2_audio_encoder"},
        "audio_token_index": AUDIO,
    },
}
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
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**(CONFIGS[architecture] | overrides))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomize(model, seed)
    model.save_pretrained(path)
    _write_tokenizer(path)
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


class HearingOracle:
    """Transformers' model of a checkpoint, with Transformers' feature extractor."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoFeatureExtractor

        self.model = load_oracle(path)
        self.extractor = AutoFeatureExtractor.from_pretrained(str(path))

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], sounds: Sequence[np.ndarray]) -> torch.Tensor:
        """Of each position of an expanded prompt: [tokens, V]."""
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(token_ids)])}
        if sounds:
            inputs |= self._inputs(list(sounds))
        return self.model(**inputs).logits[0].log_softmax(-1)

    def _inputs(self, sounds: list[np.ndarray]) -> dict[str, Any]:
        given = self.extractor(
            sounds, sampling_rate=RATE, return_tensors="pt", padding="max_length", return_attention_mask=True
        )
        return {"input_features": given.input_features, "feature_attention_mask": given.attention_mask}
