"""Gemma 3n's tiny checkpoint, with eyes where the library timm is, and Transformers' model of it."""

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_models import TEXT, randomize

from quire.layers.vision.no_eyes import without_timm

ARCHITECTURE = "Gemma3nForConditionalGeneration"
HAS_TIMM = importlib.util.find_spec("timm") is not None
EYES, EARS = 320, 352
"""From which token on embeddings are those of images', and of sounds' own tokens."""


def gemma3n_fields(image: int, audio: int) -> dict[str, Any]:
    """Of config.json, with these tokens; those that end an item have embeddings of their own kind."""
    return {
        "text_config": TEXT | {
            "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 2, "altup_num_inputs": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 8, "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 300, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.95, 0.0] * 2,
        },
        "audio_config": {
            "hidden_size": 32, "vocab_size": 32, "vocab_offset": EARS, "conf_attention_chunk_size": 6, "input_feat_size": 128,
            "conf_attention_context_left": 7, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2,
            "conf_conv_kernel_size": 3, "sscp_conv_channel_size": [8, 4],
        },
        "vision_config": {
            "hidden_size": 2048, "vocab_size": 32, "vocab_offset": EYES, "architecture": "mobilenetv5_base",
            "model_args": {"block_args": [["er_r1_k3_s2_e2_c16"], ["uir_r1_a3_k5_s2_e2_c16"], ["uir_r1_a5_k5_s2_e2_c32"],
                ["uir_r1_a5_k5_s2_e2_c32"]], "stem_size": 16, "num_features": 2048},
        },
        "audio_soft_tokens_per_image": 20, "vision_soft_tokens_per_image": 256, "image_token_id": image, "audio_token_id": audio,
        "boi_token_id": 301, "eoi_token_id": EYES, "boa_token_id": 302, "eoa_token_id": EARS, "tie_word_embeddings": False,
    }  # fmt: skip


def make_tiny_gemma3n(path: Path, fields: dict[str, Any], seed: int = 0) -> None:
    """Write config.json and weights."""
    from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration

    config = Gemma3nConfig(**fields)
    seen = config.vision_config.to_dict()
    config._attn_implementation = "eager"
    model = Gemma3nForConditionalGeneration(config if HAS_TIMM else without_timm(config)).eval()
    randomize(model, seed)
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_bytes()) | {"vision_config": seen}
    (path / "config.json").write_text(json.dumps(written))


class Gemma3nOracle:
    """Transformers' model, to which each sound is given by itself: shorter ones would hear what fills them."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoFeatureExtractor, Gemma3nConfig, Gemma3nForConditionalGeneration

        config = Gemma3nConfig.from_pretrained(str(path))
        config._attn_implementation = "eager"
        config = config if HAS_TIMM else without_timm(config)
        self.model: Any = Gemma3nForConditionalGeneration.from_pretrained(str(path), config=config).eval()
        extract = AutoFeatureExtractor.from_pretrained(str(path))
        self._extract = functools.partial(extract, sampling_rate=16000, return_tensors="pt")

    @torch.no_grad()
    def logprobs(
        self,
        token_ids: Sequence[int],
        sounds: Sequence[np.ndarray],
        num_prompt: int = 0,
        pixels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Of each position of an expanded prompt and its answer: [tokens, V]."""
        ids = torch.tensor([list(token_ids)])
        heard = [self._alone(sound) for sound in sounds]
        where = ids[0] == self.model.config.audio_token_id

        def place(decoder: Any, args: Any, given: dict[str, Any]) -> None:
            if heard:
                given["inputs_embeds"][0, where] = torch.cat(heard)

        hook = self.model.get_decoder().register_forward_pre_hook(place, with_kwargs=True)
        try:
            return self.model(input_ids=ids, pixel_values=pixels).logits[0].log_softmax(-1)
        finally:
            hook.remove()

    def _alone(self, sound: np.ndarray) -> torch.Tensor:
        """The embeddings of a sound, with those that fill its places."""
        config, given = self.model.config, self._extract([sound])
        found: list[torch.Tensor] = []
        ids = torch.full((1, config.audio_soft_tokens_per_image), config.audio_token_id)
        hook = self.model.get_decoder().register_forward_pre_hook(
            lambda decoder, args, kwargs: found.append(kwargs["inputs_embeds"][0].clone()), with_kwargs=True
        )
        self.model(input_ids=ids, **given)
        hook.remove()
        return found[0]
