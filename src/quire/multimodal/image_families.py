"""How each architecture's images stand in a prompt: the marker that users write, and the tokens that take its place.

The rules are data, read from config.json: a family is one entry. What the encoder computes is described in `quire.models`.
Knows token ids and shapes. Knows no tensors and no processor.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from quire.config.hf_config import HFConfig

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Expansion:
    """What stands in the prompt for one image.

    Attributes:
        before, after: text tokens around the item.
        token_ids: of the item. Those that are the family's embedded token take an embedding each.
        grid: frames, rows and columns of the embeddings, for positions with several axes.
        arrays: what the encoder reads.
    """

    token_ids: list[int]
    arrays: dict[str, npt.NDArray[Any]]
    before: list[int] = dataclasses.field(default_factory=list[int])
    after: list[int] = dataclasses.field(default_factory=list[int])
    grid: tuple[int, ...] = ()


Expand = Callable[[HFConfig, Arrays], Expansion]
"""From config.json and what the processor gave for one image."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        token: the fields of config.json that may name the embedded token, the usual one first, and its usual id.
        expand: what stands in the prompt for an image.
        marker: as `token`, for the token that users write for an image, where it is another one.
    """

    token: tuple[str, ...]
    usual: int
    expand: Expand
    marker: tuple[str, ...] = ()
    usual_marker: int = 0

    def embedded_token(self, hf: HFConfig) -> int:
        """The token whose embedding is an image's."""
        return _first(hf, self.token, self.usual)

    def marker_token(self, hf: HFConfig) -> int:
        """The token that stands for a whole image before it is expanded."""
        return _first(hf, self.marker, self.usual_marker) if self.marker else self.embedded_token(hf)


def _first(hf: HFConfig, names: tuple[str, ...], usual: int) -> int:
    return int(next((hf.get(name) for name in names if hf.get(name) is not None), usual))


def _llava(hf: HFConfig, arrays: Arrays) -> Expansion:
    """One token a patch of the square that the processor cuts out, and perhaps one for the class token."""
    pixels = arrays["pixel_values"]
    size = hf.vision_config.get("patch_size", 14)
    count = (pixels.shape[-2] // size) * (pixels.shape[-1] // size)
    count += hf.get("vision_feature_select_strategy", "default") == "full"
    return Expansion([LLAVA.embedded_token(hf)] * count, {"pixels": pixels})


LLAVA = Family(("image_token_id", "image_token_index"), 32000, _llava)


def _qwen_vl(hf: HFConfig, arrays: Arrays) -> Expansion:
    """One token for each block of patches that are merged."""
    frames, rows, columns = (int(count) for count in arrays["image_grid_thw"].reshape(3))
    merge = int(hf.vision_config.get("spatial_merge_size", 2))
    grid = (frames, rows // merge, columns // merge)
    tokens = [QWEN_VL.embedded_token(hf)] * math.prod(grid)
    return Expansion(tokens, {"pixels": arrays["pixel_values"], "grid": arrays["image_grid_thw"]}, grid=grid)


QWEN_VL = Family(("image_token_id",), 151655, _qwen_vl)

FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": LLAVA,
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN_VL,
}
"""By architecture: who reads images."""
