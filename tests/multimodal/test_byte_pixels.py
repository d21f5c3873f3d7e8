"""Pixels as bytes are the numbers that Hugging Face's processor gives, to the bit."""

from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.multimodal.byte_pixels import VALUES, BytePixels, leaves_bytes

CALL: dict[str, Any] = {"return_tensors": "np", "input_data_format": "channels_last"}


def draw(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patch_size": 16, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]},
        {"merge_size": 4, "temporal_patch_size": 3, "rescale_factor": 1 / 127},
    ],
)
@pytest.mark.parametrize("size", [(56, 56), (31, 97), (200, 60)])
def test_they_stand_for_the_processors_numbers(settings, size):
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 40000}, **settings)
    assert leaves_bytes(processor)
    expected, given = processor(draw(*size), **CALL), BytePixels(processor)(draw(*size), **CALL)
    assert given["pixel_values"].dtype == np.uint8
    assert (given["image_grid_thw"] == expected["image_grid_thw"]).all()
    count, frames = len(given["pixel_values"]), settings.get("temporal_patch_size", 2)
    places = given["pixel_values"].reshape(count, 3, -1)
    numbers = np.stack([values[places[:, at]] for at, values in enumerate(given[VALUES])], axis=1)
    assert (numbers[:, :, None].repeat(frames, 2).reshape(count, -1) == expected["pixel_values"]).all()


def test_a_request_that_changes_the_numbers_gets_numbers():
    processor = Qwen2VLImageProcessorPil()
    options = {"image_mean": [0.1, 0.2, 0.3]}
    expected, given = processor(draw(56, 56), **CALL, **options), BytePixels(processor)(draw(56, 56), **CALL, **options)
    assert VALUES not in given and (given["pixel_values"] == expected["pixel_values"]).all()


@pytest.mark.parametrize(
    "processor", [CLIPImageProcessorPil(), Qwen2VLImageProcessorPil(do_rescale=False)], ids=["clip", "unscaled"]
)
def test_other_processors_are_left_as_they_are(processor):
    assert not leaves_bytes(processor)
