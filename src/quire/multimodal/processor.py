"""From a prompt's token ids and its images to the expanded prompt and its items.

Hugging Face's image processors are the reference of what an encoder reads; what they gave is kept by content. Runs in the
frontend, in any thread.
"""

import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quire.config import ModelConfig, MultiModalConfig, limits
from quire.config.multimodal import GIB
from quire.errors import RequestError
from quire.guards import is_mapping
from quire.media import EMBEDS, IMAGE_EMBEDS, MODALITIES, MediaItem, MediaTensor
from quire.multimodal.checkpoint_processors import image_processor
from quire.multimodal.content import PARAM, Pixels, as_list, content_key, read_image, read_uuids
from quire.multimodal.image_embeds import GivenEmbeds
from quire.multimodal.image_families import EMBEDDED, FAMILIES, Arrays, Encode, Expansion
from quire.multimodal.media_source import MediaSource
from quire.multimodal.newlines import Newlines
from quire.multimodal.processor_cache import Processed, ProcessorCache

ResultT = TypeVar("ResultT")


class MediaProcessor:
    """Processes images of one model.

    Args:
        model: whose architecture is one of `FAMILIES`.
        settings: limits, options and the size of the cache.
        encode: a text's token ids, special tokens meant.

    Attributes:
        source: reads what requests name by URL.
    """

    def __init__(self, model: ModelConfig, settings: MultiModalConfig, encode: Encode) -> None:
        self._hf, self._path, self._settings = model.hf_config, model.path, settings
        self._encode = encode
        self.family = FAMILIES[model.architecture]
        self.marker = self.family.marker_token(self._hf)
        self._embedded = self.family.embedded_token(self._hf)
        self.source = MediaSource(settings)
        self.cache = ProcessorCache(int(settings.mm_processor_cache_gb * GIB))

    def apply(
        self,
        token_ids: Sequence[int],
        data: Any,
        uuids: Any = None,
        options: Mapping[str, Any] | None = None,
        typed: Collection[int] = (),
        fields: Sequence[str] = (),
    ) -> tuple[list[int], list[MediaItem]]:
        """The prompt in which each marker is replaced by its image's tokens, and the items.

        Args:
            data: `{"image": one or several}`.
            uuids: names of items that stand for the hashes of their content.
            options: of the processor, for this request.
            typed: places of markers that are text which somebody typed; they stay as they are.
            fields: of a request, that each image comes from, for errors.

        Raises:
            RequestError: something about it cannot be served.
        """
        images = self._images_of(data)
        names = read_uuids(uuids, "image", len(images))
        settings = {**self.family.options(self._hf), **self._settings.mm_processor_kwargs, **(options or {})}
        where = fields or [f"image {number} of the prompt" for number in range(len(images))]
        processed = [
            _at(field if fields else PARAM, self._process, field, image, name, settings)
            for field, image, name in zip(where, images, names, strict=True)
        ]
        return self._expand(token_ids, processed, set(typed))

    def _images_of(self, data: Any) -> list[Any]:
        if not is_mapping(data) or any(name not in MODALITIES for name in data):
            found = ", ".join(map(repr, data)) if is_mapping(data) else f"a {type(data).__name__}"
            raise RequestError(
                f"multi_modal_data is a dict with {' or '.join(map(repr, MODALITIES))}; this one has {found}",
                param=PARAM,
            )
        images = as_list(data["image"]) if data.get("image") is not None else []
        self.check_count(len(images))
        return images

    def check_count(self, count: int) -> None:
        """Raises RequestError: a prompt may not have so many images."""
        limit = self._settings.limit_of("image")
        if limit is not None and count > limit:
            raise RequestError(f"the prompt has {count} images; limit_mm_per_prompt allows {limit}", param=PARAM)
        if limit is None and count > limits.MAX_MEDIA_ITEMS:
            most = f"{limits.MAX_MEDIA_ITEMS} are allowed where limit_mm_per_prompt names no number"
            raise RequestError(f"the prompt has {count} images; {most}", param=PARAM)

    def _process(self, where: str, given: Any, uuid: str | None, settings: dict[str, Any]) -> tuple[str, Processed]:
        """The key and the processed form of one image."""
        options = json.dumps(settings, sort_keys=True, default=str).encode()
        embeds = GivenEmbeds.read(given, where, is_on=self._settings.mm_embeds)
        pixels = None if embeds is not None or (given is None and uuid is not None) else read_image(given, where)
        if uuid is not None:
            key = content_key(np.frombuffer(uuid.encode(), np.uint8).reshape(1, 1, -1), b"uuid" + options)
        elif embeds is not None:
            key = f"{IMAGE_EMBEDS}:{content_key(embeds.array_ED, repr(embeds.grid).encode())}"
        else:
            assert pixels is not None
            key = content_key(pixels, options)
        found = self.cache.get(key)
        if found is None and embeds is not None:
            found = self._take(embeds, where)
            self.cache.put(key, found)
        if found is None:
            if pixels is None:
                raise RequestError(f"{where} is None, and its uuid {uuid!r} is not known (any more)", param=PARAM)
            found = self._run(pixels, where, settings)
            self.cache.put(key, found)
        return key, found

    def _run(self, pixels: Pixels, where: str, settings: dict[str, Any]) -> Processed:
        """Have the processor compute one image."""
        processor = image_processor(self._path)
        try:
            given = processor(pixels, return_tensors="np", input_data_format="channels_last", **settings)
        except Exception as error:  # whatever a processor raises for an odd image, or for options that it does not have
            raise RequestError(f"{where} cannot be processed: {error}", param=PARAM) from error
        arrays = {name: _of_one(values) for name, values in given.items()}
        expansion = self.family.expand(self._hf, arrays, self._encode)
        return self._processed(expansion, expansion.arrays, where)

    def _take(self, embeds: GivenEmbeds, where: str) -> Processed:
        """An image whose embeddings are given."""
        try:
            if self.family.of_embeds is None:
                raise ValueError("this model reads images as pixels")
            expansion = self.family.of_embeds(self._hf, len(embeds.array_ED), embeds.grid)
        except ValueError as error:
            raise RequestError(f"{where}: {error}", param=PARAM) from None
        return self._processed(expansion, {EMBEDS: embeds.array_ED}, where, IMAGE_EMBEDS)

    def _processed(self, expansion: Expansion, arrays: Arrays, where: str, modality: str = "image") -> Processed:
        num_embeds = expansion.token_ids.count(EMBEDDED)
        budget = self._settings.encoder_budget
        if num_embeds > budget:
            raise RequestError(
                f"{where} makes {num_embeds} embeddings; at most {budget} can be computed at once: make it smaller",
                param=PARAM,
            )
        tensors = {name: MediaTensor.from_array(array) for name, array in arrays.items()}
        own = [self._embedded if token == EMBEDDED else token for token in expansion.token_ids]
        tokens = (expansion.before, own, expansion.after)
        return Processed(*tokens, num_embeds, list(expansion.grid), tensors, modality)

    def _expand(
        self, token_ids: Sequence[int], processed: list[tuple[str, Processed]], typed: set[int]
    ) -> tuple[list[int], list[MediaItem]]:
        if self.family.is_alone:
            token_ids, typed = [self.marker] * len(processed), set()
            if len(processed) != 1:
                raise RequestError(f"a prompt of this model is a text or one image, not {len(processed)}", param=PARAM)
        places = [at for at, token in enumerate(token_ids) if token == self.marker and at not in typed]
        if len(places) != len(processed):
            raise RequestError(
                f"the prompt has {len(places)} places for images (token {self.marker}), and multi_modal_data has "
                f"{len(processed)} images",
                param=PARAM,
            )
        join = Newlines(self._encode).join if self.family.joins_newlines else operator.add
        expanded: list[int] = []
        items: list[MediaItem] = []
        start = 0
        for at, (key, one) in zip(places, processed, strict=True):
            expanded = join(join(expanded, list(token_ids[start:at])), one.before)
            own = (len(expanded), len(one.token_ids), self._embedded, one.num_embeds)
            items.append(MediaItem(key, one.modality, *own, one.grid, one.tensors, self.family.sees))
            expanded += [*one.token_ids, *one.after]
            start = at + 1
        return join(expanded, list(token_ids[start:])), items


def _at(param: str, function: Callable[..., ResultT], *args: Any) -> ResultT:
    """What a function gives; its errors name the field."""
    try:
        return function(*args)
    except RequestError as error:
        error.param = param
        raise


def _of_one(values: Any) -> npt.NDArray[Any]:
    """What a processor gave for a batch of one image, without the batch; floats as float32."""
    array = np.asarray(values)
    array = array[0] if array.ndim and array.shape[0] == 1 else array
    return array.astype(np.float32, copy=False) if array.dtype.kind == "f" else array
