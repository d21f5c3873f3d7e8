"""How an answer is made to call: the format that a request's calls are written in, and the grammar that sees to it.

A model without a format of its own, and functions that its own has no words for, have calls as a JSON list.
"""

import dataclasses
import functools
import importlib.util
from typing import Any

from quire.entrypoints.openai.errors import bad_request
from quire.entrypoints.openai.tool_choice import ToolChoice
from quire.parsers.call_grammar import calls_only, calls_or_json, harmony_calls, text_and_calls
from quire.parsers.choice import AnswerFormats
from quire.parsers.formats import PLAIN
from quire.parsers.schemas import Inexpressible


def enforced(
    formats: AnswerFormats, choice: ToolChoice, tokenizer: Any, only_one: bool
) -> tuple[AnswerFormats, str | None]:
    """The formats that an answer is read in, and its grammar; None where it is free.

    Args:
        only_one: at most one call.

    Raises:
        HTTPError: 400, the format has no words for a function.
    """
    if choice.must_call:
        return _forced(formats, choice, special_tokens(tokenizer), only_one or choice.kind == "named")
    if not choice.wants_schemas or not _has_grammars(tokenizer):
        return formats, None
    try:
        if formats.is_harmony:
            return formats, harmony_calls(choice.functions, special_tokens(tokenizer), must_call=False)
        if formats.tools is not None:
            grammar = text_and_calls(formats.tools, choice.functions, special_tokens(tokenizer), only_one)
            return formats, grammar
    except Inexpressible:  # as without `strict`: calls are read, whatever they are
        pass
    return formats, None


def calls_or_answer(
    formats: AnswerFormats, choice: ToolChoice, tokenizer: Any, only_one: bool, schema: dict[str, Any]
) -> str | None:
    """The grammar of an answer that either calls or is JSON of a schema; None where the format has no words for the calls."""
    special = special_tokens(tokenizer)
    try:
        if formats.is_harmony:
            return harmony_calls(choice.functions, special, must_call=False, schema=schema)
        return (
            None if formats.tools is None else calls_or_json(formats.tools, choice.functions, special, only_one, schema)
        )
    except Inexpressible:
        return None


def _forced(
    formats: AnswerFormats, choice: ToolChoice, special: dict[str, int], only_one: bool
) -> tuple[AnswerFormats, str]:
    if formats.is_harmony:
        try:
            return formats, harmony_calls(choice.functions, special, must_call=True)
        except Inexpressible:
            message = "tools: this model can call functions whose names are letters, digits, '_', '-' and '.' alone."
            raise bad_request(message, "tools") from None
    if formats.tools is not None:
        try:
            return formats, calls_only(formats.tools, choice.functions, special, only_one)
        except Inexpressible:
            pass
    plain = dataclasses.replace(formats, tools=PLAIN)
    return plain, calls_only(PLAIN, choice.functions, special, only_one)


def _has_grammars(tokenizer: Any) -> bool:
    return getattr(tokenizer, "token_bytes", None) is not None and importlib.util.find_spec("llguidance") is not None


@functools.lru_cache(4)
def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that never stand for text: their strings and ids."""
    ids = sorted(getattr(tokenizer, "special_ids", ()))
    return {token: token_id for token_id in ids if (token := tokenizer.id_to_token(token_id))}
