"""The grammar engine xgrammar (https://github.com/mlc-ai/xgrammar): pushdown automata with masks prepared when a grammar is
compiled. Bounded repetition (`maxLength`) makes both slow; see docs/structured_outputs.md for figures. Imports torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from quire.errors import RequestError
from quire.guards import is_dict, is_sequence
from quire.json_schemas import close_objects
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.backend import Backend, IntArray
from quire.structured_output.vocabulary import Vocabulary

_NOT_KEPT = frozenset(
    ("allOf", "contains", "dependentRequired", "dependentSchemas", "if", "maxContains", "minContains", "not", "oneOf")
) | {"uniqueItems"}
"""Keywords of JSON schemas that xgrammar ignores, in whole or in part."""
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_VALUES = ("enum", "const", "default", "examples")
_MOST_THREADS = 16


class XGrammarBackend(Backend):
    """With xgrammar, whose masks allow every division of a text that is certain."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> None:
        special = frozenset((*vocabulary.special_ids, *eos_token_ids))
        tokens = [b"" if token_id in special else token for token_id, token in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(eos_token_ids)
        )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=min(cores, 8), cache_enabled=False)
        self._eos = frozenset(eos_token_ids)
        is_end = np.zeros(-(-len(tokens) // 32) * 32, dtype=np.bool_)
        is_end[list(eos_token_ids)] = True
        self._end_W: IntArray = np.packbits(is_end, bitorder="little").view(np.int32)
        self._batch: Any = xgrammar.BatchGrammarMatcher(max_threads=min(max(1, cores - 1), _MOST_THREADS))

    def compile(self, params: StructuredOutputsParams) -> Any:
        kind, value = params.constraint()
        if params.whitespace_pattern is not None:
            raise RequestError(
                "structured_outputs.whitespace_pattern is not known to the xgrammar backend; leave it out, or start the "
                "server with --structured-outputs-config.backend guidance",
                param="whitespace_pattern",
            )
        try:
            return self._compile(kind, value, params)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            raise RequestError(f"structured_outputs.{kind} cannot be used: {str(error)[:400]}", param=kind) from None

    def _compile(self, kind: str, value: Any, params: StructuredOutputsParams) -> Any:
        compiler = self._compiler
        match kind:
            case "json" | "json_object":
                schema = {"type": "object"} if kind == "json_object" else value
                schema = json.loads(schema) if isinstance(schema, str) else schema
                schema = _prepared(close_objects(schema) if params.disable_additional_properties else schema)
                is_free = not params.disable_any_whitespace
                return compiler.compile_json_schema(
                    json.dumps(schema),
                    any_whitespace=is_free,
                    separators=None if is_free else (",", ":"),
                    strict_mode=False,
                )
            case "regex":
                return compiler.compile_regex(value)
            case "choice":
                return compiler.compile_grammar("root ::= " + " | ".join(json.dumps(text) for text in value))
            case "structural_tag":
                given: Any = json.loads(value) if isinstance(value, str) else value
                if "format" in given:
                    return compiler.compile_structural_tag(json.dumps({"type": "structural_tag"} | given))
                items = [
                    xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
                    for item in given["structures"]
                ]
                return compiler.compile_structural_tag(items, given["triggers"])
            case _:
                return compiler.compile_grammar(value) if "::=" in value else compiler.compile_lark(value)

    def begin(self, compiled: Any) -> Any:
        return xgrammar.GrammarMatcher(compiled)

    def take(self, matcher: Any, token_ids: list[int]) -> bool:
        return all(
            token_id in self._eos if matcher.is_terminated() else matcher.accept_token(token_id)
            for token_id in token_ids
        )

    def take_all(self, moves: Sequence[tuple[Any, list[int]]]) -> None:
        for matcher, token_ids in moves:
            self.take(matcher, token_ids)

    def fill(self, wanted: Sequence[tuple[Any, int]], masks_NW: IntArray) -> None:
        running: list[tuple[Any, int]] = []
        for matcher, index in wanted:
            if matcher.is_terminated():
                masks_NW[index] = self._end_W
            else:
                running.append((matcher, index))
        if running:
            matchers, indices = zip(*running, strict=True)
            self._batch.batch_fill_next_token_bitmask(list(matchers), masks_NW, list(indices))

    def room(self, matcher: Any, token_ids: list[int]) -> int:
        count = next((count for count, token_id in enumerate(token_ids) if not matcher.accept_token(token_id)), None)
        taken = len(token_ids) if count is None else count
        if taken:
            matcher.rollback(taken)
        return taken


def _prepared(schema: Any) -> Any:
    """A schema whose bounded strings are patterns: by itself the engine lets raw control characters into them.

    Raises:
        ValueError: a keyword that the engine would ignore.
    """
    if is_sequence(schema):
        return [_prepared(part) for part in schema]
    if not is_dict(schema):
        return schema
    if unkept := _NOT_KEPT & set(schema):
        raise ValueError(f"xgrammar cannot keep to {', '.join(sorted(unkept))}")
    prepared: dict[str, Any] = {}
    for name, part in schema.items():
        if name in _NAMED and is_dict(part):
            prepared[name] = {key: _prepared(inner) for key, inner in part.items()}
        else:
            prepared[name] = part if name in _VALUES else _prepared(part)
    if {"minLength", "maxLength"} & set(schema) and not {"pattern", "format", "enum", "const"} & set(schema):
        least, most = prepared.pop("minLength", 0), prepared.pop("maxLength", "")
        prepared["pattern"] = f"^[^\\x00-\\x1f]{{{least},{most}}}$"
    return prepared
