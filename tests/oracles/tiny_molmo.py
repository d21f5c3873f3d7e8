"""A tiny Molmo 2: its image processor without torchvision, the embeddings of its tokens as published checkpoints have them, and
what Transformers reads in the place of a prompt whose images' tokens are behind the vocabulary.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ARCHITECTURE = "Molmo2ForConditionalGeneration"
TOKENS = ("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>", "<im_low>")
FRAMES = ("<frame_start>", "<frame_end>", "<|video|>")


def config(text: dict[str, Any], marker: int) -> dict[str, Any]:
    """Of the tiny model, whose vocabulary ends before the marker."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
    names = {"image_patch_id": 1, "image_start_token_id": 3, "low_res_image_start_token_id": 4, "image_end_token_id": 5}
    return {
        "text_config": text | {"vocab_size": marker, "additional_vocab_size": 40, "head_dim": 16},
        "vision_config": heads
        | {"intermediate_size": 48, "num_hidden_layers": 4, "image_size": [28, 28], "patch_size": 7},
        "adapter_config": heads
        | {"vision_feature_layer": [2, -4], "intermediate_size": 40, "text_hidden_size": text["hidden_size"]},
        "frame_start_token_id": marker + 7,
        "frame_end_token_id": marker + 8,
        "tie_word_embeddings": False,
    } | {name: marker + number for name, number in names.items()}


PROCESSOR = {
    "size": {"height": 28, "width": 28}, "patch_size": 7, "max_crops": 3,
    "overlap_margins": [1, 0], "pooling_size": [2, 2],
}  # fmt: skip


VIDEOS = {
    "size": {"height": 28, "width": 28}, "patch_size": 7, "pooling_size": [3, 3], "num_frames": 5, "max_fps": 2,
    "do_sample_frames": True,
}  # fmt: skip
"""Of videos: groups of nine patches do not fill a frame's sixteen."""


