"""Gemma 3n's tiny checkpoint, and Transformers' model of it. Its eyes are the library timm's; where that is not installed, a
convolution's.
"""

import copy
import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_models import TEXT, randomize

ARCHITECTURE = "Gemma3nForConditionalGeneration"
HAS_TIMM = importlib.util.find_spec("timm") is not None
EYES, EARS = 320, 352
"""From which token on embeddings are those of images', and of sounds' own tokens."""
BOI, BOA = 301, 302
PROCESSOR = {
    "image_processor_type": "SiglipImageProcessorFast", "size": {"height": 96, "width": 96}, "resample": 2,
    "do_normalize": False, "processor_class": "Gemma3nProcessor",
}  # fmt: skip
"""Of images, in preprocessor_config.json."""


@functools.cache
def register_eyes() -> None:
    """Without timm: a convolution in its place, in Transformers' model and in the engine of this process."""
    if HAS_TIMM:
        return
    from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel

    class Squares(PreTrainedModel):
        """Three by three embeddings of an image."""

        config_class = Gemma3nVisionConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.conv = torch.nn.Conv2d(3, config.hidden_size, 32, 32)
            self.post_init()

        def forward(self, pixel_values: torch.Tensor, **options: Any) -> Any:
            return SimpleNamespace(last_hidden_state=self.conv(pixel_values))

    AutoModel.register(Gemma3nVisionConfig, Squares, exist_ok=True)


def _blocks() -> list[Any]:
    """The layers of its eyes, few and narrow, in timm's words."""
    if not HAS_TIMM:
        return []
    from timm.models._efficientnet_builder import decode_arch_def

    last = ["uir_r1_a5_k5_s2_e2_c32", "mqa_r1_k3_h2_s1_d8_c32", "uir_r1_a0_k0_s1_e2_c32"]
    return decode_arch_def([["er_r1_k3_s2_e2_c16"], ["uir_r1_a3_k5_s2_e2_c16"], ["uir_r1_a5_k5_s2_e2_c24"], last])


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
            "hidden_size": 2048, "vocab_size": 32, "vocab_offset": EYES, "architecture": "mobilenetv5_300m_enc",
            "model_args": {"block_args": _blocks(), "stem_size": 16, "msfa_output_resolution": 3},
        },
        "audio_soft_tokens_per_image": 20, "vision_soft_tokens_per_image": 9, "image_token_id": image, "audio_token_id": audio,
        "boi_token_id": BOI, "eoi_token_id": EYES, "boa_token_id": BOA, "eoa_token_id": EARS, "tie_word_embeddings": False,
    }  # fmt: skip


def make_tiny_gemma3n(path: Path, fields: dict[str, Any], seed: int = 0) -> None:
    """Write config.json and weights."""
    from transformers import Gemma3nConfig, Gemma3nForConditionalGeneration

    register_eyes()
    config = Gemma3nConfig(**fields)
    config._attn_implementation = "eager"
    model = Gemma3nForConditionalGeneration(copy.deepcopy(config)).eval()
    model.config = config  # timm writes into the arguments of its models
    randomize(model, seed)
    model.save_pretrained(path)


class Gemma3nOracle:
    """Transformers' model, to which each sound is given by itself: shorter ones would hear what fills them."""

    def __init__(self, path: str | Path) -> None:
        from transformers import (
            AutoFeatureExtractor,
            AutoImageProcessor,
            Gemma3nConfig,
            Gemma3nForConditionalGeneration,
        )

        register_eyes()
        config = Gemma3nConfig.from_pretrained(str(path))
        config._attn_implementation = "eager"
        self.model: Any = Gemma3nForConditionalGeneration.from_pretrained(str(path), config=config).eval()
        extract = AutoFeatureExtractor.from_pretrained(str(path))
        self._extract = functools.partial(extract, sampling_rate=16000, return_tensors="pt")
        self._see = AutoImageProcessor.from_pretrained(str(path), backend="pil")

    @torch.no_grad()
    def logprobs(
        self,
        token_ids: Sequence[int],
        sounds: Sequence[np.ndarray],
        num_prompt: int = 0,
        images: Sequence[np.ndarray] = (),
    ) -> torch.Tensor:
        """Of each position of an expanded prompt and its answer: [tokens, V]."""
        ids = torch.tensor([list(token_ids)])
        pixels = self._see(list(images), return_tensors="pt")["pixel_values"] if images else None
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
