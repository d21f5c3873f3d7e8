"""Compiled grammars, and where rows stand in them. The grammar engine is llguidance, an optional package.

A grammar is compiled once, in a thread of its own kind, and kept by its hash; whoever starts a row copies it, which takes
microseconds. Rows only ever go forward: after a preemption a row is started anew and fed its tokens again.

Legend: N rows with a grammar, W words of 32 tokens.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config import limits
from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams, Thinking
from quire.structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

IntArray = npt.NDArray[np.int32]
MISSING = "structured_outputs need the package llguidance, which is not installed: pip install 'quire[structured]'"
_COMPILER_THREADS = 2
_MOST_KEPT = 256
_MOST_SHARED = 4


class RowGrammar:
    """Where one row's output stands in its grammar, which may still be being compiled, and which a row that thinks first
    meets later."""

    def __init__(self, compiled: concurrent.futures.Future[LLMatcher], thinking: Thinking | None = None) -> None:
        self._compiled = compiled
        self._thinking = thinking
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._refused: int | None = None

    def may_begin_to_think(self, output_token_ids: Sequence[int]) -> int | None:
        """The token that would begin it."""
        return None if self._thinking is None or output_token_ids else self._thinking.start

    def _thinks(self, output_token_ids: Sequence[int]) -> bool:
        thinking = self._thinking
        if thinking is None or (thinking.start is not None and not output_token_ids):
            return False
        if thinking.start is not None and output_token_ids[0] != thinking.start:
            self._thinking = None
            return False
        while self._num_consumed < len(output_token_ids):
            self._num_consumed += 1
            begin = max(0, self._num_consumed - len(thinking.end))
            if list(output_token_ids[begin : self._num_consumed]) == thinking.end:
                self._thinking = None
                return False
        return True

    def matcher_after(self, output_token_ids: Sequence[int]) -> LLMatcher | None:
        """The engine's matcher after a row's whole output, of which earlier calls gave the beginning; None while it thinks.

        Raises:
            RequestError: the grammar does not compile.
        """
        if self._thinks(output_token_ids):
            return None
        if self._matcher is None:
            self._matcher = _result(self._compiled).deep_copy()
        new = output_token_ids[self._num_consumed :]
        self._num_consumed += len(new)
        for token_id in new:
            if self._refused is None and not self._matcher.consume_token(token_id):
                self._refused = token_id
        return self._matcher

    @property
    def error(self) -> str | None:
        """Why the row cannot go on."""
        if self._refused is not None:
            return f"the output left its grammar with token {self._refused}"
        if self._matcher is not None and self._matcher.is_error():
            return f"the grammar cannot be followed further: {_first_lines(self._matcher.get_error())}"
        return None


class Grammars:
    """Every grammar of one vocabulary. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        self._kept: collections.OrderedDict[bytes, concurrent.futures.Future[LLMatcher]] = collections.OrderedDict()
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None

    def check(
        self, params: StructuredOutputsParams, eos_token_ids: Sequence[int], load_vocabulary: Callable[[], Vocabulary]
    ) -> None:
        """Wait until the grammar is compiled, which takes milliseconds, or at most `limits.MAX_GRAMMAR_SECONDS`.

        Raises:
            RequestError: it is wrong, too large, takes too long, or the engine is not installed.
        """
        _result(self._compile(params, eos_token_ids, load_vocabulary))

    def start(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: Sequence[int],
        load_vocabulary: Callable[[], Vocabulary],
        thinking: Thinking | None = None,
    ) -> RowGrammar:
        """A row's beginning. Does not wait: a grammar that `check` refuses is told of by `fill`."""
        return RowGrammar(self._compile(params, eos_token_ids, load_vocabulary), thinking)

    def fill(self, rows: Sequence[tuple[RowGrammar, Sequence[int]]], masks_NW: IntArray) -> dict[int, str]:
        """Which tokens may come next, in parallel threads.

        Args:
            rows: each with its whole output so far.
            masks_NW: gets one bit a token, the lowest of each word first; C-contiguous.

        Returns:
            What is wrong, by index into `rows`. Such a row's mask means nothing.
        """
        errors: dict[int, str] = {}
        wanted: list[tuple[LLMatcher, int]] = []
        for index, (row, output_token_ids) in enumerate(rows):
            try:
                matcher = row.matcher_after(output_token_ids)
            except Exception as error:  # whatever a compilation raises ends its own rows alone
                errors[index] = f"{type(error).__name__}: {error}"
            else:
                if matcher is None:
                    masks_NW[index] = -1
                else:
                    wanted.append((matcher, index))
        if wanted:
            self._fill(wanted, masks_NW)
        for _, index in wanted:
            row, output_token_ids = rows[index]
            if row.error is not None:
                errors[index] = row.error
            elif (token_id := row.may_begin_to_think(output_token_ids)) is not None:
                masks_NW.view(np.uint32)[index, token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return errors

    def _fill(self, wanted: list[tuple[LLMatcher, int]], masks_NW: IntArray) -> None:
        count, words = masks_NW.shape
        if len(wanted) == 1:  # no threads to wake
            matcher, index = wanted[0]
            matcher.unsafe_compute_mask_ptr(masks_NW[index].ctypes.data, words * 4)
            return
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor()
        self._executor.unsafe_compute_mask_ptr(wanted, masks_NW.ctypes.data, words * 4, count)

    def _compile(
        self, params: StructuredOutputsParams, eos_token_ids: Sequence[int], load_vocabulary: Callable[[], Vocabulary]
    ) -> concurrent.futures.Future[LLMatcher]:
        try:
            encoded = msgspec.msgpack.encode((params, list(eos_token_ids)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RequestError(
                f"structured_outputs cannot be written as JSON: {error}", param="structured_outputs"
            ) from None
        if len(encoded) > limits.MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"structured_outputs has {len(encoded)} bytes; at most {limits.MAX_GRAMMAR_BYTES} are allowed",
                param="structured_outputs",
            )
        key = hashlib.sha256(encoded).digest()
        with self._lock:
            future = self._kept.get(key)
            if future is None:
                if self._threads is None:
                    self._threads = concurrent.futures.ThreadPoolExecutor(_COMPILER_THREADS, "grammar-compiler")
                task = functools.partial(self._build, params, tuple(eos_token_ids), load_vocabulary)
                future = self._kept[key] = self._threads.submit(task)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        return future

    def _build(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: tuple[int, ...],
        load_vocabulary: Callable[[], Vocabulary],
    ) -> LLMatcher:
        """In a compiler's thread."""
        try:
            import llguidance

            from quire.structured_output.grammar_text import write_grammar
        except ImportError:
            raise RequestError(MISSING, param="structured_outputs") from None
        kind, _ = params.constraint()
        tokenizer = self._tokenizer(eos_token_ids, load_vocabulary)
        bounds = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, write_grammar(params), log_level=0, limits=bounds)
        if matcher.is_error():
            raise RequestError(
                f"structured_outputs.{kind} cannot be used: {_first_lines(matcher.get_error())}", param=kind
            )
        return matcher

    def _tokenizer(self, eos_token_ids: tuple[int, ...], load_vocabulary: Callable[[], Vocabulary]) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not eos_token_ids:
            raise RequestError(
                "structured_outputs need a model with an end-of-sequence token: this one states none",
                param="structured_outputs",
            )
        with self._lock:
            if eos_token_ids not in self._tokenizers:
                if self._vocabulary is None:
                    self._vocabulary = load_vocabulary()
                wrapper = TokenizerWrapper(_PlainTokenizer(self._vocabulary, eos_token_ids))
                self._tokenizers[eos_token_ids] = LLTokenizer(wrapper, eos_token=list(eos_token_ids))
            return self._tokenizers[eos_token_ids]


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


def _result(compiled: concurrent.futures.Future[LLMatcher]) -> LLMatcher:
    try:
        return compiled.result(limits.MAX_GRAMMAR_SECONDS)
    except concurrent.futures.TimeoutError:
        raise RequestError(
            f"the grammar takes longer than {limits.MAX_GRAMMAR_SECONDS} s to compile; use a smaller one",
            param="structured_outputs",
        ) from None


def _first_lines(text: str, most: int = 400) -> str:
    return " ".join(text.split("<state>")[0].split())[:most]


@functools.lru_cache(_MOST_SHARED)
def shared_grammars(tokenizer_path: str, tokenizer_mode: str, vocab_size: int) -> Grammars:
    """The grammars of a model's vocabulary: the frontend and the workers of one process share what either compiled."""
    return Grammars()