def finish(path: Path, processor: dict[str, Any]) -> None:
    """What published checkpoints have otherwise: two tables of tokens of unequal length, and settings of the whole processor."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors, added = load_file(file), 40
    name = "model.transformer.wte."
    whole = torch.cat([tensors.pop(name + "embedding"), tensors.pop(name + "new_embedding")])
    tensors |= {name + "embedding": whole[:-added].clone(), name + "new_embedding": whole[-added:].clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    fields = {"processor_class": "Molmo2Processor", "use_single_crop_col_tokens": False, "image_processor": processor}
    fields["video_processor"] = VIDEOS
    (path / "processor_config.json").write_text(json.dumps(fields))


def publish(path: Path) -> None:
    """Write the config in the words of published ones."""
    fields = json.loads((path / "config.json").read_bytes())
    words = {"image_size": "image_default_input_size", "patch_size": "image_patch_size"}
    words |= {"num_position_embeddings": "image_num_pos", "vision_feature_layer": "vit_layers"}
    words |= {"attention_bias": "qkv_bias", "rms_norm_eps": "layer_norm_eps"}

    def renamed(section: dict[str, Any], *kept: str) -> dict[str, Any]:
        return {name if name in kept else words.get(name, name): value for name, value in section.items()}

    fields["vit_config"] = renamed(fields.pop("vision_config"), "attention_bias")
    fields["adapter_config"] = renamed(fields["adapter_config"], "attention_bias")
    fields["text_config"] = renamed(fields["text_config"])
    (path / "config.json").write_text(json.dumps(fields))


class TorchPixels:
    """What Transformers' processors call of torchvision, as torch does it."""

    def resize(self, image: torch.Tensor, size: Any, **options: Any) -> torch.Tensor:
        """Without antialiasing."""
        return torch.nn.functional.interpolate(image, (size.height, size.width), mode="bilinear")

    def rescale_and_normalize(
        self, images: torch.Tensor, rescales: bool, factor: float, normalizes: bool, mean: Any, std: Any
    ) -> torch.Tensor:
        """Numbers of the usual size."""
        shape = (1, 3, 1, 1)
        return (images.float() * factor - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


@functools.cache
def register_processor() -> None:
    """Molmo 2's own processor, whose pixels come from torch."""
    from transformers import AutoImageProcessor, Molmo2Config
    from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor

    class TorchMolmo2ImageProcessor(TorchPixels, Molmo2ImageProcessor):
        def preprocess(self, images: Any, **options: Any) -> Any:
            fields = {name: getattr(self, name) for name in self.valid_kwargs.__annotations__ if hasattr(self, name)}
            fields |= {name: getattr(self, name) for name in ("resample", "image_mean", "image_std", "rescale_factor")}
            pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
            flags = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
            others = {"disable_grouping": False, "return_tensors": options.get("return_tensors", "pt")}
            return self._preprocess(pixels, **(fields | flags | others | {"size": self.size}))

    backends = dict.fromkeys(("pil", "torchvision"), TorchMolmo2ImageProcessor)
    AutoImageProcessor.register(Molmo2Config, image_processor_classes=backends, exist_ok=True)


@functools.cache
def video_processor() -> Any:
    """Molmo 2's own processor of videos, without what reads files."""
    from transformers.models.molmo2.video_processing_molmo2 import Molmo2VideoProcessor

    kind: Any = type("TorchMolmo2VideoProcessor", (TorchPixels, Molmo2VideoProcessor), {})
    made = kind.__new__(kind)
    for name, value in VIDEOS.items():
        setattr(made, name, value)
    return made


def read_film(frames: np.ndarray) -> Any:
    """What the model reads of a film's frames [T, H, W, 3]."""
    from transformers.image_utils import SizeDict

    own, pixels = video_processor(), torch.from_numpy(frames).permute(0, 3, 1, 2)
    numbers = (1 / 255, True, own.image_mean, own.image_std)
    return own._preprocess(
        [pixels], SizeDict(**own.size), own.resample, True, *numbers, own.patch_size, own.pooling_size, "pt"
    )


@torch.no_grad()
def film_logprobs(
    model: Any, processor: Any, text: str, frames: np.ndarray, times: Sequence[float], answer: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """The tokens of a text with a film, as Transformers' processor has them, and the logprobs at each place of an answer."""
    given = read_film(frames)
    written = processor.get_video_string(given["video_grids"][0], times)
    ids = processor.tokenizer(text.replace("<|video|>", written), add_special_tokens=False)["input_ids"]
    ids = [processor.tokenizer.bos_token_id, *ids]
    kinds = [*processor.create_mm_token_type_ids([ids])[0], *[0] * len(answer)]
    read = {"input_ids": torch.tensor([[*ids, *answer]]), "mm_token_type_ids": torch.tensor([kinds])}
    return ids, model(**read, **given).logits[0].log_softmax(-1)[len(ids) - 1 : -1]


@torch.no_grad()
def logprobs(model: Any, processor: Any, token_ids: Sequence[int], images: Sequence[Any]) -> torch.Tensor:
    """Of each position. Its prompt has token 0 in each place of an image, and one before the text."""
    from PIL import Image

    if not images:
        return model(input_ids=torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
    assert token_ids[0] == processor.tokenizer.bos_token_id == 0
    text, given = processor.image_token, [Image.fromarray(image) for image in images]
    each = [processor(images=[image], text=[text], return_tensors="pt", add_special_tokens=False) for image in given]
    ids, kinds, at = [0], [0], 1
    left = iter(each)
    while at < len(token_ids):
        if token_ids[at]:
            ids, kinds, at = [*ids, token_ids[at]], [*kinds, 0], at + 1
            continue
        own = next(left)["input_ids"][0, 1:].tolist()
        assert not any(token_ids[at : at + len(own)])
        ids, kinds, at = ids + own, kinds + [1] * len(own), at + len(own)
    whole = processor(images=given, text=[text * len(given)], return_tensors="pt", add_special_tokens=False)
    names = ("pixel_values", "image_token_pooling", "image_grids", "image_num_crops")
    inputs = {name: whole[name] for name in names}
    inputs |= {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([kinds])}
    return model(**inputs).logits[0].log_softmax(-1)
