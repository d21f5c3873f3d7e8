"""How each architecture's images stand in a prompt: the marker that users write, and the tokens that take its place.

The rules are data, read from config.json: a family is one entry. What the encoder computes is described in `quire.models`.
Knows token ids and shapes. Knows no tensors and no processor.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.config.hf_config import HFConfig
from quire.guards import is_sequence
from quire.multimodal.byte_pixels import VALUES

IntArray = npt.NDArray[np.int64]
Arrays = Mapping[str, npt.NDArray[Any]]


EMBEDDED = -1
"""In an expansion: the token whose embedding is an image's, whichever that is."""


PROMPT = "prompt"
"""What `Family.sees` says where all tokens of a prompt see one another."""
TOGETHER = "together"
"""The same, where those of all of a prompt's images do."""


@dataclasses.dataclass(frozen=True)
class Expansion:
    """What stands in the prompt for one image.

    Attributes:
        before, after: text tokens around the item.
        token_ids: of the item. Those that are `EMBEDDED` take an embedding each.
        grid: frames, rows and columns of the embeddings, for positions with several axes.
        arrays: what the encoder reads.
        interval: positions from one frame to the next.
        written: of an item whose tokens all take embeddings: what these tokens are, where they are several.
    """

    token_ids: list[int]
    arrays: dict[str, npt.NDArray[Any]]
    before: list[int] = dataclasses.field(default_factory=list[int])
    after: list[int] = dataclasses.field(default_factory=list[int])
    grid: tuple[int, ...] = ()
    interval: float = 1.0
    written: list[int] = dataclasses.field(default_factory=list[int])


Encode = Callable[[str], list[int]]
"""Token ids of a text, whose special tokens are meant."""
Expand = Callable[[HFConfig, Arrays, Encode], Expansion]
"""From config.json and what the processor gave for one image."""


def no_options(hf: HFConfig) -> dict[str, Any]:
    """The processor knows all by itself."""
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        token: the fields of config.json that may name the embedded token, the usual one first, and its usual id.
        expand: what stands in the prompt for an image.
        marker: as `token`, for the token that users write for an image, where it is another one.
        options: of the processor, that follow from config.json.
        is_alone: an image is a whole prompt, and its one embedding the answer.
        joins_newlines: newlines around an image and those of the text beside it are one token, as in one text.
        sees: from config.json, which tokens of an image see one another (`MediaItem.sees`); `prompt`: all of its prompt do;
            `together`: those of all images.
        begins: prompts with images begin with the token that begins texts.
        leads: images stand before the text, which begins behind them and ends with a newline; prompts need not name them.
        of_embeds: what stands in the prompt for an image that is given as so many embeddings, with a grid of patches where
            one is given. None: whatever the model needs besides is not in embeddings.
        marker_text: what users write for an item, where the tokenizer has a token for it; config.json need not name that one.
        number: from the tokens before an image, as they are before the first one, those before another of the prompt.
        is_whole: the checkpoint's processor of images and text together says what stands for an image.
        counted: options of the processor that follow from how many images the prompt has.
        samples_each: of an embedding, for sounds of any length; 0: what is too long is cut off.
        sees_images: a sound has other embeddings in a prompt that has images, too.
    """

    token: tuple[str, ...]
    usual: int
    expand: Expand
    marker: tuple[str, ...] = ()
    usual_marker: int = 0
    options: Callable[[HFConfig], dict[str, Any]] = no_options
    is_alone: bool = False
    joins_newlines: bool = False
    sees: Callable[[HFConfig], str] = lambda hf: ""
    leads: bool = False
    begins: bool = False
    counted: Callable[[int], dict[str, Any]] = lambda count: {}
    of_embeds: Callable[[HFConfig, int, Sequence[int]], Expansion] | None = None
    samples_each: int = 0
    sees_images: bool = False
    marker_text: str = ""
    is_whole: bool = False
    number: Callable[[list[int], int], list[int]] = lambda before, number: before

    def embedded_token(self, hf: HFConfig) -> int:
        """The token whose embedding is an image's."""
        return _first(hf, self.token, self.usual)

    def marker_token(self, hf: HFConfig) -> int:
        """The token that stands for a whole image before it is expanded."""
        return _first(hf, self.marker, self.usual_marker) if self.marker else self.embedded_token(hf)


