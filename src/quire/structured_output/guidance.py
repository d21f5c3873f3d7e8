"""The grammar engine llguidance (https://github.com/guidance-ai/llguidance): derivatives of regular expressions below an
Earley parser. A mask costs microseconds to few milliseconds, whatever the grammar."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import llguidance

from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams
from quire.structured_output.backend import IntArray
from quire.structured_output.grammar_text import write_grammar
from quire.structured_output.string_masks import UNBOUNDED, StringMasks, longest_bound
from quire.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_FEW = 4
"""Rows whose tokens are taken one after the other: waking threads takes longer."""
_MOST_THREADS = 32
_MOST_PROBES = 1024
"""Characters of a string that are looked ahead."""


class _Form(NamedTuple):
    """A compiled grammar; `bound` is what `longest_bound` says of its schema, and `rest` the same grammar for the vocabulary
    `StringMasks.rest` where strings are bounded."""

    matcher: LLMatcher
    bound: int | None
    rest: LLMatcher | None


class _Row:
    """A row's matcher. While the row is inside a string, `base` is what its masks have in common, and `left` the characters
    that it has room for: exactly, or at least. `rest` follows when it is needed: `text` is what it has not seen."""

    __slots__ = ("base", "form", "is_exact", "left", "matcher", "rest", "text", "uses_rest")

    def __init__(self, form: _Form) -> None:
        self.form = form
        self.matcher = form.matcher.deep_copy()
        self.rest: LLMatcher | None = None
        self.text = bytearray()
        self.base: bytes | None = None
        self.left = 0
        self.is_exact = self.uses_rest = False


class GuidanceBackend:
    """As `Backend`, with llguidance."""

    def __init__(self, vocabulary: Vocabulary, eos_token_ids: tuple[int, ...]) -> None:
        plain = _PlainTokenizer(vocabulary, eos_token_ids)
        self._tokens = vocabulary.tokens
        self._special = frozenset(plain.special_token_ids)
        self._strings = StringMasks(vocabulary, self._special)
        self._tokenizer = _make_tokenizer(plain, eos_token_ids)
        self._rest_tokenizer = _make_tokenizer(_PlainTokenizer(self._strings.rest, eos_token_ids), eos_token_ids)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._executor = llguidance.LLExecutor(num_threads=min(max(1, cores - 1), _MOST_THREADS))

    def compile(self, params: StructuredOutputsParams) -> _Form:
        """As `Backend.compile`."""
        kind, value = params.constraint()
        grammar = write_grammar(params)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(
                f"structured_outputs.{kind} cannot be used: {_first_lines(matcher.get_error())}", param=kind
            )
        bound = rest = None
        if self._strings.is_usable and params.whitespace_pattern is None and kind in ("json", "json_object"):
            bound = longest_bound(
                True if kind == "json_object" else json.loads(value) if isinstance(value, str) else value
            )
        if bound:
            rest = llguidance.LLMatcher(self._rest_tokenizer, grammar, log_level=0, limits=self._limits)
        return _Form(matcher, bound, rest)

    def begin(self, form: _Form) -> _Row:
        """As `Backend.begin`."""
        return _Row(form)

    def advance(self, moves: Sequence[tuple[_Row, int]]) -> list[bool]:
        """As `Backend.advance`."""
        strings = self._strings
        for row, token_id in moves:
            if row.form.rest is not None:
                row.text += self._tokens[token_id]
            if row.base is not None:
                left = strings.left_after(token_id, row.left)
                if left is None or not (row.is_exact or strings.can_tell(left)):
                    row.base = None
                else:
                    row.left = left
        if len(moves) <= _FEW:
            return [row.matcher.consume_token(token_id) for row, token_id in moves]
        return self._executor.consume_token_par([(row.matcher, token_id) for row, token_id in moves])

    def forced(self, matcher: _Row) -> list[int]:
        """As `Backend.forced`. Inside of a string with room left nothing is."""
        if matcher.base is not None and matcher.left > 0:
            return []
        token_ids = matcher.matcher.compute_ff_tokens()
        return list(itertools.takewhile(self._is_plain, token_ids))

    def _is_plain(self, token_id: int) -> bool:
        return token_id not in self._special

    def known(self, matcher: _Row) -> tuple[bytes, int] | None:
        """As `Backend.known`."""
        return None if matcher.base is None else self._strings.key(matcher.base, matcher.left)

    def fill(self, wanted: Sequence[tuple[_Row, int]], masks_NW: IntArray) -> None:
        """As `Backend.fill`."""
        count, words = masks_NW.shape
        unknown: list[tuple[LLMatcher, int]] = []
        for row, index in wanted:
            if row.base is not None:
                masks_NW[index] = self._strings.mask(row.base, row.left)
            else:
                unknown.append((self._whom_to_ask(row), index))
        if len(unknown) == 1:  # no threads to wake
            matcher, index = unknown[0]
            matcher.unsafe_compute_mask_ptr(masks_NW.ctypes.data + index * words * 4, words * 4)
        elif unknown:
            self._executor.unsafe_compute_mask_ptr(unknown, masks_NW.ctypes.data, words * 4, count)

    def _whom_to_ask(self, row: _Row) -> LLMatcher:
        """The row's matcher, or that of the rest of the vocabulary where that is enough: inside a bounded string."""
        row.uses_rest = False
        if row.form.rest is None or not self._may_be_inside(row):
            return row.matcher
        self._measure(row)
        if not (row.is_exact or self._strings.can_tell(row.left)):
            return row.matcher
        if row.rest is None:
            row.rest = row.form.rest.deep_copy()
        row.rest.consume_tokens([self._strings.byte_ids[byte] for byte in row.text])
        row.text.clear()
        row.uses_rest = not row.rest.is_error()
        return row.rest if row.uses_rest else row.matcher

    def _may_be_inside(self, row: _Row) -> bool:
        strings, can_take = self._strings, row.matcher.validate_tokens
        return bool(can_take([strings.probe]) and can_take([strings.quote]) and not can_take([strings.key_end]))

    def _measure(self, row: _Row) -> None:
        """How many characters the string may still have."""
        assert row.form.bound is not None
        row.left, row.is_exact = UNBOUNDED, True
        if row.form.bound:
            most = min(row.form.bound + 1, _MOST_PROBES)
            found = row.matcher.validate_tokens([self._strings.probe] * most)
            if found < most:
                row.left = found
            elif most <= row.form.bound:
                row.left, row.is_exact = found, False

    def settle(self, wanted: Sequence[tuple[_Row, int]], masks_NW: IntArray) -> dict[int, str]:
        """As `Backend.settle`."""
        strings = self._strings
        errors: dict[int, str] = {}
        for row, index in wanted:
            if row.base is not None:
                continue
            mask_W = masks_NW[index]
            if row.uses_rest:
                if strings.is_inside_rest(mask_W):
                    row.base = strings.begin(mask_W)
                    mask_W[:] = strings.mask(row.base, row.left)
                else:
                    row.matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            elif row.form.bound is not None and strings.may_be_inside(mask_W):
                self._measure(row)
                if strings.is_inside(mask_W, row.left) and (row.is_exact or strings.can_tell(row.left)):
                    row.base = strings.begin(mask_W)
            if row.matcher.is_error():
                errors[index] = _first_lines(row.matcher.get_error())
        return errors


def _make_tokenizer(plain: _PlainTokenizer, eos_token_ids: tuple[int, ...]) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(plain), eos_token=list(eos_token_ids))


class _PlainTokenizer:
    """A vocabulary in the form that llguidance reads. Where a grammar leaves one text only, the text's usual tokens are
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
