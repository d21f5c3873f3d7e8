"""Videos for tiny models that see, and what Transformers itself gives for prompts with videos and images.

Transformers' own processors of videos need torchvision. Here each frame goes through the image processor of the same family, at
the size that the video's processor would choose, which is enough: a video's patches are those of its frames, in pairs.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tests.oracles.tiny_vision import IMAGE, PROCESSORS, VisionOracle, draw_image

VIDEO = IMAGE + 1
"""The marker of a video in the tiny models' prompts, where the model's config names it."""
QWEN2 = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
QWEN3 = tuple(f"Qwen3{name}ForConditionalGeneration" for name in ("VL", "VLMoe", "_5", "_5Moe"))
GLM = tuple(f"Glm{name}ForConditionalGeneration" for name in ("4v", "4vMoe", "46V"))
SQUARES = ("InternVLForConditionalGeneration", "LlavaOnevisionForConditionalGeneration")
GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")
SMOL = "SmolVLMForConditionalGeneration"
ARCHITECTURES = (*QWEN2, *QWEN3, *GLM, *SQUARES, *GEMMA4, SMOL)


class Film(NamedTuple):
    """A video as users give it."""

    frames: np.ndarray
    rate: float | None = None

    @property
    def given(self) -> Any:
        """In `multi_modal_data`."""
        return self.frames if self.rate is None else (self.frames, {"fps": self.rate})


@functools.cache
def draw_film(seed: int, frames: int, height: int, width: int, rate: float | None = None) -> Film:
    """Coloured squares, other ones in each frame."""
    return Film(np.stack([draw_image(1000 * seed + number, height, width) for number in range(frames)]), rate)


def in_cells(size: Sequence[int], bounds: dict[str, int], frames: int | None = None, cell: int = 8) -> tuple[int, int]:
    """Where Qwen's processors bring frames: to whole cells, between a least and a most number of pixels of one or of all."""
    height, width = size
    rows, columns = (round(side / cell) * cell for side in (height, width))
    count, whole = (1, 1) if frames is None else (frames, round(frames / 2) * 2)
    if whole * rows * columns > bounds["longest_edge"]:
        scale = math.sqrt(count * height * width / bounds["longest_edge"])
        return max(cell, math.floor(height / scale / cell) * cell), max(cell, math.floor(width / scale / cell) * cell)
    if whole * rows * columns < bounds["shortest_edge"]:
        scale = math.sqrt(bounds["shortest_edge"] / (count * height * width))
        return math.ceil(height * scale / cell) * cell, math.ceil(width * scale / cell) * cell
    return rows, columns


def axes_of(kinds: Sequence[int], grids: Sequence[Sequence[int]], intervals: Sequence[float]) -> torch.Tensor:
    """The positions of a prompt's tokens on three axes, as the paper of Qwen2-VL has them [3, 1, tokens]: whatever stands behind
    an item begins after its largest position. (Transformers 5 lets text behind a long video begin after its rows and columns.)

    Args:
        kinds: of each token: 0 is text.
        grids: of each run of other tokens: frames, rows and columns.
        intervals: positions between the frames of each run.
    """
    runs, found = iter(zip(grids, intervals, strict=True)), list[tuple[int, ...]]()
    for kind, group in itertools.groupby(kinds):
        start = max(map(max, found)) + 1 if found else 0
        if not kind:
            found += [(start + number,) * 3 for number in range(len(list(group)))]
            continue
        (frames, rows, columns), interval = next(runs)
        assert len(list(group)) == frames * rows * columns
        places = itertools.product(range(frames), range(rows), range(columns))
        found += [(start + int(np.float32(t) * np.float32(interval)), start + h, start + w) for t, h, w in places]
    return torch.tensor(found).T[:, None]


