"""From a prompt's token ids and its images, videos and sounds to the expanded prompt and its items.

Hugging Face's processors are the reference of what an encoder reads; what they gave is kept by content. Runs in the
frontend, in any thread.
"""

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config import ModelConfig, MultiModalConfig, limits
from quire.config.borrowed_sight import sees_through_transformers
from quire.config.hf_config import HFConfig
from quire.errors import RequestError
from quire.guards import is_mapping
from quire.media import AUDIO, EMBEDS, IMAGE, MADE_BEFORE, MODALITIES, SPAN, VIDEO, MediaItem, MediaTensor
from quire.multimodal.audio import as_sounds, read_audio
from quire.multimodal.checkpoint_processors import feature_extractor, image_processor, video_options, whole_processor
from quire.multimodal.content import PARAM, as_list, content_key, name_key, read_image, read_uuids
from quire.multimodal.given_embeds import GivenEmbeds
from quire.multimodal.image_families import (
    EMBEDDED,
    FAMILIES,
    PROMPT,
    TOGETHER,
    Arrays,
    Encode,
    Expansion,
    Family,
)
from quire.multimodal.media_source import MediaSource
from quire.multimodal.newlines import Newlines
from quire.multimodal.processor_cache import Processed, cache_of
from quire.multimodal.sound_families import SOUND_FAMILIES
from quire.multimodal.video import as_videos, read_video
from quire.multimodal.video_families import ONLY_VIDEO, VIDEO_FAMILIES, VideoFamily
from quire.multimodal.whole_processor import whole_family

ResultT = TypeVar("ResultT")


def families_of(architecture: str) -> dict[str, Family]:
    """What an architecture reads besides text, by modality."""
    tables: dict[str, Mapping[str, Family]] = {IMAGE: FAMILIES, VIDEO: VIDEO_FAMILIES, AUDIO: SOUND_FAMILIES}
    return {modality: table[architecture] for modality, table in tables.items() if architecture in table}


def readable_modalities(architecture: str, hf: HFConfig) -> list[str]:
    """What prompts of a checkpoint may have besides text."""
    eyes, ears = hf.get("vision_config"), hf.get("audio_config", hf.get("encoder_config"))
    parts = {IMAGE: eyes, VIDEO: eyes, AUDIO: ears}
    if not families_of(architecture) and sees_through_transformers(architecture, hf):
        return [IMAGE]
    return [
        modality
        for modality, family in families_of(architecture).items()
        if family.is_alone or parts[modality] is not None
    ]


