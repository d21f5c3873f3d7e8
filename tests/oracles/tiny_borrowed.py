"""Tiny random checkpoints of models that Quire reads images of through Transformers' modules, with Transformers' own processor
beside them; and what Transformers itself makes of a text with images.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles.tiny_models import TEXT, load_oracle, randomize
from tests.oracles.tiny_vision import IMAGE, LINEAR, SIGLIP, rename_tensors, write_tiny_eyes_tokenizer

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
CONFIGS["Ovis2ForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "qwen2"},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 7, "vocab_size": 40, "num_visual_indicator_tokens": 5, "hidden_stride": 2,
    },
    "image_token_id": IMAGE + 1, "visual_indicator_token_ids": list(range(IMAGE + 2, IMAGE + 7)),
    "vocab_size": TEXT["vocab_size"], "hidden_size": 64,
}  # fmt: skip
CONFIGS["VideoLlama3ForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "qwen2"},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    },
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1,
}  # fmt: skip
CONFIGS["MiniCPMV4_6ForConditionalGeneration"] = {
    "text_config": TEXT | LINEAR | {"model_type": "qwen3_5_text"},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 32, "insert_layer_id": 1,
    },
    "insert_layer_id": 1, "image_size": 32, "image_token_id": IMAGE, "video_token_id": IMAGE + 1,
}  # fmt: skip
CONFIGS["Kimi_K25ForConditionalGeneration"] = {
    "text_config": TEXT | {
        "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 28, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
        "pos_emb_height": 8, "pos_emb_width": 8,
    },
    "projection_hidden_size": 32, "image_token_id": IMAGE, "video_token_id": IMAGE + 1,
}  # fmt: skip
CONFIGS["Lfm2VlForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "vision_config": {
        "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 4, "num_patches": 64, "vision_use_head": False,
    },
    "projector_hidden_size": 48, "image_token_id": IMAGE,
}  # fmt: skip
CONFIGS["VideoLlavaForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": _CLIP,
    "image_token_index": IMAGE,
    "video_token_index": IMAGE + 1,
}
CONFIGS["PerceptionLMForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "llama"},
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_use_cls_token": True,
    "vision_config": {
        "model_type": "timm_wrapper",
        "architecture": "vit_pe_core_large_patch14_336",
        "model_args": {
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 2,
            "img_size": [28, 28],
            "patch_size": 7,
            "global_pool": "",
            "use_post_transformer_norm": False,
            "init_values": 0.1,
            "ref_feat_shape": [4, 4],
        },
        "hidden_size": 32,
        "embed_dim": 32,
    },
    "projector_pooling_ratio": 2,
}
CONFIGS["FastVlmForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "qwen2"},
    "image_token_index": IMAGE,
    "image_seq_length": 4,
    "vision_config": {
        "model_type": "timm_wrapper",
        "architecture": "fastvit_mci3",
        "model_args": {"inference_mode": True, "embed_dims": [8, 16, 16, 32, 32], "layers": [1, 1, 1, 1, 1]},
        "hidden_size": 64,
        "num_features": 64,
    },
}
CONFIGS["AriaForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 490,
        "patch_size": 70,
    },
    "image_token_index": IMAGE,
    "projector_patch_to_query_dict": {49: 6},
}
CONFIGS["DeepseekOcr2ForConditionalGeneration"] = {
    "text_config": TEXT
    | {
        "model_type": "deepseek_ocr2_text",
        "max_position_embeddings": 4096,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
    },
    "vision_config": {
        "sam_config": {
            "hidden_size": 32,
            "output_channels": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 256,
            "patch_size": 4,
            "mlp_dim": 48,
            "window_size": 3,
            "global_attn_indexes": [1],
            "downsample_channels": [24, 32],
        },
        "encoder_config": TEXT
        | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    },
    "image_token_id": IMAGE,
}
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
PROCESSORS |= {
    "Ovis2ForConditionalGeneration": (
        {"image_processor_type": "Ovis2ImageProcessor", "size": {"height": 28, "width": 28}, "crop_to_patches": True,
         "max_patches": 4},
        {"processor_class": "Ovis2Processor", "image_seq_length": 4},
    ),
    "VideoLlama3ForConditionalGeneration": (
        {"image_processor_type": "VideoLlama3ImageProcessor", "patch_size": 4, "merge_size": 2, "min_pixels": 256,
         "max_pixels": 1600},
        {"processor_class": "VideoLlama3Processor"},
    ),
    "MiniCPMV4_6ForConditionalGeneration": (
        {"image_processor_type": "MiniCPMV4_6ImageProcessor", "patch_size": 4, "scale_resolution": 32, "max_slice_nums": 4,
         "use_image_id": False},
        {"processor_class": "MiniCPMV4_6Processor"},
    ),
    "Kimi_K25ForConditionalGeneration": (
        {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 4, "merge_size": 2,
         "size": {"max_height": 64, "max_width": 64}},
        {"processor_class": "Kimi_K25Processor"},
    ),
    "Lfm2VlForConditionalGeneration": (
        {"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 4, "tile_size": 32, "min_tiles": 2, "max_tiles": 3,
         "min_image_tokens": 4, "max_image_tokens": 16, "max_num_patches": 64, "downsample_factor": 2},
        {"processor_class": "Lfm2VlProcessor"},
    ),
}  # fmt: skip
PROCESSORS |= {
    "VideoLlavaForConditionalGeneration": (
        {
            "image_processor_type": "VideoLlavaImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
        },
        {
            "processor_class": "VideoLlavaProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "PerceptionLMForConditionalGeneration": (
        {
            "image_processor_type": "PerceptionLMImageProcessor",
            "size": {"height": 28, "width": 28},
            "tile_size": 28,
            "max_num_tiles": 4,
            "vision_input_type": "thumb+tile",
        },
        {"processor_class": "PerceptionLMProcessor", "patch_size": 7, "pooling_ratio": 2},
    ),
    "FastVlmForConditionalGeneration": (
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 128},
            "crop_size": {"height": 128, "width": 128},
        },
        {
            "processor_class": "LlavaProcessor",
            "patch_size": 64,
            "vision_feature_select_strategy": "full",
            "num_additional_image_tokens": 0,
        },
    ),
}
PROCESSORS |= {
    "AriaForConditionalGeneration": (
        {
            "image_processor_type": "AriaImageProcessor",
            "max_image_size": 490,
            "min_image_size": 336,
            "split_image": False,
        },
        {"processor_class": "AriaProcessor", "size_conversion": {490: 6}},
    ),
    "DeepseekOcr2ForConditionalGeneration": (
        {"image_processor_type": "DeepseekOcr2ImageProcessor", "size": {"height": 256, "width": 256}, "tile_size": 192},
        {"processor_class": "DeepseekOcr2Processor", "patch_size": 4},
    ),
}
OPTIONS = {
    "GotOcr2ForConditionalGeneration": {"num_image_tokens": 16},
    "AriaForConditionalGeneration": {"max_image_size": 490},
}
"""Of the processor, that are in no file."""
NEEDS = {
    "Kimi_K25ForConditionalGeneration": ["torchvision"],
    "Lfm2VlForConditionalGeneration": ["torchvision"],
    "PerceptionLMForConditionalGeneration": ["torchvision", "timm"],
    "FastVlmForConditionalGeneration": ["torchvision", "timm"],
}
"""Libraries that Transformers' processor or modules need."""
MARKERS = {"GotOcr2ForConditionalGeneration": "<imgpad>"}
BESIDE = {
    "Ovis2ForConditionalGeneration": ["<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
    "Lfm2VlForConditionalGeneration": ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"]
    + [f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)],
    "MiniCPMV4_6ForConditionalGeneration": [
        "<image_start>",
        "<image_end>",
        "<slice>",
        "</slice>",
        "<image_id>",
        "</image_id>",
    ],
}
SPECIALS = {
    "image_boundary_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<|im_end|>",
    "image_token": "<image>",
    "boi_token": "<img>",
    "eoi_token": "</img>",
    "video_token": "<video>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def lacks(architecture: str) -> list[str]:
    """Of the libraries that an architecture needs, those that are not installed."""
    return [name for name in NEEDS.get(architecture, ()) if importlib.util.find_spec(name) is None]


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
    if architecture.startswith("Kimi"):
        rename_tensors(path / "model.safetensors", "language_model.model.blocks.", "language_model.model.layers.")
    write_tiny_eyes_tokenizer(path, MARKERS.get(architecture, "<image>"), BESIDE.get(architecture, ()))
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
            options = self._options | self._own_options
            if type(self.processor).__name__.startswith("PerceptionLM"):  # its images have several numbers of squares
                options["return_tensors"] = None
            found = self.processor(text=[text], images=pictures, **options)
            if options["return_tensors"] is None:
                pixels = torch.cat(list(found["pixel_values"]))[None]
                found = {"input_ids": torch.tensor(found["input_ids"]), "pixel_values": pixels}
        return {name: value for name, value in found.items() if name not in ("attention_mask", "token_type_ids")}

    @torch.no_grad()
    def logprobs(self, inputs: dict[str, torch.Tensor], answer: Sequence[int]) -> torch.Tensor:
        """Of each position of the answer: [tokens, V]."""
        prompt = inputs["input_ids"]
        whole = torch.cat([prompt, torch.tensor([list(answer)])], dim=1)
        logits = self.model(**inputs | {"input_ids": whole}).logits[0].log_softmax(-1)
        return logits[prompt.shape[1] - 1 : -1]
