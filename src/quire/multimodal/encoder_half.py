"""The half of a prompt that an encoder reads beside a decoder's: text, a sound or an image, as an item that the workers' encoder
takes. Runs in the frontend, in any thread.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from quire.config import ModelConfig, MultiModalConfig
from quire.config.hf_config import HFConfig
from quire.errors import RequestError
from quire.media import AUDIO, BESIDE, IMAGE, MODALITIES, MediaItem, MediaTensor
from quire.multimodal.checkpoint_processors import FeatureExtractor, feature_extractor
from quire.multimodal.content import PARAM, content_key
from quire.multimodal.florence_tasks import spell
from quire.multimodal.image_families import EMBEDDED, Encode
from quire.multimodal.processor import MediaProcessor

TEXT = "text"
TOKENS = "token_ids"


@dataclasses.dataclass(frozen=True)
class Half:
    """What an architecture's encoder reads.

    Attributes:
        modality: `audio`, `image` or `text`.
        lengths: fields of config.json that name its longest; `usual`: where none does.
        begins: whether a decoder's prompt begins with the model's start token.
        spell: of an encoder that reads text behind an image: what its text is made of a user's.
    """

    modality: str
    lengths: tuple[str, ...]
    usual: int
    begins: bool = True
    spell: Callable[[str], str] | None = None

    @property
    def reads_text(self) -> bool:
        """Whether text stands in this half, alone or behind an image."""
        return self.modality == TEXT or self.spell is not None

    def longest(self, hf: HFConfig) -> int:
        """Rows of the longest that it may read."""
        found = (part.get(name) for part in (hf, hf.get("text_config", hf)) for name in self.lengths)
        return int(next((length for length in found if length is not None), self.usual))


HALVES: dict[str, Half] = {
    "WhisperForConditionalGeneration": Half(AUDIO, ("max_source_positions",), 1500),
    "VisionEncoderDecoderModel": Half(IMAGE, ("max_source_positions",), 4800, begins=False),
    "Florence2ForConditionalGeneration": Half(IMAGE, ("max_position_embeddings",), 1024, spell=spell),
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
        encode: a text's token ids, special tokens meant.

    Attributes:
        media: reads the sound or the image; None where there is only text.
    """

    def __init__(self, model: ModelConfig, settings: MultiModalConfig, encode: Encode) -> None:
        self._hf, self._path = model.hf_config, model.path
        self.kind = HALVES[model.architecture]
        self.modality, self.longest = self.kind.modality, self.kind.longest(model.hf_config)
        self.media = None if self.modality == TEXT else MediaProcessor(model, settings, encode)

    @property
    def decoder_start(self) -> list[int]:
        """What a decoder's prompt begins with."""
        start = self._first("decoder_start_token_id", "bos_token_id")
        return [] if start is None else [start]

    @property
    def usual_prompt(self) -> list[int]:
        """A decoder's prompt where a request has none."""
        forced = self._first("forced_bos_token_id")
        return self.decoder_start + ([] if forced is None else [forced])

    def _first(self, *names: str) -> int | None:
        """The token of the first of these fields that config.json, or its section of text, has."""
        sections = (self._hf, self._hf.get("text_config", self._hf))
        found = (section.get(name) for name in names for section in sections)
        return next((int(token) for token in found if token is not None), None)

    def of_tokens(self, token_ids: Sequence[int]) -> MediaItem:
        """Text beside a prompt.
        Raises RequestError: it is empty or too long."""
        if not 0 < len(token_ids) <= self.longest:
            raise RequestError(
                f"the encoder's prompt has {len(token_ids)} tokens; it may have 1 to {self.longest}",
                param="encoder_prompt",
            )
        array = np.asarray(token_ids, dtype=np.int32)
        tensors = {TOKENS: MediaTensor.from_array(array)}
        return _beside(content_key(array, TEXT.encode()), TEXT, len(array), tensors)

    def of_media(
        self,
        token_ids: Sequence[int],
        data: Any,
        uuids: Any = None,
        options: Mapping[str, Any] | None = None,
        fields: Mapping[str, Sequence[str]] | None = None,
    ) -> MediaItem:
        """A sound or an image beside a prompt, and the text behind it, where the encoder reads any. Arguments are those of
        `MediaProcessor.apply`.
        Raises RequestError: it cannot be read."""
        if self.media is None:
            found = ", ".join(map(repr, data)) if isinstance(data, Mapping) else f"a {type(data).__name__}"
            raise RequestError(f"the encoder reads text; this prompt has {found}", param=PARAM)
        _, (item,) = self.media.apply([], data, uuids, options, fields)
        rows = item.num_embeds + len(token_ids)
        if rows > self.longest:
            behind = f" with the text behind it ({len(token_ids)} tokens)" if token_ids else ""
            one = MODALITIES[self.modality].removesuffix("s")
            raise RequestError(f"the {one}{behind} makes {rows} rows; the encoder reads {self.longest}", param=PARAM)
        if self.modality == AUDIO:
            return _beside(item.key, AUDIO, rows, item.tensors)
        array = np.array([EMBEDDED] * item.num_embeds + list(token_ids), dtype=np.int32)
        tensors = item.tensors | {TOKENS: MediaTensor.from_array(array)}
        return _beside(content_key(array, item.key.encode()), IMAGE, rows, tensors)

    @property
    def extractor(self) -> FeatureExtractor:
        return feature_extractor(self._path, self._hf)


def _beside(key: str, modality: str, num_embeds: int, tensors: dict[str, MediaTensor]) -> MediaItem:
    return MediaItem(key, modality, 0, 1, BESIDE, num_embeds, [], tensors)
