"""Phi-4-multimodal's tiny checkpoint, a processor of images with PIL for it, and the embeddings that Transformers makes.

Transformers' own processor of images needs torchvision. Here its rules stand again, over Pillow's resizing.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from tests.oracles.tiny_models import TEXT

ARCHITECTURE = "Phi4MultimodalForCausalLM"
SIDE, PATCH = 16, 4
"""Pixels of a square's side, and of a patch's."""


def phi4_fields(image: int, audio: int) -> dict[str, Any]:
    """Of config.json, with these tokens."""
    return TEXT | {
        "max_position_embeddings": 1024,
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SIDE,
            "patch_size": PATCH, "crop_size": SIDE, "image_token_id": image,
        },
        "audio_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_blocks": 2, "num_attention_heads": 2, "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8, "bias_max_distance": 6, "audio_token_id": audio,
        },
    }  # fmt: skip


class SquaresProcessor:
    """Squares of an image, the whole image before them, and which patches of each show something."""

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], **options: Any) -> Self:
        return cls()

    def __call__(self, images: Any, **options: Any) -> Mapping[str, Any]:
        from transformers.image_processing_utils import BatchFeature

        each = [self._squares(image) for image in (images if isinstance(images, list) else [images])]
        most = max(len(pixels) for pixels, _, _ in each)
        padded = [np.pad(pixels, ((0, most - len(pixels)), *[(0, 0)] * 3)) for pixels, _, _ in each]
        masks = [np.pad(mask, ((0, most - len(mask)), *[(0, 0)] * 2), constant_values=1) for _, mask, _ in each]
        found = {
            "image_pixel_values": np.stack(padded).astype(np.float32),
            "image_attention_mask": np.stack(masks).astype(np.float32),
            "image_sizes": np.array([size for _, _, size in each]),
        }
        return BatchFeature(found, tensor_type=options.get("return_tensors"))

    def _squares(self, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
        height, width, patches = *pixels.shape[:2], SIDE // PATCH
        down, across = math.ceil(height / SIDE), math.ceil(width / SIDE)
        scale = min(across * SIDE / width, down * SIDE / height)
        kept = (
            (down * SIDE, int(width * scale)) if scale < across * SIDE / width else (int(height * scale), across * SIDE)
        )
        image = np.full((down * SIDE, across * SIDE, 3), 255, np.uint8)
        image[: kept[0], : kept[1]] = Image.fromarray(pixels).resize((kept[1], kept[0]), Image.Resampling.BILINEAR)
        mask = np.ones((down * patches, across * patches))
        for axis in (0, 1):
            empty = (image.shape[axis] - kept[axis]) // PATCH
            mask[(slice(None),) * axis + (slice(mask.shape[axis] - empty, None),)] = 0
        whole = np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
        cut = image.reshape(down, SIDE, across, SIDE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)
        squares = np.concatenate([whole.transpose(2, 0, 1)[None], cut]) / 127.5 - 1
        masks = mask.reshape(down, patches, across, patches).transpose(0, 2, 1, 3).reshape(-1, patches, patches)
        return squares, np.concatenate([np.ones((1, patches, patches)), masks]), image.shape[:2]


def phi4_embeddings(
    model: Any,
    input_ids: torch.Tensor,
    images: Mapping[str, torch.Tensor],
    sounds: Sequence[Mapping[str, torch.Tensor]],
) -> torch.Tensor:
    """Of a prompt. Each sound is heard by itself: Transformers lets shorter ones hear what fills them.

    Args:
        images, sounds: what the processors give, of all images and of each sound.
    """
    extend, config = model.model.embed_tokens_extend, model.config
    embeds = model.get_input_embeddings()(input_ids)
    if images:
        embeds = extend.image_embed(input_ids, embeds, **images)
    heard = [
        extend.audio_embed(
            torch.full((1, int(sound["audio_embed_sizes"])), config.audio_config.audio_token_id),
            embeds.new_zeros(1, int(sound["audio_embed_sizes"]), embeds.shape[-1]),
            **sound,
            audio_projection_mode="vision" if images else "speech",
        )[0]
        for sound in sounds
    ]
    if heard:
        embeds[input_ids == config.audio_config.audio_token_id] = torch.cat(heard)
    return embeds
