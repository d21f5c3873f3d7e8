"""The forms a prompt may take: text, token ids, or a dict that says which.

Knows shapes only; a prompt is checked where it becomes a request.
"""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class _PromptOptions(TypedDict):
    """What every dict prompt may also say.

    `cache_salt` keeps the prompt's cached pages apart from those of other salts. `multi_modal_data` is
    `{"image": one or several, "video": …, "audio": …}`, for the markers of the prompt in order: PIL images, arrays, tensors or
    paths of files, videos also as lists of pictures or as pairs of frames and what is known of them, and sounds as samples with
    their rate; `multi_modal_uuids` names them in place of the hashes of their content, `mm_processor_kwargs` are options of the
    model's processor, and `media_io_kwargs` say which frames of video files are read.
    """

    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    media_io_kwargs: NotRequired[dict[str, Any]]


class TextPrompt(_PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids, with its text if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings: a tensor or an array [tokens, hidden size], as Transformers takes `inputs_embeds`."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """A prompt in two halves, for a model with an encoder beside its decoder. Each half is text, token ids or a dict of either;
    the encoder's may have `multi_modal_data`, `{"audio": one}`."""

    encoder_prompt: Any
    decoder_prompt: NotRequired[Any]
    cache_salt: NotRequired[str]


class DataPrompt(TypedDict):
    """An application's own data, for an IO processor."""

    data: Any


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt
"""Every form that `LLM.generate` and its like take for one prompt."""


def has_media(prompt: PromptType) -> bool:
    """Whether a prompt has something to be read besides its text."""
    return isinstance(prompt, Mapping) and any(
        prompt.get(name) is not None for name in ("multi_modal_data", "encoder_prompt")
    )


def plain_text(prompt: PromptType) -> str | None:
    """The text of a prompt that has nothing else to it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping) and set(prompt) <= {"prompt", "cache_salt"}:
        text = prompt.get("prompt")
        return text if isinstance(text, str) else None
    return None