def in_pairs(processor: Any, frames: np.ndarray, size: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """The patches of an even number of frames, brought to a size, and their grid, as Qwen's processor of images makes them."""
    pictures = [Image.fromarray(frame).resize(size[::-1], Image.Resampling.BICUBIC) for frame in frames]
    got = processor(pictures, return_tensors="pt", do_resize=False)
    _, rows, columns = got["image_grid_thw"][0].tolist()
    pairs = len(frames) // 2
    # Each picture's patches show it twice, where a film has two frames.
    once = got["pixel_values"].view(pairs, 2, rows * columns, 3, 2, -1)[:, :, :, :, 0]
    return once.permute(0, 2, 3, 1, 4).reshape(pairs * rows * columns, -1), [pairs, rows, columns]


class VideoOracle(VisionOracle):
    """Transformers' model of a checkpoint, which sees images (pixels) and films, in the order of the prompt."""

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int], images: Sequence[Any], num_prompt: int = 0) -> torch.Tensor:
        """Of each position of an expanded prompt and its answer: [tokens, V]."""
        if not any(isinstance(item, Film) for item in images):
            return super().logprobs(token_ids, images, num_prompt)
        name = type(self.model).__name__
        if name in GEMMA4:
            inputs = self._of_frames(token_ids, images)
        elif name == SMOL:
            inputs = {"pixel_values": torch.cat([self._smol(item) for item in images], dim=1)}
        else:
            inputs = self._of_squares(images) if name in SQUARES else self._of_patches(name, token_ids, images)
        return self.model(input_ids=torch.tensor([list(token_ids)]), **inputs).logits[0].log_softmax(-1)

    def _of_patches(self, name: str, token_ids: Sequence[int], items: Sequence[Any]) -> dict[str, Any]:
        """Qwen and GLM."""
        config, films = self.model.config, [item for item in items if isinstance(item, Film)]
        cut = [self._cut(name, film.frames) for film in films]
        got = [self.processor([item], return_tensors="pt") for item in items if not isinstance(item, Film)]
        inputs: dict[str, Any] = {
            "pixel_values_videos": torch.cat([patches for patches, _ in cut]),
            "video_grid_thw": torch.tensor([grid for _, grid in cut]),
        }
        if got:
            inputs |= {key: torch.cat([one[key] for one in got]) for key in ("pixel_values", "image_grid_thw")}
        runs, pictures, moving = list[tuple[int, list[int], float]](), iter(got), iter(zip(films, cut, strict=True))
        for item in items:  # what each run of tokens is
            if not isinstance(item, Film):
                runs.append((1, next(pictures)["image_grid_thw"][0].tolist(), 1.0))
                continue
            film, (_, grid) = next(moving)
            seconds = 2 / (film.rate or 24.0)
            interval = config.vision_config.tokens_per_second * seconds if name == QWEN2[1] else 1.0
            runs += [(2, grid, interval)] if name in QWEN2 else [(2, [1, *grid[1:]], 1.0)] * grid[0]
        is_item = [token in (config.image_token_id, config.video_token_id) for token in token_ids]
        left = iter(runs)
        kinds = [kind for seen, group in itertools.groupby(is_item) for kind in self._kinds(seen, group, left)]
        if name in GLM and got:  # Transformers cannot take both: frames are images then
            return self._as_images(inputs, kinds, items, cut, got)
        grids = [[grid[0], grid[1] // 2, grid[2] // 2] for _, grid, _ in runs]
        inputs["position_ids"] = axes_of(kinds, grids, [interval for *_, interval in runs])
        inputs["mm_token_type_ids"] = torch.tensor([kinds])
        self._compare_positions(name, token_ids, inputs, films)
        return inputs

    @staticmethod
    def _kinds(seen: bool, group: Any, runs: Any) -> list[int]:
        return [next(runs)[0] if seen else 0] * len(list(group))

    def _compare_positions(self, name: str, token_ids: Sequence[int], inputs: dict[str, Any], films: Any) -> None:
        """The positions are Transformers', where these follow the paper."""
        names = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
        given = {key: inputs[key] for key in names if key in inputs}
        if name == QWEN2[1]:
            given["second_per_grid_ts"] = torch.tensor([2 / (film.rate or 24.0) for film in films])
        theirs, _ = self.model.model.get_rope_index(torch.tensor([list(token_ids)]), **given)
        is_short = all(len(film.frames) <= 2 for film in films) or name not in QWEN2
        assert not is_short or torch.equal(theirs, inputs["position_ids"])

    def _as_images(self, inputs: Any, kinds: list[int], items: Any, cut: Any, got: Any) -> dict[str, Any]:
        films, pictures = iter(cut), iter(got)
        pixels, grids = list[torch.Tensor](), list[list[int]]()
        for item in items:
            if isinstance(item, Film):
                patches, (frames, rows, columns) = next(films)
                pixels.append(patches)
                grids += [[1, rows, columns]] * frames
            else:
                one = next(pictures)
                pixels.append(one["pixel_values"])
                grids += one["image_grid_thw"].tolist()
        types = torch.tensor([[min(kind, 1) for kind in kinds]])
        return {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": types}

    def _cut(self, name: str, frames: np.ndarray) -> tuple[torch.Tensor, list[int]]:
        """A film's patches, and its grid."""
        bounds = PROCESSORS[name]["size"]
        size = in_cells(frames.shape[1:3], bounds, None if name in QWEN2 else max(2, len(frames)))
        if len(frames) % 2:
            frames = np.concatenate([frames, frames[-1:]])
        return in_pairs(self.processor, frames, size)

    def _of_frames(self, token_ids: Sequence[int], items: Sequence[Any]) -> dict[str, Any]:
        """Gemma 4, whose processors bring frames to the size of images where both may have as many embeddings."""
        films = [item.frames for item in items if isinstance(item, Film)]
        ids, config, inputs = torch.tensor([list(token_ids)]), self.model.config, dict[str, Any]()
        read = {
            "image": [item for item in items if not isinstance(item, Film)],
            "video": [frame for film in films for frame in film],
        }
        for kind, ending in (("image", ""), ("video", "_videos")):
            each = [self.processor([picture], return_tensors="pt") for picture in read[kind]]
            if each:
                inputs["pixel_values" + ending] = torch.cat([one["pixel_values"] for one in each])
                inputs[f"{kind}_position_ids"] = torch.cat([one["image_position_ids"] for one in each])
        inputs["num_frames_per_video"] = torch.tensor([len(film) for film in films])
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        return inputs | {"mm_token_type_ids": kinds, "attention_mask": self.seen(ids, kinds)}

    def _smol(self, item: Any) -> torch.Tensor:
        """SmolVLM, to which frames are images that are not cut, brought to a longest side first."""
        if not isinstance(item, Film):
            return self.processor([item], return_tensors="pt")["pixel_values"]
        height, width = item.frames.shape[1:3]
        longest, side = (PROCESSORS[SMOL][name]["longest_edge"] for name in ("size", "max_image_size"))
        shorter = int(longest * min(height, width) / max(height, width))
        first = (longest, shorter + shorter % 2) if width >= height else (shorter + shorter % 2, longest)
        how, frames = Image.Resampling.LANCZOS, list[torch.Tensor]()
        for frame in item.frames:
            picture = np.asarray(Image.fromarray(frame).resize(first, how).resize((side, side), how))
            pixels = (picture / 255 - np.array(self.processor.image_mean)) / np.array(self.processor.image_std)
            frames.append(torch.from_numpy(pixels).float().permute(2, 0, 1))
        return torch.stack(frames)[None]

    def _of_squares(self, items: Sequence[Any]) -> dict[str, Any]:
        """InternVL, to which frames are images; and LLaVA-OneVision."""
        films = [
            torch.stack([self._square(frame) for frame in each.frames]) for each in items if isinstance(each, Film)
        ]
        if type(self.model).__name__ == SQUARES[0]:
            moving = iter(films)
            each = [
                next(moving) if isinstance(item, Film) else self.processor([item], return_tensors="pt")["pixel_values"]
                for item in items
            ]
            return {"pixel_values": torch.cat(each)}
        inputs: dict[str, Any] = {"pixel_values_videos": films}
        if got := [self.processor([item], return_tensors="pt") for item in items if not isinstance(item, Film)]:
            inputs |= {
                "pixel_values": torch.cat([one["pixel_values"][0] for one in got]),
                "image_sizes": torch.cat([torch.as_tensor(one["image_sizes"]) for one in got]),
            }
        inner = self.model.model
        if not hasattr(inner, "see_one_film"):  # Transformers takes films of one length at once
            inner.see_one_film = inner.get_video_features
            inner.get_video_features = functools.partial(_see_each, inner.see_one_film)
        return inputs

    def _square(self, frame: np.ndarray) -> torch.Tensor:
        side = PROCESSORS[type(self.model).__name__]["size"]["height"]
        picture = np.asarray(Image.fromarray(frame).resize((side, side), Image.Resampling.BICUBIC))
        pixels = (picture / 255 - np.array(self.processor.image_mean)) / np.array(self.processor.image_std)
        return torch.from_numpy(pixels).float().permute(2, 0, 1)


def _see_each(see: Callable[..., Any], films: Sequence[torch.Tensor], **options: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    rows = [see(film[None], **options).pooler_output.flatten(0, 1) for film in films]
    return BaseModelOutputWithPooling(pooler_output=torch.cat(rows))