def _first(hf: HFConfig, names: tuple[str, ...], usual: int) -> int:
    """The first of these fields that there is; `section.name` is one of a section."""
    paths = (name.rpartition(".") for name in names)
    values = ((hf.get(section, HFConfig({})) if section else hf).get(name) for section, _, name in paths)
    return int(next((value for value in values if value is not None), usual))


def _llava(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """One token a patch of the square that the processor cuts out; of Pixtral's encoder as Mistral's."""
    if hf.vision_config.get("model_type") == "pixtral":
        return _mistral(hf, arrays, encode)
    pixels = arrays["pixel_values"]
    size = hf.vision_config.get("patch_size", 14)
    count = (pixels.shape[-2] // size) * (pixels.shape[-1] // size)
    return Expansion([EMBEDDED] * count, {"pixels": pixels})


PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
"""Heights and widths that an image may be brought to, where config.json names none."""


def best_fit(height: int, width: int, sizes: Iterable[Sequence[int]]) -> tuple[int, int]:
    """The size in which most of an image's pixels are kept and, of several, the smallest part is empty."""

    def fit(size: Sequence[int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    best = max(sizes, key=fit)
    return int(best[0]), int(best[1])


def _without_padding(full: tuple[int, int], height: int, width: int) -> tuple[slice, slice]:
    """The rows and the columns of a grid that show an image of these proportions, which is in its middle."""
    rows, columns = full
    if width / height > columns / rows:
        empty = (rows - int(round(height * (columns / width), 7))) // 2
        return slice(empty, rows - empty), slice(None)
    empty = (columns - int(round(width * (rows / height), 7))) // 2
    return slice(None), slice(empty, columns - empty)


def _llava_next(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """LLaVA-NeXT: the whole image in one square, and the rows of a larger one that is cut into squares, without what is empty.
    LLaVA-OneVision: these with fewer patches where they would be more than so many squares have."""
    pixels, size = arrays["pixel_values"], hf.vision_config.get("patch_size", 14)
    square, side = pixels.shape[-1], pixels.shape[-1] // size
    height, width = (int(length) for length in arrays["image_sizes"].reshape(2))
    full = best_fit(height, width, hf.to_dict().get("image_grid_pinpoints") or PINPOINTS)
    down, across = full[0] // square, full[1] // square
    places = np.arange(side**2, (1 + down * across) * side**2).reshape(down, across, side, side)
    places = places.transpose(0, 2, 1, 3).reshape(down * side, across * side)
    places = places[_without_padding((down * side, across * side), height, width)]
    pixels, whole = pixels[: 1 + down * across], np.arange(side**2)
    most = str(hf.get("vision_aspect_ratio", "")).removeprefix("anyres_max_")
    ratio = math.sqrt(places.size / (int(most) * side**2)) if most.isdigit() else 0.0
    if ratio <= _SHRINKS_ABOVE:
        rows = np.pad(places, ((0, 0), (0, 1)), constant_values=-1)
        order = np.concatenate([whole, rows.reshape(-1)])
        return Expansion([EMBEDDED] * len(order), {"pixels": pixels, "places": order})
    blended, shares = shrink(places, int(places.shape[0] // ratio), int(places.shape[1] // ratio))
    end = ((0, 0), (0, 1), (0, 0))
    rows, shares = np.pad(blended, end, constant_values=-1), np.pad(shares, end, constant_values=0.25)
    order = np.concatenate([np.repeat(whole[:, None], 4, axis=1), rows.reshape(-1, 4)])
    weights = np.concatenate([np.full((len(whole), 4), 0.25, np.float32), shares.reshape(-1, 4)])
    return Expansion([EMBEDDED] * len(order), {"pixels": pixels, "places": order, "shares": weights})


_SHRINKS_ABOVE = 1.1


def shrink(places: IntArray, rows: int, columns: int) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """A grid of fewer rows and columns: for each cell its four neighbours in the old one [rows, columns, 4], and their shares
    (bilinear)."""

    def neighbours(count: int, old: int) -> tuple[IntArray, IntArray, npt.NDArray[Any]]:
        at = ((np.arange(count) + 0.5) * (old / count) - 0.5).clip(0)
        first = np.floor(at).astype(np.int64)
        return first, np.minimum(first + 1, old - 1), at - first

    top, bottom, down = neighbours(rows, places.shape[0])
    left, right, across = neighbours(columns, places.shape[1])
    corners = [places[np.ix_(row, column)] for row in (top, bottom) for column in (left, right)]
    shares = [np.outer(row, column) for row in (1 - down, down) for column in (1 - across, across)]
    return np.stack(corners, axis=2), np.stack(shares, axis=2).astype(np.float32)


def _mistral_cell(hf: HFConfig) -> int:
    """Pixels of a side of what becomes one embedding."""
    return int(hf.vision_config.get("patch_size", 14 if "spatial_merge_size" in hf else 16)) * int(
        hf.get("spatial_merge_size", 1)
    )


def _mistral_options(hf: HFConfig) -> dict[str, Any]:
    return {"patch_size": _mistral_cell(hf)} if hf.vision_config.get("model_type", "pixtral") == "pixtral" else {}


def _mistral(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Pixtral and Mistral 3: a token ends each row, and another the last one."""
    pixels, cell = arrays["pixel_values"], _mistral_cell(hf)
    rows, columns = pixels.shape[-2] // cell, pixels.shape[-1] // cell
    (row_end,), (end,) = encode("[IMG_BREAK]")[:1], encode("[IMG_END]")[:1]
    token_ids = ([EMBEDDED] * columns + [row_end]) * rows
    return Expansion([*token_ids[:-1], end], {"pixels": pixels})


def _idefics(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Idefics3 and SmolVLM: squares row by row, each with its place in words, and the whole image behind them."""
    vision, pixels = hf.vision_config, arrays["pixel_values"]
    side = vision.get("image_size", 224) // vision.get("patch_size", 32) // hf.get("scale_factor", 2)
    image = [EMBEDDED] * side**2
    rows, columns = (int(arrays[name].reshape(-1)[0]) if name in arrays else 0 for name in ("rows", "cols"))
    around, token_ids = "<fake_token_around_image>", list[int]()
    for row in range(rows):
        for column in range(columns):
            begin = "\n" if row and not column else ""
            token_ids += encode(f"{begin}{around}<row_{row + 1}_col_{column + 1}>") + image
    whole = ("\n\n" if rows else "") + around + "<global-img>"
    return Expansion([*token_ids, *encode(whole), *image, *encode(around)], {"pixels": pixels})


def _intern(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """InternVL: the squares of an image and behind them the whole, between two tokens."""
    pixels, vision = arrays["pixel_values"], hf.vision_config
    size, ratio = vision.get("patch_size", 14), hf.get("downsample_ratio", 0.5)
    side = int(pixels.shape[-1] // (size if isinstance(size, int) else size[0]) * ratio)
    squares = pixels.shape[0] if pixels.ndim == 4 else 1
    image = [EMBEDDED] * (squares * side**2)
    return Expansion([*encode("<img>"), *image, *encode("</img>")], {"pixels": pixels})


def _aya(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Aya Vision: squares with their numbers, and the whole image behind them."""
    pixels = arrays["pixel_values"]
    side = pixels.shape[-1] // hf.vision_config.get("patch_size", 14) // hf.get("downsample_factor", 2)
    squares, image = pixels.shape[0] if pixels.ndim == 4 else 1, [EMBEDDED] * side**2
    token_ids = encode("<|START_OF_IMG|>")
    for number in range(1, squares):
        token_ids += encode(f"TILE_{number}") + image
    return Expansion([*token_ids, *encode("TILE_GLOBAL"), *image, *encode("<|END_OF_IMG|>")], {"pixels": pixels})


def _cohere(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Command A Vision: squares, a token behind each, between two."""
    pixels = arrays["pixel_values"]
    side = pixels.shape[-1] // hf.vision_config.get("patch_size", 16) // hf.get("downsample_factor", 2)
    square = [EMBEDDED] * side**2 + encode("<|IMG_LINE_BREAK|>")
    squares = square * (pixels.shape[0] if pixels.ndim == 4 else 1)
    return Expansion([*encode("<|START_OF_IMG|>"), *squares, *encode("<|END_OF_IMG|>")], {"pixels": pixels})


def _llama4(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Llama 4: rows of squares with tokens between them, and the whole image behind them."""
    pixels, vision = arrays["pixel_values"], hf.vision_config
    side = int(pixels.shape[-1] // vision.get("patch_size", 14) * vision.get("pixel_shuffle_ratio", 0.5))
    down, across = (int(count) for count in arrays["aspect_ratios"].reshape(2))
    image, token_ids = [EMBEDDED] * side**2, encode("<|image_start|>")
    beside, below = encode("<|tile_x_separator|>"), encode("<|tile_y_separator|>")
    for _ in range(down if down * across > 1 else 0):
        token_ids += image + (beside + image) * (across - 1) + below
    return Expansion([*token_ids, *encode("<|image|>"), *image, *encode("<|image_end|>")], {"pixels": pixels})


def _gemma3(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Gemma 3: as many tokens for each square, between two of their own; behind the whole image there may be crops of it."""
    pixels, image = arrays["pixel_values"], [EMBEDDED] * hf.get("mm_tokens_per_image", 256)
    begin, end = encode("\n\n<start_of_image>"), encode("<end_of_image>\n\n")
    if pixels.ndim < 4 or len(pixels) == 1:
        return Expansion(image, {"pixels": pixels}, before=begin, after=end)
    crops = len(pixels) - 1
    between = encode("<end_of_image>\n\n and here are some crops to help you see better \n\n<start_of_image>")
    token_ids = [*image, *between, *image]
    for _ in range(crops - 1):
        token_ids += encode("<end_of_image>\n\n \n\n<start_of_image>") + image
    begin = encode("Here is the original image \n\n<start_of_image>")
    return Expansion(token_ids, {"pixels": pixels}, before=begin, after=end)


def _gemma4(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Gemma 4: one token for each square of patches, as many as the image has. Its processor gives patches in rows, and their
    places; a video's frames come whole."""
    pixels, vision = arrays["pixel_values"], hf.vision_config
    pool = int(vision.get("pooling_kernel_size", 3))
    if "image_position_ids" in arrays:
        places = arrays["image_position_ids"]
        columns, rows = places.max(0) + 1
        size = math.isqrt(pixels.shape[1] // 3)
        patches = pixels[: rows * columns].reshape(rows, columns, size, size, 3)
        pixels = patches.transpose(4, 0, 2, 1, 3).reshape(3, rows * size, columns * size)
    cell = pool * int(vision.get("patch_size", 16))
    count = (pixels.shape[1] // cell) * (pixels.shape[2] // cell)
    begin, end = [int(hf.get("boi_token_id", 255999))], [int(hf.get("eoi_token_id", 258882))]
    pixels = pixels if _is_unified(hf) else 2 * pixels - 1
    return Expansion([EMBEDDED] * count, {"pixels": pixels}, before=begin, after=end)


def _gemma3n(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Gemma 3n: as many embeddings for each image."""
    count, token = int(hf.get("vision_soft_tokens_per_image", 256)), int(hf.get("image_token_id", 262145))
    around = {"begin": hf.get("boi_token_id", 255999), "end": hf.get("eoi_token_id", 262144)}
    return borrowed_item({"pixel_values": arrays["pixel_values"][None]}, [token] * count, encode, **around)


def borrowed_item(
    arrays: dict[str, npt.NDArray[Any]], tokens: list[int], encode: Encode, begin: int, end: int
) -> Expansion:
    """An item that Transformers' modules read together with its tokens, between two tokens and empty lines."""
    arrays = arrays | {"input_ids": np.array([tokens]), "places": np.arange(len(tokens))}
    before, after = [*encode("\n\n"), begin], [end, *encode("\n\n")]
    return Expansion([EMBEDDED] * len(tokens), arrays, before=before, after=after)


def _is_unified(hf: HFConfig) -> bool:
    return hf.get("model_type") == "gemma4_unified"


def _gemma4_sees(hf: HFConfig) -> str:
    usual = "vision" if _is_unified(hf) else None
    return "runs" if hf.text_config.get("use_bidirectional_attention", usual) == "vision" else ""


def _phi4(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Phi-4-multimodal: squares, of which only the patches that show something are read, and the whole image behind them; a
    learned embedding ends each row, and another stands before the whole image."""
    pixels, masks, size = (
        arrays["image_pixel_values"],
        arrays["image_attention_mask"] > 0,
        hf.vision_config.get("patch_size", 14),
    )
    down, across = (int(length) // pixels.shape[-1] for length in arrays["image_sizes"].reshape(2))
    seen = [(int(mask[:, 0].sum()), int(mask[0].sum())) for mask in masks[: 1 + down * across]]
    cells = [(-(-rows // 2), -(-columns // 2)) for rows, columns in seen]
    ends = np.cumsum([rows * columns for rows, columns in cells])
    whole, *places = (
        np.arange(end - math.prod(each), end).reshape(each) for end, each in zip(ends, cells, strict=True)
    )
    squares = np.block([places[row * across : (row + 1) * across] for row in range(down)])
    ended = [np.pad(grid, ((0, 0), (0, 1)), constant_values=-1).reshape(-1) for grid in (squares, whole)]
    order = np.concatenate([ended[0], [-2], ended[1]])
    patches = [_blocks(square, size, *each) for square, each in zip(pixels, cells, strict=False)]
    grid = np.array([(1, *each) for each in seen])
    return Expansion([EMBEDDED] * len(order), {"pixels": np.concatenate(patches), "grid": grid, "places": order})


def _blocks(square: npt.NDArray[Any], size: int, rows: int, columns: int) -> npt.NDArray[Any]:
    """The patches of so many rows and columns of blocks of two by two, block by block."""
    cut = square[:, : 2 * rows * size, : 2 * columns * size].reshape(-1, rows, 2, size, columns, 2, size)
    return cut.transpose(1, 4, 2, 5, 0, 3, 6).reshape(4 * rows * columns, -1)


def _janus(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Janus: one square, between two tokens."""
    square = _llava(hf, arrays, encode)
    return dataclasses.replace(square, before=encode("<begin_of_image>"), after=encode("<end_of_image>"))


def _lighton(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """LightOnOCR: Mistral's cells without ends of rows."""
    pixels, cell = arrays["pixel_values"], _mistral_cell(hf)
    count = (pixels.shape[-2] // cell) * (pixels.shape[-1] // cell)
    return Expansion([EMBEDDED] * count, {"pixels": pixels})


def _llava_embeds(hf: HFConfig, count: int, grid: Sequence[int]) -> Expansion:
    if hf.vision_config.get("model_type") == "pixtral" or grid:
        raise ValueError(
            "this model reads images as pixels" if not grid else "this model's images have no image_grid_thw"
        )
    return Expansion([EMBEDDED] * count, {})


LLAVA = Family(
    ("image_token_id", "image_token_index"),
    32000,
    _llava,
    of_embeds=_llava_embeds,
    options=lambda hf: _mistral_options(hf) if hf.vision_config.get("model_type") == "pixtral" else {},
)
LLAVA_NEXT = Family(LLAVA.token, LLAVA.usual, _llava_next, of_embeds=_llava_embeds)
LLAVA_ONEVISION = dataclasses.replace(LLAVA_NEXT, usual=151646)
MISTRAL = Family(("image_token_id", "image_token_index"), 10, _mistral, options=_mistral_options)
GEMMA3 = Family(
    ("image_token_index", "image_token_id"),
    262144,
    _gemma3,
    marker=("boi_token_index", "boi_token_id"),
    usual_marker=255999,
    joins_newlines=True,
    sees=lambda hf: "runs",
)
GEMMA3N = Family(("image_token_id",), 262145, _gemma3n, joins_newlines=True)
GEMMA4 = Family(("image_token_id",), 258880, _gemma4, sees=_gemma4_sees)
PALIGEMMA = dataclasses.replace(LLAVA, usual=257152, options=no_options, sees=lambda hf: PROMPT, leads=True)


def _rows(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """ViT: a class token and one for each patch; all images have one size."""
    height, width = arrays["pixel_values"].shape[-2:]
    size, rows = hf.get("patch_size", 16), hf.max_position_embeddings
    if 1 + (height // size) * (width // size) != rows:
        raise ValueError(f"the processor's settings make it {height} x {width}; the model's rows are {rows}")
    return Expansion([EMBEDDED] * rows, {"pixels": arrays["pixel_values"]})


ROWS = Family((), 0, _rows, is_alone=True)
PAIRED = Family(
    (), 0, lambda hf, arrays, encode: Expansion([EMBEDDED], {"pixels": arrays["pixel_values"]}), is_alone=True
)


def _stages(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Donut and Nougat: a Swin's rows, beside the prompt. How wide its windows are depends on the image's size, which is one for
    all images."""
    pixels, size = arrays["pixel_values"], hf.encoder.get("image_size", 224)
    own = tuple(size) if is_sequence(size) else (size, size)
    if pixels.shape[-2:] != own:
        height, width = pixels.shape[-2:]
        raise ValueError(f"the processor's settings make it {height} x {width}; encoder.image_size is {size}")
    return Expansion([EMBEDDED] * hf.max_source_positions, {"pixels": pixels})


def _florence(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Florence-2: the mean of all rows and these, before the text that the encoder reads with them."""
    pixels, vision = arrays["pixel_values"], hf.vision_config
    sides = pixels.shape[-2:]
    usual = {"patch_size": (7, 3, 3, 3), "patch_stride": (4, 2, 2, 2), "patch_padding": (3, 1, 1, 1)}
    for size, stride, padding in zip(*(vision.get(name, each) for name, each in usual.items()), strict=True):
        sides = [(side + 2 * padding - size) // stride + 1 for side in sides]
    return Expansion([EMBEDDED] * (1 + math.prod(sides)), {"pixels": pixels})


PHI4 = Family(("vision_config.image_token_id",), 200010, _phi4)
STAGES = Family((), 0, _stages, is_alone=True)
FLORENCE = Family((), 0, _florence, is_alone=True)
LIGHTON = Family(("image_token_id",), 151655, _lighton, options=_mistral_options)
DEEPSEEK = Family(("image_token_id",), 100015, _llava)
INTERN = Family(("image_token_id",), 151667, _intern, options=lambda hf: {"crop_to_patches": True})
JANUS = Family(("image_token_id",), 100581, _janus)
QIANFAN = dataclasses.replace(INTERN, marker_text="<image>")
LLAMA4 = Family(("image_token_index", "image_token_id"), 200092, _llama4, marker_text="<|image|>")
AYA = Family(("image_token_index", "image_token_id"), 255036, _aya, options=lambda hf: {"crop_to_patches": True})
COHERE = Family(("image_token_id",), 255036, _cohere)
IDEFICS = Family(("image_token_id",), 128257, _idefics, options=lambda hf: {"return_row_col_info": True})


def _qwen_vl(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """One token for each block of patches that are merged."""
    frames, rows, columns = (int(count) for count in arrays["image_grid_thw"].reshape(3))
    merge = int(hf.vision_config.get("spatial_merge_size", 2))
    grid = (frames, rows // merge, columns // merge)
    tokens = [EMBEDDED] * math.prod(grid)
    read = {"pixels": arrays["pixel_values"], "grid": arrays["image_grid_thw"]}
    return Expansion(tokens, read | {name: arrays[name] for name in (VALUES,) if name in arrays}, grid=grid)


def _paddle(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """PaddleOCR-VL: patches come row by row, and are brought into the order of blocks."""
    _, rows, columns = (int(count) for count in arrays["image_grid_thw"].reshape(3))
    merge = int(hf.vision_config.get("spatial_merge_size", 2))
    places = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
    pixels = arrays["pixel_values"][places.transpose(0, 2, 1, 3).reshape(-1)]
    return _qwen_vl(hf, {**arrays, "pixel_values": pixels}, encode)


def _qwen_vl_embeds(hf: HFConfig, count: int, grid: Sequence[int]) -> Expansion:
    """Positions need the grid."""
    if not grid:
        raise ValueError("this model needs image_grid_thw beside image_embeds")
    merge = int(hf.vision_config.get("spatial_merge_size", 2))
    frames, rows, columns = grid
    cells = (frames, rows // merge, columns // merge)
    if math.prod(cells) != count or rows % merge or columns % merge:
        raise ValueError(
            f"{count} embeddings are not those of image_grid_thw={list(grid)}, which has {math.prod(cells)}"
        )
    return Expansion([EMBEDDED] * count, {}, grid=cells)


QWEN_VL = Family(("image_token_id", "image_token_index"), 151655, _qwen_vl, of_embeds=_qwen_vl_embeds)
QWEN_3_5 = dataclasses.replace(QWEN_VL, usual=248056)


def _molmo(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """Molmo 2: the whole image made small and overlapping squares, of which a few patches are an embedding. The tokens that its
    processor writes for them are behind the vocabulary, and have embeddings, too."""
    tokens, groups = arrays["input_ids"].reshape(-1), arrays["image_token_pooling"]
    own = tokens[arrays["mm_token_type_ids"].reshape(-1) == 1]
    is_patch = own == hf.get("image_patch_id", 151938)
    places = np.where(is_patch, np.cumsum(is_patch) - 1, hf.text_config.get("vocab_size", 151936) - 1 - own)
    size = int(hf.vision_config.get("patch_size", hf.vision_config.get("image_patch_size", 14)))
    patches = arrays["pixel_values"].reshape(-1, *arrays["pixel_values"].shape[-2:])
    side = math.isqrt(patches.shape[1])
    pixels = patches.reshape(-1, side, side, size, size, 3).transpose(0, 5, 1, 3, 2, 4)
    pixels = pixels.reshape(-1, 3, side * size, side * size)
    return Expansion([EMBEDDED] * len(own), {"pixels": pixels, "groups": groups, "places": places})


MOLMO = Family(
    ("image_patch_id",), 151938, _molmo, marker_text="<|image|>", is_whole=True, begins=True, sees=lambda hf: TOGETHER
)

GLM_V = dataclasses.replace(QWEN_VL, usual=151343)
PADDLE = dataclasses.replace(QWEN_VL, usual=100295, expand=_paddle)
QWEN_OMNI = ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration")


def _deepseek2(hf: HFConfig, arrays: Arrays, encode: Encode) -> Expansion:
    """DeepSeek-VL2: the whole image, a mark, and its squares as one picture; another mark ends each row. Neighbours become one
    embedding, at edges with nothing beside them."""
    pixels, ratio = arrays["pixel_values"], int(hf.projector_config.get("downsample_ratio", 2))
    across, down = (int(count) for count in arrays["images_spatial_crop"].reshape(2))
    side = pixels.shape[-1] // int(hf.vision_config.get("patch_size", 16))
    cells, squares = -(-side // ratio), len(pixels)
    missing = ((0, 0), (0, cells * ratio - side), (0, cells * ratio - side))
    grid = np.pad(np.arange(squares * side**2).reshape(squares, side, side), missing, constant_values=-1)
    groups = grid.reshape(squares, cells, ratio, cells, ratio).swapaxes(2, 3).reshape(-1, ratio**2)
    places = np.arange(squares * cells**2).reshape(squares, cells, cells)
    large = places[1:].reshape(down, across, cells, cells).swapaxes(1, 2).reshape(down * cells, across * cells)
    ended = [np.pad(rows, ((0, 0), (0, 1)), constant_values=-1).reshape(-1) for rows in (places[0], large)]
    first, second = ended if hf.get("global_view_pos", "head") == "head" else ended[::-1]
    places = np.concatenate((first, [-2], second))
    return Expansion([EMBEDDED] * len(places), {"pixels": pixels, "groups": groups, "places": places})


DEEPSEEK2 = Family((), 0, _deepseek2, marker_text="<image>", counted=lambda count: {"cropping": count <= MOST_CUT})
MOST_CUT = 2
"""Images of a prompt that DeepSeek-VL2's processor cuts; of more each is one square."""
QWEN3_OMNI = ("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration")

FAMILIES: dict[str, Family] = {
    "AyaVisionForConditionalGeneration": AYA,
    "Cohere2VisionForConditionalGeneration": COHERE,
    "CLIPModel": PAIRED,
    "ColPaliForRetrieval": dataclasses.replace(PALIGEMMA, sees=lambda hf: ""),  # which sees in both directions anyway
    "ColQwen2ForRetrieval": QWEN_VL,
    "PaddleOCRVLForConditionalGeneration": PADDLE,
    "PaliGemmaForConditionalGeneration": PALIGEMMA,
    "Phi4MultimodalForCausalLM": PHI4,
    "SiglipModel": PAIRED,
    "VipLlavaForConditionalGeneration": LLAVA,
    "DeepseekVLForConditionalGeneration": DEEPSEEK,
    "DeepseekVLV2ForCausalLM": DEEPSEEK2,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    **dict.fromkeys(("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"), GEMMA4),
    **dict.fromkeys(
        ("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration"), GLM_V
    ),
    "Florence2ForConditionalGeneration": FLORENCE,
    "VisionEncoderDecoderModel": STAGES,
    "Exaone4_5_ForConditionalGeneration": dataclasses.replace(QWEN_VL, usual=67),
    "GlmOcrForConditionalGeneration": dataclasses.replace(GLM_V, usual=59280),
    "InternVLForConditionalGeneration": INTERN,
    "JanusForConditionalGeneration": JANUS,
    "QianfanOCRForConditionalGeneration": QIANFAN,
    "LightOnOcrForConditionalGeneration": LIGHTON,
    "Llama4ForConditionalGeneration": LLAMA4,
    "LlavaForConditionalGeneration": LLAVA,
    "LlavaNextForConditionalGeneration": LLAVA_NEXT,
    "LlavaOnevisionForConditionalGeneration": LLAVA_ONEVISION,
    "Mistral3ForConditionalGeneration": MISTRAL,
    "Molmo2ForConditionalGeneration": MOLMO,
    "Idefics3ForConditionalGeneration": IDEFICS,
    "SmolVLMForConditionalGeneration": IDEFICS,
    **dict.fromkeys(("ViTForImageClassification", "ViTModel"), ROWS),
    **dict.fromkeys((*QWEN_OMNI, *QWEN3_OMNI), QWEN_VL),
    "Qwen2VLForConditionalGeneration": QWEN_VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN_VL,
    "Qwen3_5ForConditionalGeneration": QWEN_3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN_3_5,
    "Qwen3VLForConditionalGeneration": QWEN_VL,
    "Qwen3VLMoeForConditionalGeneration": QWEN_VL,
}
"""By architecture: who reads images."""
