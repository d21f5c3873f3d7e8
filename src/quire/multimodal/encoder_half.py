"""The half of a prompt that an encoder reads beside a decoder's: text or sound, as an item that the workers' encoder takes.

Hugging Face's feature extractors are the reference of what an encoder of sound reads. Runs in the frontend, in any thread.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.config import ModelConfig, MultiModalConfig
from quire.config.hf_config import HFConfig
from quire.config.multimodal import GIB
from quire.errors import RequestError
from quire.guards import is_mapping
from quire.media import AUDIO, BESIDE, MediaItem, MediaTensor
from quire.multimodal.audio import PARAM, Samples, as_sounds, read_audio
from quire.multimodal.checkpoint_processors import FeatureExtractor, feature_extractor
from quire.multimodal.content import content_key, name_key, read_uuids
from quire.multimodal.processor_cache import Processed, ProcessorCache

TEXT = "text"


@dataclasses.dataclass(frozen=True)
class Half:
    """What an architecture's encoder reads.

    Attributes:
        modality: `audio` or `text`.
        lengths: fields of config.json that name its longest; `usual`: where none does.
    """

    modality: str
    lengths: tuple[str, ...]
    usual: int

    def longest(self, hf: HFConfig) -> int:
        """Rows of the longest that it may read."""
        return int(next((hf.get(name) for name in self.lengths if hf.get(name) is not None), self.usual))


HALVES: dict[str, Half] = {
    "WhisperForConditionalGeneration": Half(AUDIO, ("max_source_positions",), 1500),
    **dict.fromkeys(
        (
            "BartForConditionalGeneration",
            "MBartForConditionalGeneration",
            "MarianMTModel",
            "PegasusForConditionalGeneration",
            "M2M100ForConditionalGeneration",
        ),
        Half(TEXT, ("max_position_embeddings",), 1024),
    ),
    **dict.fromkeys(
        ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"),
        Half(TEXT, ("n_positions",), 512),
    ),
}
"""By architecture: whose decoder has an encoder beside it."""


class EncoderHalf:
    """Makes items of what stands beside the prompts of one model.

    Args:
        model: whose architecture is one of `HALVES`.
    """

    def __init__(self, model: ModelConfig, settings: MultiModalConfig) -> None:
        self._hf, self._path, self._settings = model.hf_config, model.path, settings
        half = HALVES[model.architecture]
        self.modality, self.longest = half.modality, half.longest(model.hf_config)
        self.cache = ProcessorCache(int(settings.mm_processor_cache_gb * GIB))

    @property
    def decoder_start(self) -> list[int]:
        """What a decoder's prompt begins with."""
        start = self._hf.get("decoder_start_token_id")
        start = self._hf.get("bos_token_id") if start is None else start
        return [] if start is None else [int(start)]

    @property
    def usual_prompt(self) -> list[int]:
        """A decoder's prompt where a request has none."""
        forced = self._hf.get("forced_bos_token_id")
        return self.decoder_start + ([] if forced is None else [int(forced)])

    def of_tokens(self, token_ids: Sequence[int]) -> MediaItem:
        """Text beside a prompt.
        Raises RequestError: it is empty or too long."""
        if not 0 < len(token_ids) <= self.longest:
            raise RequestError(
                f"the encoder's prompt has {len(token_ids)} tokens; it may have 1 to {self.longest}",
                param="encoder_prompt",
            )
        array = np.asarray(token_ids, dtype=np.int32)
        tensors = {"token_ids": MediaTensor.from_array(array)}
        return _beside(content_key(array, TEXT.encode()), TEXT, len(array), tensors)

    def of_media(self, data: Any, uuids: Any = None, options: Mapping[str, Any] | None = None) -> MediaItem:
        """A sound beside a prompt: `{"audio": one}`.
        Raises RequestError: it cannot be read."""
        if self.modality != AUDIO or not is_mapping(data) or set(data) - {AUDIO}:
            found = ", ".join(map(repr, data)) if is_mapping(data) else f"a {type(data).__name__}"
            wanted = "the encoder reads text" if self.modality == TEXT else "multi_modal_data is a dict with 'audio'"
            raise RequestError(f"{wanted}; this one has {found}", param=PARAM)
        sounds = as_sounds(data[AUDIO])
        if len(sounds) != 1:
            raise RequestError(f"a prompt has one sound, and multi_modal_data has {len(sounds)}", param=PARAM)
        if self._settings.limit_of(AUDIO) == 0:
            raise RequestError("the prompt has a sound; limit_mm_per_prompt allows 0", param=PARAM)
        (name,) = read_uuids(uuids, AUDIO, 1)
        key, found = self._process(sounds[0], name, {**self._settings.mm_processor_kwargs, **(options or {})})
        return _beside(key, AUDIO, found.num_embeds, found.tensors)

    @property
    def extractor(self) -> FeatureExtractor:
        return feature_extractor(self._path, self._hf)

    def _process(self, given: Any, uuid: str | None, settings: dict[str, Any]) -> tuple[str, Processed]:
        """The key and the frames of a sound."""
        extractor, options = self.extractor, json.dumps(settings, sort_keys=True, default=str).encode()
        samples = None if given is None else read_audio(given, extractor.sampling_rate, "the sound of the prompt")
        if uuid is not None:
            key = name_key(uuid, options)
        elif samples is not None:
            key = content_key(samples, options)
        else:
            raise RequestError("the sound of the prompt is None, and has no uuid", param=PARAM)
        return key, self.cache.get_or_make(key, lambda: self._run(samples, uuid, settings))

    def _run(self, samples: Samples | None, uuid: str | None, settings: dict[str, Any]) -> Processed:
        if samples is None:
            raise RequestError(f"the sound is None, and its uuid {uuid!r} is not known (any more)", param=PARAM)
        rate = self.extractor.sampling_rate
        try:
            given = self.extractor(samples, sampling_rate=rate, return_tensors="np", **settings)
            mel = np.ascontiguousarray(given["input_features"][0], dtype=np.float32)
        except Exception as error:  # whatever an extractor raises for options that it does not have
            raise RequestError(f"the sound cannot be processed: {error}", param=PARAM) from error
        count = mel.shape[-1] // 2
        if count > self.longest:
            raise RequestError(f"the sound makes {count} rows; the encoder reads {self.longest}", param=PARAM)
        return Processed([], [], [], count, [], {"mel": MediaTensor.from_array(mel)}, AUDIO)


def _beside(key: str, modality: str, num_embeds: int, tensors: dict[str, MediaTensor]) -> MediaItem:
    return MediaItem(key, modality, 0, 1, BESIDE, num_embeds, [], tensors)