class MediaProcessor:
    """Processes images, videos and sounds of one model.

    Args:
        model: whose `modalities` are read.
        settings: limits, options and the size of the cache.
        encode: a text's token ids, special tokens meant.

    Attributes:
        source: reads what requests name by URL.
    """

    def __init__(self, model: ModelConfig, settings: MultiModalConfig, encode: Encode) -> None:
        self._hf, self._path, self._settings = model.hf_config, model.path, settings
        self._encode = encode
        self._model, self._vocab_size = model, model.vocab_size
        self.source = MediaSource(settings)
        self.cache = cache_of(settings)

    @functools.cached_property
    def _families(self) -> dict[str, Family]:
        families = families_of(self._model.architecture)
        if not families and IMAGE in self._model.modalities:
            families = {IMAGE: whole_family(whole_processor(self._path))}
        return {modality: families[modality] for modality in self._model.modalities}

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether an item is a whole prompt."""
        return any(family.is_alone for family in self._families.values())

    @functools.cached_property
    def markers(self) -> dict[str, int]:
        """The token that stands for an item, by modality."""
        return {modality: self._marker_of(family) for modality, family in self._families.items()}

    def _marker_of(self, family: Family) -> int:
        if family.marker_text:
            with contextlib.suppress(RequestError):  # there is no tokenizer
                if len(token_ids := self._encode(family.marker_text)) == 1:
                    return token_ids[0]
        return family.marker_token(self._hf)

    @property
    def _begin(self) -> int:
        """The token that begins texts."""
        found = [hf.get("bos_token_id") for hf in (self._hf.get("text_config", HFConfig({})), self._hf)]
        return int(next((token for token in found if token is not None), 2))

    def _embedded_of(self, family: Family) -> int:
        """The token that each of an item's places has; one that the model has no row for stands in no prompt."""
        token = family.embedded_token(self._hf) if family.token else self._marker_of(family)
        return token if token < self._vocab_size else 0

    def marker_texts(self, id_to_token: Callable[[int], str | None]) -> dict[str, str]:
        """The markers as a tokenizer writes them; nothing where an item is not among tokens."""
        if self.is_alone:
            return dict.fromkeys(self.markers, "")
        texts = {modality: id_to_token(token) for modality, token in self.markers.items() if token >= 0}
        return {modality: text for modality, text in texts.items() if text is not None}

    def apply(
        self,
        token_ids: Sequence[int],
        data: Any,
        uuids: Any = None,
        options: Mapping[str, Any] | None = None,
        fields: Mapping[str, Sequence[str]] | None = None,
    ) -> tuple[list[int], list[MediaItem]]:
        """The prompt in which each marker is replaced by its item's tokens, and the items.

        Args:
            data: `{"image": one or several, "video": …, "audio": …}`.
            uuids: names of items that stand for the hashes of their content.
            options: of the processor, for this request.
            fields: of a request, that the items of each modality come from, for errors.

        Raises:
            RequestError: something about it cannot be served.
        """
        found = self._read(data)
        processed = {
            modality: self._process_all(modality, items, uuids, options, (fields or {}).get(modality))
            for modality, items in found.items()
        }
        if found.get(IMAGE) and found.get(AUDIO) and self._families[AUDIO].sees_images:
            processed[AUDIO] = [(f"{key}/beside", each.beside_images()) for key, each in processed[AUDIO]]
        return self._expand(token_ids, processed)

    def _read(self, data: Any) -> dict[str, list[Any]]:
        """The items of each modality that the model reads."""
        if not is_mapping(data) or any(name not in self._families for name in data):
            found = ", ".join(map(repr, data)) if is_mapping(data) else f"a {type(data).__name__}"
            raise RequestError(
                f"multi_modal_data is a dict with {' or '.join(map(repr, self._families))}; this one has {found}",
                param=PARAM,
            )
        lists: dict[str, Callable[[Any], list[Any]]] = {IMAGE: as_list, VIDEO: as_videos, AUDIO: as_sounds}
        items = {name: lists[name](data[name]) if data.get(name) is not None else [] for name in self._families}
        self.check_counts({name: len(each) for name, each in items.items()})
        return items

    def check_counts(self, counts: Mapping[str, int]) -> None:
        """Raises RequestError: a prompt may not have so many items of a modality."""
        for modality, count in counts.items():
            limit, several = self._settings.limit_of(modality), MODALITIES[modality]
            if limit is not None and count > limit:
                raise RequestError(f"the prompt has {count} {several}; limit_mm_per_prompt allows {limit}", param=PARAM)
            if limit is None and count > limits.MAX_MEDIA_ITEMS:
                most = f"{limits.MAX_MEDIA_ITEMS} are allowed where limit_mm_per_prompt names no number"
                raise RequestError(f"the prompt has {count} {several}; {most}", param=PARAM)

    def _process_all(
        self,
        modality: str,
        items: Sequence[Any],
        uuids: Any,
        options: Mapping[str, Any] | None,
        fields: Sequence[str] | None,
    ) -> list[tuple[str, Processed]]:
        """The keys and the processed forms of a modality's items."""
        family, names = self._families[modality], read_uuids(uuids, modality, len(items))
        own = {**family.options(self._hf), **family.counted(len(items))}
        settings = {**own, **self._settings.mm_processor_kwargs, **(options or {})}
        if settings.pop("use_audio_in_video", False):
            raise RequestError("use_audio_in_video: a film's sound is not heard; give it as an audio", param=PARAM)
        if modality != VIDEO and VIDEO in self._families:
            settings = {name: value for name, value in settings.items() if name not in ONLY_VIDEO}
        where = fields or [f"{modality} {number} of the prompt" for number in range(len(items))]
        about = modality.encode() + json.dumps(settings, sort_keys=True, default=str).encode()
        process = {IMAGE: self._process_image, VIDEO: self._process_video, AUDIO: self._process_sound}[modality]
        return [
            _at(field if fields else PARAM, process, field, item, name, settings, about)
            for field, item, name in zip(where, items, names, strict=True)
        ]

    def _process_image(
        self, where: str, given: Any, uuid: str | None, settings: dict[str, Any], options: bytes
    ) -> tuple[str, Processed]:
        if (taken := self._made_before(IMAGE, where, given, uuid, options)) is not None:
            return taken
        pixels = None if given is None and uuid is not None else read_image(given, where)
        family = self._families[IMAGE]

        def run(pixels: npt.NDArray[Any]) -> list[Expansion]:
            processor = whole_processor(self._path) if family.is_whole else image_processor(self._path)
            return self._expansions(
                IMAGE, processor(pixels, return_tensors="np", input_data_format="channels_last", **settings)
            )

        return self._kept(IMAGE, pixels, uuid, options, where, run)

    def _process_video(
        self, where: str, given: Any, uuid: str | None, settings: dict[str, Any], options: bytes
    ) -> tuple[str, Processed]:
        video = None if given is None and uuid is not None else read_video(given, where)
        if video is not None and uuid is None:
            options += repr((video.times.tolist(), video.rate, video.total, video.is_whole)).encode()
        family = self._families[VIDEO]

        def run(pixels: npt.NDArray[Any]) -> list[Expansion]:
            assert isinstance(family, VideoFamily) and video is not None
            return family.expansions(video, settings, video_options(self._path), self._hf, self._encode)

        return self._kept(VIDEO, None if video is None else video.frames, uuid, options, where, run)

    def _process_sound(
        self, where: str, given: Any, uuid: str | None, settings: dict[str, Any], options: bytes
    ) -> tuple[str, Processed]:
        if (taken := self._made_before(AUDIO, where, given, uuid, options)) is not None:
            return taken
        extractor = feature_extractor(self._path, self._hf)
        rate = extractor.sampling_rate
        samples = None if given is None and uuid is not None else read_audio(given, rate, where)
        most = self._families[AUDIO].samples_each * self._settings.encoder_budget
        if samples is not None and 0 < most < len(samples):
            seconds = f"{len(samples) / rate:.1f} seconds long; at most {most / rate:.1f} fit into a prompt"
            raise RequestError(f"{where} is {seconds}", param=PARAM)

        def run(samples: npt.NDArray[Any]) -> list[Expansion]:
            return self._expansions(AUDIO, extractor([samples], sampling_rate=rate, return_tensors="np", **settings))

        return self._kept(AUDIO, samples, uuid, options, where, run)

    def _expansions(self, modality: str, given: Mapping[str, Any]) -> list[Expansion]:
        """What stands in the prompt for an item of which Hugging Face's processor gave this."""
        arrays = {name: _of_one(values) for name, values in given.items()}
        return [self._families[modality].expand(self._hf, arrays, self._encode)]

    def _kept(
        self,
        modality: str,
        content: npt.NDArray[Any] | None,
        uuid: str | None,
        options: bytes,
        where: str,
        run: Callable[[npt.NDArray[Any]], list[Expansion]],
    ) -> tuple[str, Processed]:
        """The key and the processed form of one item, which a processor computes where nothing is kept."""

        def make() -> Processed:
            if content is None:
                raise RequestError(f"{where} is None, and its uuid {uuid!r} is not known (any more)", param=PARAM)
            try:
                expansions = run(content)
            except Exception as error:  # whatever comes of odd content, or of options that a processor does not have
                raise RequestError(f"{where} cannot be processed: {error}", param=PARAM) from error
            first, *others = (self._processed(each, each.arrays, where, modality) for each in expansions)
            return msgspec.structs.replace(first, others=tuple(others))

        if uuid is None:
            assert content is not None
            key = content_key(content, options)
        else:
            key = name_key(uuid, options)
        return key, self.cache.get_or_make(key, make)

    def _made_before(
        self, modality: str, where: str, given: Any, uuid: str | None, options: bytes
    ) -> tuple[str, Processed] | None:
        """The key and the form of an item that is given as embeddings; None where it is not."""
        embeds = GivenEmbeds.read(given, modality, where, is_on=self._settings.mm_embeds)
        if embeds is None:
            return None
        key = f"{MADE_BEFORE[modality]}:{content_key(embeds.array_ED, repr(embeds.grid).encode())}"
        key = key if uuid is None else name_key(uuid, options)
        return key, self.cache.get_or_make(key, lambda: self._take(modality, embeds, where))

    def _take(self, modality: str, embeds: GivenEmbeds, where: str) -> Processed:
        """An item whose embeddings are given."""
        family = self._families[modality]
        try:
            if family.of_embeds is None:
                raise ValueError("this model reads images as pixels")
            expansion = family.of_embeds(self._hf, len(embeds.array_ED), embeds.grid)
        except ValueError as error:
            raise RequestError(f"{where}: {error}", param=PARAM) from None
        return self._processed(expansion, {EMBEDS: embeds.array_ED}, where, MADE_BEFORE[modality])

    def _processed(self, expansion: Expansion, arrays: Arrays, where: str, modality: str) -> Processed:
        num_embeds = expansion.token_ids.count(EMBEDDED)
        budget = self._settings.encoder_budget
        if not num_embeds:
            raise RequestError(f"{where} is too short: it makes no embedding", param=PARAM)
        if num_embeds > budget:
            raise RequestError(
                f"{where} makes {num_embeds} embeddings; at most {budget} can be computed at once: make it smaller",
                param=PARAM,
            )
        tensors = {name: MediaTensor.from_array(array) for name, array in arrays.items()}
        kind = next((kind for kind, made in MADE_BEFORE.items() if made == modality), modality)
        embedded = self._embedded_of(self._families[kind])
        own = expansion.written or [embedded if token == EMBEDDED else token for token in expansion.token_ids]
        tokens = (expansion.before, own, expansion.after)
        reader = IMAGE if modality == VIDEO else modality
        return Processed(*tokens, num_embeds, list(expansion.grid), tensors, reader, expansion.interval)

    def _expand(
        self, token_ids: Sequence[int], processed: Mapping[str, list[tuple[str, Processed]]]
    ) -> tuple[list[int], list[MediaItem]]:
        families = self._families.values()
        if self.is_alone:
            token_ids = [self.markers[modality] for modality, items in processed.items() for _ in items]
            if len(token_ids) != 1:
                one = " or ".join(MODALITIES[modality].removesuffix("s") for modality in processed)
                raise RequestError(f"a prompt of this model has one {one}, not {len(token_ids)}", param=PARAM)
        join = operator.add
        if any(family.joins_newlines for family in families):
            join = Newlines(self._encode).join
        if any(family.leads for family in families):
            token_ids = self._led(token_ids, len(processed[IMAGE]))
        if any(family.begins for family in families) and any(processed.values()):
            try:
                begin = whole_processor(self._path).begin
            except Exception as error:  # whatever a checkpoint's processor raises
                raise RequestError(f"the model's processor cannot be read: {error}", param=PARAM) from error
            token_ids = token_ids if list(token_ids[:1]) == begin else [*begin, *token_ids]
        expanded: list[int] = []
        items: list[MediaItem] = []
        counts = dict.fromkeys(processed, 0)
        left = {modality: iter(found) for modality, found in processed.items()}
        start = 0
        for at, modality in self._places(token_ids, processed):
            family, (key, first) = self._families[modality], next(left[modality])
            around = self._around(family, token_ids, at)
            expanded = join(expanded, list(token_ids[start : at - around]))
            sees = family.sees(self._hf)
            sees = "" if sees in (PROMPT, TOGETHER) else sees
            for number, one in enumerate((first, *first.others)):
                expanded = join(expanded, family.number(one.before, counts[modality]))
                own = (len(expanded), len(one.token_ids), self._embedded_of(family), one.num_embeds)
                name = f"{key}/{number}" if first.others else key
                items.append(MediaItem(name, one.modality, *own, one.grid, one.tensors, sees, one.interval))
                expanded += [*one.token_ids, *one.after]
            start, counts[modality] = at + 1 + around, counts[modality] + 1
        expanded = join(expanded, list(token_ids[start:]))
        return expanded, items + self._spans(expanded, items)

    def _spans(self, token_ids: Sequence[int], items: Sequence[MediaItem]) -> list[MediaItem]:
        """What says of a part of the prompt that its tokens see one another."""
        seen = {family.sees(self._hf) for family in self._families.values()}
        if not items or not seen & {PROMPT, TOGETHER}:
            return []
        start, end, sees = (0, len(token_ids), "item") if PROMPT in seen else (items[0].offset, items[-1].end, "items")
        keys = "".join(item.key for item in items).encode()
        key = content_key(np.asarray(token_ids[start:end], dtype=np.int64), keys)
        return [MediaItem(key, PROMPT, start, end - start, SPAN, 0, sees=sees)]

    def _led(self, token_ids: Sequence[int], count: int) -> list[int]:
        """A prompt's text behind its images, between the token that begins texts and a newline."""
        marker, begin, newline = self.markers[IMAGE], self._begin, self._encode("\n")
        text = list(token_ids)[list(token_ids[:1]) == [begin] :]
        if marker not in text:
            text = [marker] * count + text
        end = len(text) - text[::-1].index(marker) if marker in text else 0
        ending = [] if text[-len(newline) :] == newline else newline
        return [*text[:end], begin, *text[end:], *ending]

    def _around(self, family: Family, token_ids: Sequence[int], at: int) -> int:
        """How many tokens before a marker, and as many behind it, stand around each frame instead."""
        if not isinstance(family, VideoFamily) or not family.around[0] or at == 0:
            return 0
        before, after = (self._encode(text) for text in family.around)
        return int(before == list(token_ids[at - 1 : at]) and after == list(token_ids[at + 1 : at + 2]))

    def _places(self, token_ids: Sequence[int], processed: Mapping[str, Sequence[Any]]) -> list[tuple[int, str]]:
        """Where the prompt has which kind of item, in order."""
        kinds = {marker: modality for modality, marker in self.markers.items()}
        places = [(at, kinds[token]) for at, token in enumerate(token_ids) if token in kinds]
        for modality, items in processed.items():
            count, several = sum(kind == modality for _, kind in places), MODALITIES[modality]
            if count != len(items):
                raise RequestError(
                    f"the prompt has {count} places for {several} (token {self.markers[modality]}), and multi_modal_data has "
                    f"{len(items)} {several}",
                    param=PARAM,
                )
        return places


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
