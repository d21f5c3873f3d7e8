"""The forms a prompt may take."""

from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Any]


class TokensPrompt(TypedDict):
    """A prompt as token ids, with its text if known."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Any]


PromptType = str | list[int] | TextPrompt | TokensPrompt
