"""A prompt in two halves, for a model with an encoder beside its decoder: which forms it may have, and what they become.

Knows forms of prompts. What the encoder's half becomes is `multimodal/encoder_half.py`'s business.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from quire.errors import RequestError
from quire.media import AUDIO, MediaItem
from quire.multimodal.encoder_half import EncoderHalf

Encode = Callable[[str, bool], list[int]]
CheckIds = Callable[[Any, str], list[int]]


class PromptHalves:
    """Reads the prompts of one model.

    Args:
        encode: token ids of a text, with or without special tokens.
        check: token ids that a user gives, and the field that they come from.
        open_media: puts what files hold in the place of their paths in `multi_modal_data`, where it may name any.
    """

    def __init__(self, half: EncoderHalf, encode: Encode, check: CheckIds, open_media: Callable[[Any], Any]) -> None:
        self.half, self._encode, self._check, self._open_media = half, encode, check, open_media

    def read(
        self, prompt: Any, fields: Mapping[str, Sequence[str]] | None = None
    ) -> tuple[list[int], str | None, MediaItem]:
        """The decoder's token ids, their text where it is known, and what stands beside them. A prompt has both halves by name;
        or it is the encoder's where that reads text, and the decoder's where a sound or an image alone is beside it.
        `fields`: of the request, that media come from, for errors.
        Raises RequestError: it is no such prompt."""
        encoder: Any = prompt
        decoder: Any = None
        if isinstance(prompt, Mapping):
            given = cast("Mapping[str, Any]", prompt)
            if "encoder_prompt" in given:
                encoder, decoder = given["encoder_prompt"], given.get("decoder_prompt")
            elif given.get("multi_modal_data") and not self.half.kind.reads_text:
                decoder = given
        text, ids = self._read_ids(decoder, "decoder_prompt", False)
        return self._begun(ids), text, self._beside(encoder, fields)

    def _begun(self, ids: list[int]) -> list[int]:
        """A decoder's prompt with what each begins with."""
        start = self.half.decoder_start
        if not ids:
            return self.half.usual_prompt
        return ids if set(start) <= set(ids) or not self.half.kind.begins else start + ids

    def _beside(self, encoder: Any, fields: Mapping[str, Sequence[str]] | None) -> MediaItem:
        kind = self.half.kind
        ids = self._read_ids(encoder, "encoder_prompt", True, kind.spell or str)[1] if kind.reads_text else []
        if isinstance(encoder, Mapping):
            given = cast("Mapping[str, Any]", encoder)
            if given.get("multi_modal_data"):
                options, data = given.get("mm_processor_kwargs"), self._open_media(given["multi_modal_data"])
                return self.half.of_media(ids, data, given.get("multi_modal_uuids"), options, fields)
        if not kind.reads_text:
            hears = "the model's encoder hears: give multi_modal_data={'audio': (samples, rate)}"
            sees = "the model's encoder sees: give multi_modal_data={'image': image}"
            raise RequestError(hears if kind.modality == AUDIO else sees, param="multi_modal_data")
        return self.half.of_tokens(ids)

    def _read_ids(
        self, given: Any, param: str, add_special_tokens: bool, spell: Callable[[str], str] = str
    ) -> tuple[str | None, list[int]]:
        """The text of half a prompt, if it is one, and its token ids. `spell`: what they are made of."""
        if isinstance(given, Mapping):
            mapping = cast("Mapping[str, Any]", given)
            ids = mapping.get("prompt_token_ids")
            given = mapping.get("prompt") if ids is None else ids
        if given is None or isinstance(given, str):
            return given, self._encode(spell(given), add_special_tokens) if given else []
        return None, self._check(given, param)
