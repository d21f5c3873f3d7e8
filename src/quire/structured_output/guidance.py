"""The grammar engine llguidance (https://github.com/guidance-ai/llguidance): derivatives of regular expressions below an
Earley parser. A mask costs microseconds to few milliseconds, whatever the grammar. A request's constraint (JSON schema, regular
expression, choice, EBNF or Lark grammar, structural tag) is written in its language.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import gbnf_to_lark

from quire.config import limits
from quire.errors import RequestError, refusing
from quire.extras import install_command
from quire.guards import is_dict, is_sequence
from quire.json_schemas import close_objects
from quire.lark import ANY_TEXT, between_slashes, escaped
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.backend import Backend, IntArray
from quire.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher


_FEW = 4
"""Rows whose tokens are taken one after the other: waking threads takes longer."""
_MOST_THREADS = 32


class GuidanceBackend(Backend):
    """With llguidance."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> None:
        plain = _PlainTokenizer(vocabulary, eos_token_ids)
        self._special = frozenset(plain.special_token_ids)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(plain), eos_token=list(eos_token_ids))
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._executor = llguidance.LLExecutor(num_threads=min(max(1, cores - 1), _MOST_THREADS))

    def compile(self, params: StructuredOutputsParams) -> LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, write_grammar(params), log_level=0, limits=self._limits)
        error = matcher.get_error() if matcher.is_error() else self._try(matcher.deep_copy())
        if error:
            kind, _ = params.constraint()
            raise RequestError(f"structured_outputs.{kind} cannot be used: {_first_lines(error)}", param=kind)
        return matcher

    @staticmethod
    def _try(matcher: LLMatcher) -> str:
        """What is wrong with a grammar of which no text can begin (a reference to itself), "" if nothing is."""
        matcher.compute_bitmask()
        return f"no text satisfies it ({matcher.get_error()})" if matcher.is_error() else ""

    def begin(self, compiled: LLMatcher) -> LLMatcher:
        return compiled.deep_copy()

    def take(self, matcher: LLMatcher, token_ids: list[int]) -> bool:
        return matcher.consume_token(token_ids[0]) if len(token_ids) == 1 else matcher.consume_tokens(token_ids)

    def take_all(self, moves: Sequence[tuple[LLMatcher, list[int]]]) -> None:
        singles = [(matcher, token_ids[0]) for matcher, token_ids in moves if len(token_ids) == 1]
        if len(singles) > _FEW:
            self._executor.consume_token_par(singles)
        for matcher, token_ids in moves:
            if len(token_ids) > 1 or len(singles) <= _FEW:
                matcher.consume_tokens(token_ids)

    def fill(self, wanted: Sequence[tuple[LLMatcher, int]], masks_NW: IntArray) -> None:
        count, words = masks_NW.shape
        self._executor.unsafe_compute_mask_ptr(list(wanted), masks_NW.ctypes.data, words * 4, count)

    def why_stuck(self, matcher: LLMatcher) -> str | None:
        return _first_lines(matcher.get_error()) if matcher.is_error() else None

    def is_forced(self, matcher: LLMatcher) -> bool:
        return bool(matcher.compute_ff_bytes())

    def forced(self, matcher: LLMatcher) -> list[int]:
        return list(itertools.takewhile(self._is_plain, matcher.compute_ff_tokens()))

    def _is_plain(self, token_id: int) -> bool:
        return token_id not in self._special

    def room(self, matcher: LLMatcher, token_ids: list[int]) -> int:
        return matcher.validate_tokens(token_ids)


