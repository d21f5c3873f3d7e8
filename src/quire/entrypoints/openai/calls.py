"""How an answer is made to call: the format that a request's calls are written in, and the grammar that sees to it.

A model without a format of its own, and functions that its own has no words for, have calls as a JSON list.
"""

import dataclasses
import functools
import importlib.util
import json
from typing import Any

from quire.entrypoints.openai.errors import bad_field
from quire.entrypoints.openai.tool_choice import ToolChoice
from quire.parsers.call_grammar import calls_only, calls_or_json, harmony_calls, text_and_calls
from quire.parsers.choice import AUTO, AnswerFormats
from quire.parsers.formats import PLAIN, ToolFormat
from quire.parsers.offered import Function
from quire.parsers.schemas import Inexpressible

_MOST_KEPT, _LONGEST_KEPT = 64, 1 << 18
"""Grammars that are remembered, and characters of functions whose grammar is."""


def enforced(
    formats: AnswerFormats, choice: ToolChoice, tokenizer: Any, only_one: bool
) -> tuple[AnswerFormats, str | None]:
    """The formats that an answer is read in, and its grammar; None where it is free.

    Args:
        only_one: at most one call.

    Raises:
        HTTPError: 400, the format has no words for a function.
    """
    if formats.strict_level == "parameter":
        functions = tuple(dataclasses.replace(function, is_strict=True) for function in choice.functions)
        choice = dataclasses.replace(choice, functions=functions)
    if not choice.must_call:
        wanted = choice.kind == "auto" and (choice.wants_schemas or formats.strict_level != AUTO)
        wanted = wanted and _has_grammars(tokenizer)
        return formats, _derived("text", formats, choice, tokenizer, only_one) if wanted else None
    only_one = only_one or choice.kind == "named"
    if (grammar := _derived("calls", formats, choice, tokenizer, only_one)) is not None:
        return formats, grammar
    if formats.is_harmony:
        message = "this model can call functions whose names are letters, digits, '_', '-' and '.' alone."
        raise bad_field("tools", message)
    plain = dataclasses.replace(formats, tools=PLAIN)
    return plain, _derived("calls", plain, choice, tokenizer, only_one)


def calls_or_answer(
    formats: AnswerFormats, choice: ToolChoice, tokenizer: Any, only_one: bool, schema: dict[str, Any]
) -> str | None:
    """The grammar of an answer that either calls or is JSON of a schema; None where the format has no words for the calls."""
    return _derived("answer", formats, choice, tokenizer, only_one, schema)


def _derived(
    kind: str,
    formats: AnswerFormats,
    choice: ToolChoice,
    tokenizer: Any,
    only_one: bool,
    schema: dict[str, Any] | None = None,
) -> str | None:
    """A grammar; None where the format has no words for it, and calls are read as they come."""
    if formats.tools is None and not formats.is_harmony:
        return None
    functions = [(each.name, each.parameters, each.is_strict) for each in choice.functions]
    asked = json.dumps([functions, schema])
    derive = _derive if len(asked) <= _LONGEST_KEPT else _derive.__wrapped__
    return derive(kind, None if formats.is_harmony else formats.tools, tokenizer, only_one, asked)


@functools.lru_cache(_MOST_KEPT)
def _derive(kind: str, tools: ToolFormat | None, tokenizer: Any, only_one: bool, asked: str) -> str | None:
    """`tools` is None for gpt-oss; `asked` is what cannot be hashed: functions and a schema."""
    given, schema = json.loads(asked)
    functions, special = [Function(*fields) for fields in given], special_tokens(tokenizer)
    try:
        if tools is None:
            return harmony_calls(functions, special, kind == "calls", schema)
        if kind == "calls":
            return calls_only(tools, functions, special, only_one)
        if kind == "text":
            return text_and_calls(tools, functions, special, only_one)
        return calls_or_json(tools, functions, special, only_one, schema)
    except Inexpressible:
        return None


def _has_grammars(tokenizer: Any) -> bool:
    return getattr(tokenizer, "token_bytes", None) is not None and importlib.util.find_spec("llguidance") is not None


@functools.lru_cache(4)
def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The tokens that never stand for text: their strings and ids."""
    ids = sorted(getattr(tokenizer, "special_ids", ()))
    return {token: token_id for token_id in ids if (token := tokenizer.id_to_token(token_id))}
