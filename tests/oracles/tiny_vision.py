"""Tiny random checkpoints of models that see, made by Transformers, with the image processor's config beside them; and what
Transformers itself gives for a prompt with images.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.oracles import tiny_deepseek_vl2, tiny_molmo
from tests.oracles.tiny_models import TEXT, load_oracle, randomize, write_tiny_tokenizer
from tests.oracles.tiny_phi4 import ARCHITECTURE as PHI4
from tests.oracles.tiny_phi4 import SquaresProcessor, phi4_embeddings, phi4_fields

from quire.multimodal.whole_processor import read_processor

IMAGE = 300
"""The marker of an image in the tiny models' prompts: an id that no text makes."""

_CLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PIXELS: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.4, 0.5]}

SIGLIP = _CLIP | {"model_type": "siglip_vision_model"}

CONFIGS: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": _CLIP | {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": IMAGE,
    },
    "LlavaNextForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
        "vision_config": _CLIP | {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84]],
    },
    "LlavaOnevisionForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": SIGLIP | {"vision_use_head": False},
        "image_token_index": IMAGE,
        "video_token_index": IMAGE + 1,
        "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84]],
        "vision_aspect_ratio": "anyres_max_2",
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 64,
            "patch_size": 4,
        },
        "image_token_index": IMAGE,
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    },
    "SmolVLMForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 24,
            "patch_size": 4,
        },
        "image_token_id": IMAGE,
        "scale_factor": 3,
        "pad_token_id": 2,
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4},
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 1,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": TEXT
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 40,
            "out_hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1, 3],
        },
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 1,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": TEXT
        | {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 40,
            "out_hidden_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
        },
        "image_token_id": IMAGE,
        "video_token_id": IMAGE + 1,
        "vision_start_token_id": 302,
        "vision_end_token_id": 303,
    },
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS["Idefics3ForConditionalGeneration"] = CONFIGS["SmolVLMForConditionalGeneration"]
CONFIGS["Qwen3VLMoeForConditionalGeneration"] = CONFIGS["Qwen3VLForConditionalGeneration"] | {
    "text_config": CONFIGS["Qwen3VLForConditionalGeneration"]["text_config"] | _EXPERTS
}
CONFIGS["Qwen3_5ForConditionalGeneration"] = CONFIGS["Qwen3VLForConditionalGeneration"] | {
    "text_config": TEXT | LINEAR,
    "vision_config": {
        name: value
        for name, value in CONFIGS["Qwen3VLForConditionalGeneration"]["vision_config"].items()
        if name != "deepstack_visual_indexes"
    },
}
CONFIGS["Qwen3_5MoeForConditionalGeneration"] = CONFIGS["Qwen3_5ForConditionalGeneration"] | {
    "text_config": TEXT | LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 32}
}
_APART = {"tie_word_embeddings": False}
_PATCHES_OF_4 = {"image_size": 24, "patch_size": 4}
# Transformers' Aya Vision forgets the scale of Cohere's logits, with which its text model was trained.
CONFIGS |= {
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT
        | {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 2}
        | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": SIGLIP | _PATCHES_OF_4 | {"vision_use_head": False},
        "mm_tokens_per_image": 9,
        "boi_token_index": IMAGE,
        "eoi_token_index": IMAGE + 2,
        "image_token_index": IMAGE + 1,
    }
    | _APART,
    "PaliGemmaForConditionalGeneration": {
        "text_config": TEXT
        | {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 96}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": SIGLIP | {"image_size": 20, "patch_size": 4, "vision_use_head": False},
        "image_token_index": IMAGE,
        "projection_dim": 64,
    }
    | _APART,
    "Llama4ForConditionalGeneration": {
        "text_config": TEXT
        | {"head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 3, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 24, "no_rope_layer_interval": 3},
        "vision_config": _CLIP
        | _PATCHES_OF_4
        | {"intermediate_size": 128, "vision_output_dim": 40, "projector_input_dim": 40}
        | {"projector_output_dim": 40, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "image_token_index": IMAGE + 1,
        "boi_token_index": IMAGE + 2,
        "eoi_token_index": IMAGE + 3,
    }
    | _APART,
    "InternVLForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": _CLIP | _PATCHES_OF_4 | {"attention_bias": True},
        "image_token_id": IMAGE,
    }
    | _APART,
    "AyaVisionForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "cohere2", "head_dim": 16, "sliding_window": 20, "logit_scale": 1.0},
        "vision_config": SIGLIP | _PATCHES_OF_4,
        "image_token_index": IMAGE,
        "alignment_intermediate_size": 80,
    }
    | _APART,
    "DeepseekVLForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SIGLIP,
        "image_token_id": IMAGE,
    }
    | _APART,
    "LightOnOcrForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "qwen3", "head_dim": 16},
        "vision_config": CONFIGS["Mistral3ForConditionalGeneration"]["vision_config"],
        "image_token_id": IMAGE,
    }
    | _APART,
}
_GLM_SIGHT: dict[str, Any] = {
    "vision_config": {
        "depth": 3, "hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4,
        "image_size": 24,
    },
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "image_start_token_id": 302, "image_end_token_id": 303,
}  # fmt: skip
_GLM_ROPE: dict[str, Any] = {
    "head_dim": 32, "hidden_size": 128,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
_GLM_SIGHT["vision_config"]["out_hidden_size"] = 128
CONFIGS["GlmOcrForConditionalGeneration"] = _GLM_SIGHT | {"text_config": TEXT | _GLM_ROPE} | _APART
CONFIGS["PaddleOCRVLForConditionalGeneration"] = {
    "text_config": TEXT
    | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    "vision_config": {name: value for name, value in SIGLIP.items() if name != "model_type"}
    | _PATCHES_OF_4
    | {"image_size": 20},
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "vision_start_token_id": 302, "vision_end_token_id": 303,
} | _APART  # fmt: skip
CONFIGS["Exaone4_5_ForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "vision_config": CONFIGS["Qwen2_5_VLForConditionalGeneration"]["vision_config"] | {"num_key_value_heads": 1},
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1,
} | _APART  # fmt: skip
CONFIGS["VipLlavaForConditionalGeneration"] = CONFIGS["LlavaForConditionalGeneration"] | {
    "vision_feature_layer": [-2, 1]
}
CONFIGS["Cohere2VisionForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "cohere2", "head_dim": 16, "sliding_window": 20, "logit_scale": 1.0},
    "vision_config": SIGLIP | _PATCHES_OF_4,
    "image_token_id": IMAGE,
    "alignment_intermediate_size": 80,
} | _APART
CONFIGS["Gemma4ForConditionalGeneration"] = {
    "text_config": TEXT
    | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 10, "num_kv_shared_layers": 2, "num_hidden_layers": 4}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 12}
    | {"vocab_size_per_layer_input": TEXT["vocab_size"], "max_position_embeddings": 1024}
    | {"use_bidirectional_attention": "vision"},
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 90,
        "use_clipped_linears": True, "standardize": True,
    },
    "audio_config": None,
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "audio_token_id": IMAGE + 2, "boi_token_id": IMAGE + 3,
    "eoi_token_id": IMAGE + 4,
} | _APART  # fmt: skip
CONFIGS["Gemma4UnifiedForConditionalGeneration"] = CONFIGS["Gemma4ForConditionalGeneration"] | {
    "text_config": TEXT
    | {"head_dim": 16, "global_head_dim": 24, "sliding_window": 10, "num_hidden_layers": 3}
    | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "max_position_embeddings": 1024},
    "vision_config": {
        "mm_embed_dim": 32, "output_proj_dims": 32, "patch_size": 4, "pooling_kernel_size": 2, "mm_posemb_size": 90,
    },
}  # fmt: skip
CONFIGS["QianfanOCRForConditionalGeneration"] = CONFIGS["InternVLForConditionalGeneration"] | {
    "text_config": TEXT | {"model_type": "qwen3", "head_dim": 16},
    "vision_config": _CLIP | _PATCHES_OF_4,
}
CONFIGS["JanusForConditionalGeneration"] = {
    "text_config": TEXT | {"model_type": "llama"},
    "vision_config": {name: value for name, value in SIGLIP.items() if name != "intermediate_size"}
    | {"model_type": "janus_vision_model", "mlp_ratio": 1.5, "projection_dim": 64, "depth": 3},
    "vq_config": {
        "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "latent_channels": 32, "num_embeddings": 8,
        "projection_dim": 64, "image_token_embed_dim": 64,
    },
    "image_token_id": IMAGE,
} | _APART  # fmt: skip
CONFIGS["Glm4vForConditionalGeneration"] = _GLM_SIGHT | {"text_config": TEXT | _GLM_ROPE} | _APART
CONFIGS["Glm46VForConditionalGeneration"] = CONFIGS["Glm4vForConditionalGeneration"] | {
    "text_config": TEXT | _GLM_ROPE | {"model_type": "glm4v_text"},
    "vision_config": _GLM_SIGHT["vision_config"] | {"model_type": "glm4v_vision"},
}
CONFIGS["Glm4vMoeForConditionalGeneration"] = _GLM_SIGHT | {
    "text_config": TEXT | _GLM_ROPE | {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "attention_bias": True,
    },
} | _APART  # fmt: skip
CONFIGS[PHI4] = phi4_fields(IMAGE, IMAGE + 1)
CONFIGS[tiny_deepseek_vl2.ARCHITECTURE] = tiny_deepseek_vl2.CONFIG
CONFIGS[tiny_molmo.ARCHITECTURE] = tiny_molmo.config(TEXT, IMAGE)
OMNI3 = "Qwen3OmniMoeThinkerForConditionalGeneration"
CONFIGS[OMNI3] = CONFIGS["Qwen3VLMoeForConditionalGeneration"] | {
    "audio_config": {
        "encoder_layers": 1, "d_model": 16, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 16,
        "downsample_hidden_size": 4, "output_dim": 64,
    },
}  # fmt: skip
_QWEN_PIXELS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 1600},
}
_GLM_PIXELS = _QWEN_PIXELS | {
    "image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 512, "longest_edge": 3200},
}  # fmt: skip
_LLAVA_PIXELS: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 28},
    "crop_size": {"height": 28, "width": 28},
}
_TILES: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 24, "width": 24}, "crop_to_patches": True,
    "max_patches": 3,
}  # fmt: skip
PROCESSORS: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": _LLAVA_PIXELS,
    "VipLlavaForConditionalGeneration": _LLAVA_PIXELS,
    "LlavaNextForConditionalGeneration": {
        "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28}, "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [28, 84]],
    },
    "LlavaOnevisionForConditionalGeneration": {
        "image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 28, "width": 28},
        "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84]],
    },
    "Mistral3ForConditionalGeneration": {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}, "patch_size": 4,
    },
    tiny_molmo.ARCHITECTURE: tiny_molmo.PROCESSOR,
    "SmolVLMForConditionalGeneration": {
        "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24},
    },
    "Idefics3ForConditionalGeneration": {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 24},
    },
    "PaliGemmaForConditionalGeneration": {
        "image_processor_type": "SiglipImageProcessor", "size": {"height": 20, "width": 20},
    },
    "Gemma3ForConditionalGeneration": {
        "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24},
    },
    "Gemma4ForConditionalGeneration": {
        "image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70,
        "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
    },
    "Gemma4UnifiedForConditionalGeneration": {
        "patch_size": 8, "pooling_kernel_size": 1, "max_soft_tokens": 70, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
    },
    **dict.fromkeys(("InternVLForConditionalGeneration", "QianfanOCRForConditionalGeneration"), _TILES),
    "Cohere2VisionForConditionalGeneration": {
        "size": {"height": 24, "width": 24}, "crop_to_patches": True, "max_patches": 3,
    },
    "Llama4ForConditionalGeneration": {"size": {"height": 24, "width": 24}, "crop_to_patches": True, "max_patches": 3},
    "AyaVisionForConditionalGeneration": _TILES,
    "DeepseekVLForConditionalGeneration": {
        "image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 28, "width": 28},
    },
    "JanusForConditionalGeneration": {
        "image_processor_type": "JanusImageProcessor", "size": {"height": 28, "width": 28}, "min_size": 4,
    },
    "LightOnOcrForConditionalGeneration": {
        "image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}, "patch_size": 4,
    },
    **dict.fromkeys(
        (
            "Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
            "GlmOcrForConditionalGeneration",
        ), _GLM_PIXELS
    ),
    "PaddleOCRVLForConditionalGeneration": {
        "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 1,
        "size": {"shortest_edge": 256, "longest_edge": 1600},
    },
    **dict.fromkeys(("Exaone4_5_ForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), _QWEN_PIXELS),
    PHI4: {},
    OMNI3: _QWEN_PIXELS,
    "Qwen3_5ForConditionalGeneration": _QWEN_PIXELS,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_PIXELS,
    "Qwen2VLForConditionalGeneration": _QWEN_PIXELS,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_PIXELS,
    "Qwen3VLForConditionalGeneration": _QWEN_PIXELS,
}  # fmt: skip


def make_tiny_vision(
    architecture: str, path: str | Path, *, seed: int = 0, processor: dict[str, Any] | None = None, **overrides: Any
) -> Path:
    """Write a tiny checkpoint that sees into the folder `path`; returns that path. `processor`: values of its own for the
    image processor's config."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    register_tiles()
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if architecture == tiny_deepseek_vl2.ARCHITECTURE:
        tiny_deepseek_vl2.DeepseekVL2Reference(CONFIGS[architecture] | overrides).save(path, seed)
        write_tiny_eyes_tokenizer(path, "<image>")
        return path
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**(CONFIGS[architecture] | overrides))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomize(model, seed)
    model.save_pretrained(path)
    if architecture.startswith("Qianfan"):
        rename_tensors(path / "model.safetensors", "language_model.model.encoder.", "language_model.model.")
    is_molmo = architecture == tiny_molmo.ARCHITECTURE
    marker = "<|image|>" if is_molmo or architecture.startswith("Llama4") else "<image>"
    write_tiny_eyes_tokenizer(path, marker, (*tiny_molmo.TOKENS, *tiny_molmo.FRAMES) if is_molmo else ())
    settings = _PIXELS | (processor or PROCESSORS[architecture])
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    if is_molmo:
        tiny_molmo.finish(path, settings)
    return path


def rename_tensors(file: Path, written: str, published: str) -> None:
    """Where Transformers writes names otherwise than they are in published checkpoints, which it reads."""
    from safetensors.torch import load_file, save_file

    tensors = {name.replace(written, published): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@functools.cache
def register_tiles() -> None:
    """A processor for models whose own needs torchvision: squares row by row, and how many rows and columns they are."""
    from transformers import (
        AutoImageProcessor,
        Cohere2VisionConfig,
        Gemma4UnifiedConfig,
        Llama4Config,
        Phi4MultimodalConfig,
    )
    from transformers.image_processing_utils import BaseImageProcessor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
        GotOcr2ImageProcessorPil,
        get_optimal_tiled_canvas,
    )

    class TilesImageProcessor(GotOcr2ImageProcessorPil):
        def __call__(self, images: Any, **options: Any) -> Any:
            found = super().__call__(images, **options)
            image, side = images[0] if isinstance(images, list) else images, self.size["height"]
            across, down = get_optimal_tiled_canvas(image.shape[:2], (side, side), self.min_patches, self.max_patches)
            found["aspect_ratios"] = np.array([[down, across]])
            return found

    backends = dict.fromkeys(("pil", "torchvision"), TilesImageProcessor)
    for config in (Cohere2VisionConfig, Llama4Config):
        AutoImageProcessor.register(config, image_processor_classes=backends, exist_ok=True)
    cut = dict.fromkeys(("pil", "torchvision"), type("Squares", (SquaresProcessor, BaseImageProcessor), {}))
    AutoImageProcessor.register(Phi4MultimodalConfig, image_processor_classes=cut, exist_ok=True)
    tiny_molmo.register_processor()
    squares = dict.fromkeys(("pil", "torchvision"), Gemma4ImageProcessorPil)  # which are cut whole
    AutoImageProcessor.register(Gemma4UnifiedConfig, image_processor_classes=squares, exist_ok=True)


def write_tiny_eyes_tokenizer(path: Path, marker: str, also: Sequence[str] = ()) -> None:
    """The tiny tokenizer, with a marker of images (`also`: tokens right behind it), and a chat template that takes parts."""
    from tokenizers import Tokenizer

    write_tiny_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens([f"<unused{number}>" for number in range(IMAGE - tokenizer.get_vocab_size())])
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    around = ["<fake_token_around_image>", "<global-img>", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>"]
    around += ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<begin_of_image>", "<end_of_image>"]
    around += ["<|IMG_LINE_BREAK|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
    tokenizer.add_special_tokens([marker, *(also or around), *places, "<video>"])
    assert tokenizer.token_to_id(marker) == IMAGE
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_bytes())
    (path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": _TEMPLATE.replace("<image>", marker)})
    )


@functools.cache
def draw_image(seed: int, height: int, width: int) -> np.ndarray:
    """Pixels of coloured squares, so that neighbouring patches differ."""
    draw = np.random.default_rng(seed)
    squares = draw.integers(0, 256, (-(-height // 5), -(-width // 5), 3), dtype=np.uint8)
    return squares.repeat(5, axis=0).repeat(5, axis=1)[:height, :width]


class VisionOracle:
    """Transformers' model of a checkpoint, with Transformers' processor."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoImageProcessor

        fields = json.loads((Path(path) / "config.json").read_bytes())
        if fields["model_type"] == "deepseek_vl_v2":
            self.model: Any = tiny_deepseek_vl2.DeepseekVL2Reference(fields).load(path)
            return
        self.model = load_oracle(path)
        self.processor = AutoImageProcessor.from_pretrained(str(path), backend="pil")
        if type(self.model).__name__ == tiny_molmo.ARCHITECTURE:
            self.processor = read_processor(str(path), self.processor)._processor

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], images: Sequence[np.ndarray], num_prompt: int = 0) -> torch.Tensor:
        """Of each position of an expanded prompt and its answer: [tokens, V]."""
        if isinstance(self.model, tiny_deepseek_vl2.DeepseekVL2Reference):
            return self.model.logprobs(list(token_ids), list(images), IMAGE)
        if type(self.model).__name__ == tiny_molmo.ARCHITECTURE:
            return tiny_molmo.logprobs(self.model, self.processor, token_ids, images)
        inputs: dict[str, Any] = {"input_ids": torch.tensor([list(token_ids)])}
        if len(images):
            name = type(self.model).__name__
            if name == PHI4:
                embeds = phi4_embeddings(
                    self.model, inputs["input_ids"], self.processor(list(images), return_tensors="pt"), ()
                )
                return self.model(inputs_embeds=embeds).logits[0].log_softmax(-1)
            options = {"patch_size": 8} if name.startswith(("Mistral3", "LightOn")) else {}
            each = [self.processor([image], return_tensors="pt", **options) for image in images]
            if self.model.config.vision_config.model_type == "pixtral":  # of several sizes: the smaller ones are padded
                height, width = (max(one["pixel_values"].shape[axis] for one in each) for axis in (2, 3))
                for one in each:
                    down, right = height - one["pixel_values"].shape[2], width - one["pixel_values"].shape[3]
                    one["pixel_values"] = torch.nn.functional.pad(one["pixel_values"], (0, right, 0, down))
            if name.startswith(("SmolVLM", "Idefics3")):
                inputs["pixel_values"] = torch.cat([one["pixel_values"] for one in each], dim=1)
                return self.model(**inputs).logits[0].log_softmax(-1)
            if name.startswith(("LlavaNext", "LlavaOnevision")):
                for one in each:  # of several numbers of squares
                    one["pixel_values"] = one["pixel_values"][0]
            for key in ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids"):
                if key in each[0]:
                    inputs[key] = torch.cat([torch.as_tensor(one[key]) for one in each])
        if type(self.model).__name__ == OMNI3 and len(images):  # whose images have a token before them to Transformers
            from tests.oracles.tiny_video import axes_of

            kinds = [int(token == IMAGE) for token in token_ids]
            grids = [[frames, rows // 2, columns // 2] for frames, rows, columns in inputs["image_grid_thw"].tolist()]
            inputs["position_ids"] = axes_of(kinds, grids, [1.0] * len(grids))
        elif "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).int()
        if type(self.model).__name__.startswith("PaliGemma") and len(images):
            inputs["token_type_ids"] = (torch.arange(len(token_ids)) >= num_prompt)[None].int()
        if type(self.model).__name__.startswith("Gemma3"):
            inputs["token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_index).int()
        if type(self.model).__name__.startswith("Gemma4"):
            kinds = (inputs["input_ids"] == self.model.config.image_token_id).int()
            inputs |= {"mm_token_type_ids": kinds, "attention_mask": self.seen(inputs["input_ids"], kinds)}
        if type(self.model).__name__.startswith("Llama4"):
            return self._llama4(**inputs).logits[0].log_softmax(-1)
        return self.model(**inputs).logits[0].log_softmax(-1)

    def seen(self, input_ids: torch.Tensor, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gemma 4's masks, as they are while it generates."""
        embeds, positions = self.model.get_input_embeddings()(input_ids), torch.arange(input_ids.shape[1])[None]
        return self.model.create_masks_for_generate(self.model.config, embeds, None, None, positions, kinds)

    def _llama4(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> Any:
        """The model's parts in the order of its own forward, which ends in an error (Transformers 5.24)."""
        embeds = self.model.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = self.model.multi_modal_projector(self.model.vision_model(pixel_values).last_hidden_state)
            embeds[input_ids == self.model.config.image_token_id] = seen.flatten(0, 1)
        return self.model.language_model(inputs_embeds=embeds)
