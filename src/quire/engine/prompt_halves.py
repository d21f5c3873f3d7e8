"""A prompt in two halves, for a model with an encoder beside its decoder: which forms it may have, and what they become.

Knows forms of prompts. What the encoder's half becomes is `multimodal/encoder_half.py`'s business.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from quire.errors import RequestError
from quire.media import MediaItem
from quire.multimodal.encoder_half import TEXT, EncoderHalf

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

    def read(self, prompt: Any) -> tuple[list[int], str | None, MediaItem]:
        """The decoder's token ids, their text where it is known, and what stands beside them. A prompt has both halves by name;
        or it is the encoder's where that reads text, and the decoder's where a sound is beside it.
        Raises RequestError: it is no such prompt."""
        encoder: Any = prompt
        decoder: Any = None
        if isinstance(prompt, Mapping):
            given = cast("Mapping[str, Any]", prompt)
            if "encoder_prompt" in given:
                encoder, decoder = given["encoder_prompt"], given.get("decoder_prompt")
            elif given.get("multi_modal_data"):
                decoder = given
        text, ids = self._read_ids(decoder, "decoder_prompt", False)
        return self._begun(ids), text, self._beside(encoder)

    def _begun(self, ids: list[int]) -> list[int]:
        """A decoder's prompt with what each begins with."""
        start = self.half.decoder_start
        if not ids:
            return self.half.usual_prompt
        return ids if set(start) <= set(ids) else start + ids

    def _beside(self, encoder: Any) -> MediaItem:
        if isinstance(encoder, Mapping):
            given = cast("Mapping[str, Any]", encoder)
            if given.get("multi_modal_data"):
                options, data = given.get("mm_processor_kwargs"), self._open_media(given["multi_modal_data"])
                return self.half.of_media(data, given.get("multi_modal_uuids"), options)
        if self.half.modality != TEXT:
            message = "the model's encoder hears: give multi_modal_data={'audio': (samples, rate)}"
            raise RequestError(message, param="multi_modal_data")
        return self.half.of_tokens(self._read_ids(encoder, "encoder_prompt", True)[1])

    def _read_ids(self, given: Any, param: str, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        """The text of half a prompt, if it is one, and its token ids."""
        if isinstance(given, Mapping):
            mapping = cast("Mapping[str, Any]", given)
            ids = mapping.get("prompt_token_ids")
            given = mapping.get("prompt") if ids is None else ids
        if given is None or isinstance(given, str):
            return given, self._encode(given, add_special_tokens) if given else []
        return None, self._check(given, param)
