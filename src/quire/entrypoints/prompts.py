"""The forms in which `LLM` takes prompts, as a list. Knows shapes only; what a prompt holds is checked where it is tokenized."""

from typing import Any, cast

from quire.errors import RequestError
from quire.inputs import PromptType


def as_prompts(prompts: Any) -> list[PromptType]:
    """One prompt or several, as several. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | dict):
        return [cast("PromptType", prompts)]
    try:
        listed = list(prompts)
    except TypeError:
        raise RequestError(
            f"prompts must be text, token ids, a dict or a list of these, not {type(prompts).__name__}", param="prompt"
        ) from None
    if listed and hasattr(listed[0], "__index__"):
        return [listed]
    return cast("list[PromptType]", listed)