class _PlainTokenizer:
    """A vocabulary as llguidance reads it. Where a grammar leaves one text only, the text's usual tokens are
    asked for."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted({*vocabulary.special_ids, *eos_token_ids})
        self.eos_token_id = eos_token_ids[0]
        self._encode = vocabulary.encode
        self._special = frozenset(self.special_token_ids)
        self._plain = {token: index for index, token in enumerate(self.tokens) if token and index not in self._special}
        self._longest = max(map(len, self._plain), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """The text's tokens: the tokenizer's own if they stand for exactly this text (SentencePiece may put a space before
        it), otherwise the longest that fit."""
        ids = self._encode(text.decode("utf-8", "replace"))
        is_plain = all(token_id < len(self.tokens) and token_id not in self._special for token_id in ids)
        if is_plain and b"".join(self.tokens[token_id] for token_id in ids) == text:
            return ids
        return self._longest_tokens(text)

    def _longest_tokens(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            sizes = range(min(self._longest, len(text) - at), 0, -1)
            size = next((size for size in sizes if text[at : at + size] in self._plain), None)
            if size is None:
                break
            ids.append(self._plain[text[at : at + size]])
            at += size
        return ids


def _first_lines(text: str, most: int = 400) -> str:
    return " ".join(text.split("<state>")[0].split())[:most]


def write_grammar(params: StructuredOutputsParams) -> str:
    """The constraint as a grammar; that it makes sense is found out when it is compiled.
    Raises RequestError: it cannot be written; `param` names the field."""
    kind, value = params.constraint()
    match kind:
        case "json":
            return _json_grammar(json.loads(value) if isinstance(value, str) else value, params)
        case "json_object":
            return _json_grammar({"type": "object"}, params)
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: /{between_slashes(value)}/")
        case "choice":
            return LLMatcher.grammar_from_lark(f"start: /{'|'.join(map(escaped, value))}/")
        case "structural_tag":
            return _tag_grammar(value, params)
        case _:
            return LLMatcher.grammar_from_lark(_from_ebnf(value) if "::=" in value else value)


def _from_ebnf(text: str) -> str:
    # Whatever its parser stumbles over.
    with refusing(Exception, param="grammar", what="structured_outputs.grammar is not EBNF"):
        return gbnf_to_lark(text)


def _json_grammar(schema: Any, params: StructuredOutputsParams) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_schema(schema, params)))


def _schema(schema: Any, params: StructuredOutputsParams) -> Any:
    """A schema with the request's options, which the engine reads from the schema itself."""
    if params.disable_additional_properties:
        schema = close_objects(schema)
    if not is_dict(schema):
        schema = {} if schema is True else {"not": {}}
    options: dict[str, Any] = {}
    if params.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if params.whitespace_pattern is not None:
        options["whitespace_pattern"] = params.whitespace_pattern
    return {**schema, "x-guidance": options} if options else schema


def _tag_grammar(given: Any, params: StructuredOutputsParams) -> str:
    """Free text in which some openings oblige to a schema: `{"structures": [{"begin", "schema", "end"}], "triggers"}`."""
    given = json.loads(given) if isinstance(given, str) else given
    if "format" in given:
        raise RequestError(
            "structured_outputs.structural_tag with a `format` needs the other grammar engine "
            f"({install_command('xgrammar')}, and no "
            "--structured-outputs-config.backend guidance); or give `structures` and `triggers`",
            param="structural_tag",
        )
    if not given.get("structures") or not given.get("triggers"):
        message = "structured_outputs.structural_tag must be an object with lists `structures` and `triggers`"
        raise RequestError(message, param="structural_tag")
    structures, triggers = given["structures"], given["triggers"]
    if not is_sequence(structures) or not is_sequence(triggers) or len(structures) > limits.MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.structural_tag: `structures` and `triggers` are lists of at most {limits.MAX_CHOICES}",
            param="structural_tag",
        )
    return StructTag.to_grammar(
        [_tag(structure, triggers, params) for structure in structures], assume_special=False, text_regex=ANY_TEXT
    )


def _tag(structure: Any, triggers: Any, params: StructuredOutputsParams) -> StructTag:
    begin, end = (structure.get("begin"), structure.get("end")) if is_dict(structure) else (None, None)
    if not isinstance(begin, str) or not isinstance(end, str):
        message = "structured_outputs.structural_tag: each of `structures` has texts `begin` and `end`, and a `schema`"
        raise RequestError(message, param="structural_tag")
    trigger = next((one for one in triggers if isinstance(one, str) and one and begin.startswith(one)), None)
    if trigger is None:
        message = f"structured_outputs.structural_tag: no trigger begins {begin!r} (triggers: {list(triggers)!r})"
        raise RequestError(message, param="structural_tag")
    schema = structure.get("schema", {})
    return StructTag(trigger=trigger, begin=begin, grammar=_schema(schema, params), end=end)
