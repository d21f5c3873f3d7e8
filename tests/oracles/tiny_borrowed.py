"""Tiny random checkpoints of models that Quire reads images of through Transformers' modules, with Transformers' own processor
beside them; and what Transformers itself makes of a text with images.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_models import TEXT, load_oracle, randomize
from tests.oracles.tiny_vision import IMAGE, SIGLIP, write_tiny_eyes_tokenizer

from quire.multimodal.whole_processor import read_processor

_CLIP: dict[str, Any] = SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 16}
_SQUARES: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.4, 0.5]}
_SIDE: dict[str, Any] = {"size": {"height": 28, "width": 28}}

CONFIGS: dict[str, dict[str, Any]] = {
    "Idefics2ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": {name: value for name, value in SIGLIP.items() if name != "model_type"},
        "perceiver_config": {
            "hidden_size": 64, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1,
        },
        "image_token_id": IMAGE,
    },
    "LlavaNextVideoForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "video_token_index": IMAGE + 1,
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84]],
    },
    "DeepseekVLHybridForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SIGLIP,
        "high_res_vision_config": {
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
            "patch_size": 4, "mlp_dim": 48, "window_size": 3, "global_attn_indexes": [1], "model_type": "sam_vision_model",
        },
        "image_token_id": IMAGE,
    },
    "GotOcr2ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": {
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64,
            "patch_size": 4, "mlp_dim": 48, "window_size": 3, "global_attn_indexes": [1],
        },
        "image_token_index": IMAGE,
    },
}  # fmt: skip
for _config in CONFIGS.values():
    _config["tie_word_embeddings"] = False

PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Idefics2ForConditionalGeneration": (
        {"image_processor_type": "Idefics2ImageProcessor", "size": {"shortest_edge": 20, "longest_edge": 40},
         "do_image_splitting": False},
        {"processor_class": "Idefics2Processor", "image_seq_len": 5},
    ),
    "LlavaNextVideoForConditionalGeneration": (
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
         "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84]]},
        {"processor_class": "LlavaNextVideoProcessor", "patch_size": 7, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1},
    ),
    "DeepseekVLHybridForConditionalGeneration": (
        {"image_processor_type": "DeepseekVLHybridImageProcessor", "size": {"height": 28, "width": 28},
         "high_res_size": {"height": 64, "width": 64}, "min_size": 4},
        {"processor_class": "DeepseekVLHybridProcessor", "num_image_tokens": 16},
    ),
    "GotOcr2ForConditionalGeneration": (
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 64, "width": 64}},
        {"processor_class": "GotOcr2Processor", "num_image_tokens": 16},
    ),
}  # fmt: skip
OPTIONS = {"GotOcr2ForConditionalGeneration": {"num_image_tokens": 16}}
"""Of the processor, that are in no file."""
MARKERS = {"GotOcr2ForConditionalGeneration": "<imgpad>"}
SPECIALS = {
    "image_boundary_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<|im_end|>",
    "image_token": "<image>",
    "boi_token": "<img>",
    "eoi_token": "</img>",
    "video_token": "<video>",
}


def make_tiny_borrowed(architecture: str, path: Path, *, seed: int = 0) -> Path:
    """Write a tiny checkpoint into the folder `path`; returns that path."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path.mkdir(parents=True, exist_ok=True)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**CONFIGS[architecture])
    model = model_class(config).eval()
    randomize(model, seed)
    model.save_pretrained(path)
    write_tiny_eyes_tokenizer(path, MARKERS.get(architecture, "<image>"))
    pixels, whole = PROCESSORS[architecture]
    (path / "preprocessor_config.json").write_text(json.dumps(_SQUARES | pixels))
    (path / "processor_config.json").write_text(json.dumps(whole))
    tokenizer = path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_bytes()) | {"extra_special_tokens": SPECIALS}))
    return path


class BorrowedOracle:
    """Transformers' model of a checkpoint, with Transformers' processor."""

    def __init__(self, path: str | Path, options: dict[str, Any] | None = None) -> None:
        from transformers import AutoImageProcessor

        self._options = {"return_tensors": "pt", "add_special_tokens": False}
        self._own_options = options or {}
        images = AutoImageProcessor.from_pretrained(str(path), backend="pil")
        self.model, self.processor = load_oracle(path), read_processor(str(path), images)._processor

    def inputs(self, text: str, images: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """What the processor makes of a text with its images; of a text alone, its tokenizer."""
        from PIL import Image

        found = self.processor.tokenizer([text], **self._options)
        if images:
            pictures = [Image.fromarray(image) for image in images]
            found = self.processor(text=[text], images=pictures, **self._options, **self._own_options)
        return {name: value for name, value in found.items() if name not in ("attention_mask", "token_type_ids")}

    @torch.no_grad()
    def logprobs(self, inputs: dict[str, torch.Tensor], answer: Sequence[int]) -> torch.Tensor:
        """Of each position of the answer: [tokens, V]."""
        prompt = inputs["input_ids"]
        whole = torch.cat([prompt, torch.tensor([list(answer)])], dim=1)
        logits = self.model(**inputs | {"input_ids": whole}).logits[0].log_softmax(-1)
        return logits[prompt.shape[1] - 1 : -1]
