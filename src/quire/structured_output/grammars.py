"""Compiled grammars, and where rows stand in them.

A grammar is compiled once, in a thread of its own kind, and kept by its hash; whoever starts a row gets a matcher of its own,
which takes microseconds. Rows only ever go forward: after a preemption a row is started anew and fed its tokens again.
Which engine does it stands in `backend`. Knows token ids; knows nothing of steps or logits.

Legend: N rows with a grammar, W words of 32 tokens.
"""

import collections
import concurrent.futures
import functools
import hashlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import numpy as np

from quire.config import StructuredOutputsConfig, limits
from quire.errors import RequestError
from quire.sampling_params import StructuredOutputsParams, Thinking
from quire.structured_output.backend import Backend, IntArray
from quire.structured_output.filling import FillThread, Job
from quire.structured_output.selection import choose_backend, find_backend
from quire.structured_output.trial import Trials
from quire.structured_output.vocabulary import Vocabulary

_COMPILER_THREADS = 2
_MOST_KEPT = 256
_MOST_CHECKED = 4096
_MOST_SHARED = 4


class RowGrammar:
    """Where one row's output stands in its grammar, which may still be being compiled, and which a row that thinks first
    meets later.

    Attributes:
        backend, matcher: the engine, and its view of the row; None until the grammar is met.
        num_consumed: tokens of the output that were looked at.
        refused: the token with which the output left the grammar.
    """

    __slots__ = ("_compiled", "_thinking", "backend", "matcher", "num_consumed", "refused")

    def __init__(
        self, compiled: "concurrent.futures.Future[tuple[Backend, Any]]", thinking: Thinking | None = None
    ) -> None:
        self._compiled = compiled
        self._thinking = thinking
        self.backend: Backend | None = None
        self.matcher: Any = None
        self.num_consumed = 0
        self.refused: int | None = None

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
        while self.num_consumed < len(output_token_ids):
            self.num_consumed += 1
            begin = max(0, self.num_consumed - len(thinking.end))
            if list(output_token_ids[begin : self.num_consumed]) == thinking.end:
                self._thinking = None
                return False
        return True

    def follow(self, output_token_ids: Sequence[int]) -> bool:
        """Take in what is new of a row's whole output; whether the row has met its grammar, and does not think any more.

        Raises:
            RequestError: the grammar does not compile.
        """
        if self._thinks(output_token_ids):
            return False
        if self.backend is None:
            self.backend, form = _result(self._compiled)
            self.matcher = self.backend.begin(form)
        new = output_token_ids[self.num_consumed :]
        self.num_consumed += len(new)
        for token_id in new:
            if self.refused is None and not self.backend.advance([(self.matcher, token_id)])[0]:
                self.refused = token_id
        return True

    @property
    def is_following(self) -> bool:
        """Whether only tokens are to come, which its matcher takes."""
        return self.matcher is not None and self._thinking is None and self.refused is None


class Filling:
    """Masks that are being made in other threads.

    Args:
        rows: all of them.
        alone: rows that share their mask with no other; None: nobody does, and row i has line i.
        free: rows that may say anything.
        openings: (row, token allowed besides).
        errors: what is wrong already, by row.

    Attributes:
        line_N: the line of each row's mask.
        num_lines: lines that are used.
    """

    def __init__(
        self,
        rows: Sequence[tuple[RowGrammar, Sequence[int]]],
        alone: Collection[int] | None,
        free: set[int],
        openings: list[tuple[int, int]],
        errors: dict[int, str],
        masks_NW: IntArray,
        thread: FillThread,
    ) -> None:
        self._openings, self._errors, self._masks_NW = openings, errors, masks_NW
        self.line_N: list[int] = []
        self.num_lines = 0
        self._wanted: dict[Backend, list[tuple[Any, int]]] = {}
        self._row_of: dict[int, int] = {}
        shared: dict[Any, int] = {}
        for index, (row, _) in enumerate(rows):
            key: Any = None
            if index in free:
                key = "free"
            elif row.refused is not None:
                errors[index] = f"the output left its grammar with token {row.refused}"
            elif row.backend is not None and index not in errors:
                key = row.backend.known(row.matcher)
            if key is not None and alone is not None and index not in alone:
                line = shared.setdefault(key, self.num_lines)
                if line < self.num_lines:
                    self.line_N.append(line)
                    continue
            self._begin_line(row, index, index in free, index in errors)
        self._jobs: list[Job] = [
            thread.begin(functools.partial(backend.fill, wanted, masks_NW)) for backend, wanted in self._wanted.items()
        ]

    def _begin_line(self, row: RowGrammar, index: int, is_free: bool, is_wrong: bool) -> None:
        """A line of its own for a row, or for the first of several that share it."""
        line = self.num_lines
        self.num_lines += 1
        self.line_N.append(line)
        if is_free or is_wrong or row.backend is None:
            self._masks_NW[line] = -1
        else:
            self._wanted.setdefault(row.backend, []).append((row.matcher, line))
            self._row_of[line] = index

    def finish(self) -> dict[int, str]:
        """Wait until they are made: what is wrong, by row. Such a row's line means nothing, and is nobody else's."""
        for job in self._jobs:
            job.finish()
        for backend, wanted in self._wanted.items():
            for line, why in backend.settle(wanted, self._masks_NW).items():
                self._errors[self._row_of[line]] = f"the grammar cannot be followed further: {why}"
        for index, token_id in self._openings:
            self._masks_NW.view(np.uint32)[self.line_N[index], token_id >> 5] |= np.uint32(1 << (token_id & 31))
        return self._errors


class Grammars:
    """Every grammar of one vocabulary. May be used from several threads.

    Args:
        settings: which engine, and what holds for every request.
    """

    def __init__(self, settings: StructuredOutputsConfig | None = None) -> None:
        self._settings = settings or StructuredOutputsConfig()
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[tuple[str, tuple[int, ...]], Backend] = {}
        self._kept: collections.OrderedDict[bytes, concurrent.futures.Future[tuple[Backend, Any]]] = (
            collections.OrderedDict()
        )
        self._checked: collections.OrderedDict[bytes, RequestError | None] = collections.OrderedDict()
        self._trials: dict[tuple[str, tuple[int, ...]], Trials] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._fill_thread = FillThread()

    def check(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: Sequence[int],
        load_vocabulary: Callable[[], Vocabulary],
        *,
        apart: bool = False,
    ) -> None:
        """Wait until it is known that the grammar compiles, which takes milliseconds, or at most `limits.MAX_GRAMMAR_SECONDS`.
        What is known already is answered at once.

        Args:
            apart: try it in a process of its own first, which is killed where that takes too much time or memory.

        Raises:
            RequestError: it is wrong, too large, takes too long, or the engine is not installed.
            CapacityError: too many are being tried.
        """
        if not apart:
            _result(self._compile(params, eos_token_ids, load_vocabulary))
            return
        params, key = self._key(params, eos_token_ids)
        with self._lock:
            is_known, error = key in self._checked, self._checked.get(key)
        if not is_known:
            error = self._try(params, tuple(eos_token_ids), load_vocabulary)
            with self._lock:
                self._checked[key] = error
                if len(self._checked) > _MOST_CHECKED:
                    self._checked.popitem(last=False)
        if error is not None:
            raise RequestError(str(error), param=error.param)

    def _try(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: tuple[int, ...],
        load_vocabulary: Callable[[], Vocabulary],
    ) -> RequestError | None:
        name = choose_backend(self._settings.backend, params)
        _check_end(eos_token_ids)
        find_backend(name)
        with self._lock:
            trials = self._trials.get((name, eos_token_ids))
            if trials is None:
                trials = Trials(name, eos_token_ids, self._read(load_vocabulary))
                self._trials[name, eos_token_ids] = trials
        try:
            trials.check(params)
        except RequestError as error:
            return error
        return None

    def close(self) -> None:
        """End the processes that try grammars."""
        for trials in self._trials.values():
            trials.close()

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
        """`begin_fill`, and wait for it."""
        return self.begin_fill(rows, masks_NW).finish()

    def begin_fill(
        self,
        rows: Sequence[tuple[RowGrammar, Sequence[int]]],
        masks_NW: IntArray,
        alone: Collection[int] | None = None,
    ) -> Filling:
        """Have other threads find out which tokens may come next.

        Args:
            rows: each with its whole output so far.
            masks_NW: gets one bit a token, the lowest of each word first; C-contiguous. Rows with the same mask share a line.
            alone: rows that share with nobody, because the caller is going to change their masks; None: no row shares.
        """
        errors: dict[int, str] = {}
        moved: list[RowGrammar] = []
        moves: dict[Backend, list[tuple[Any, int]]] = {}
        free: set[int] = set()
        openings: list[tuple[int, int]] = []
        for index, (row, output_token_ids) in enumerate(rows):
            if row.is_following and len(output_token_ids) == row.num_consumed + 1:
                assert row.backend is not None
                moves.setdefault(row.backend, []).append((row.matcher, output_token_ids[-1]))
                moved.append(row)
                row.num_consumed += 1
                continue
            try:
                if not row.follow(output_token_ids):
                    free.add(index)
                elif (token_id := row.may_begin_to_think(output_token_ids)) is not None:
                    openings.append((index, token_id))
            except Exception as error:  # whatever a compilation raises ends its own rows alone
                errors[index] = f"{type(error).__name__}: {error}"
        self._advance(moved, moves)
        return Filling(rows, alone, free, openings, errors, masks_NW, self._fill_thread)

    @staticmethod
    def _advance(moved: list[RowGrammar], moves: dict[Backend, list[tuple[Any, int]]]) -> None:
        """Let all rows take their newest token at once."""
        rows_of: dict[Backend, list[RowGrammar]] = {}
        for row in moved:
            assert row.backend is not None
            rows_of.setdefault(row.backend, []).append(row)
        for backend, batch in moves.items():
            allowed = backend.advance(batch)
            if not all(allowed):
                for row, (_, token_id), is_allowed in zip(rows_of[backend], batch, allowed, strict=True):
                    row.refused = None if is_allowed else token_id

    def _as_set(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """A request's form with what the operator has set for all."""
        settings = self._settings
        if not settings.disable_any_whitespace and not settings.disable_additional_properties:
            return params
        return msgspec.structs.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or settings.disable_any_whitespace,
            disable_additional_properties=params.disable_additional_properties
            or settings.disable_additional_properties,
        )

    def _key(
        self, params: StructuredOutputsParams, eos_token_ids: Sequence[int]
    ) -> tuple[StructuredOutputsParams, bytes]:
        """The grammar as it is compiled, and by what it is known.

        Raises:
            RequestError: it is too large, or no JSON.
        """
        params = self._as_set(params)
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
        return params, hashlib.sha256(encoded).digest()

    def _compile(
        self, params: StructuredOutputsParams, eos_token_ids: Sequence[int], load_vocabulary: Callable[[], Vocabulary]
    ) -> concurrent.futures.Future[tuple[Backend, Any]]:
        params, key = self._key(params, eos_token_ids)
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
    ) -> tuple[Backend, Any]:
        """In a compiler's thread."""
        name = choose_backend(self._settings.backend, params)
        backend = self._backend(name, eos_token_ids, load_vocabulary)
        return backend, backend.compile(params)

    def _backend(self, name: str, eos_token_ids: tuple[int, ...], load_vocabulary: Callable[[], Vocabulary]) -> Backend:
        backend_class = find_backend(name)
        _check_end(eos_token_ids)
        with self._lock:
            key = (name, eos_token_ids)
            if key not in self._backends:
                self._backends[key] = backend_class(self._read(load_vocabulary), eos_token_ids)
            return self._backends[key]

    def _read(self, load_vocabulary: Callable[[], Vocabulary]) -> Vocabulary:
        """With the lock held."""
        if self._vocabulary is None:
            self._vocabulary = load_vocabulary()
        return self._vocabulary


def _check_end(eos_token_ids: Sequence[int]) -> None:
    if not eos_token_ids:
        raise RequestError(
            "structured_outputs need a model with an end-of-sequence token: this one states none",
            param="structured_outputs",
        )


def _result(compiled: "concurrent.futures.Future[tuple[Backend, Any]]") -> tuple[Backend, Any]:
    try:
        return compiled.result(limits.MAX_GRAMMAR_SECONDS)
    except concurrent.futures.TimeoutError:
        raise RequestError(
            f"the grammar takes longer than {limits.MAX_GRAMMAR_SECONDS} s to compile; use a smaller one",
            param="structured_outputs",
        ) from None


@functools.lru_cache(_MOST_SHARED)
def shared_grammars(
    tokenizer_path: str, tokenizer_mode: str, vocab_size: int, settings: StructuredOutputsConfig
) -> Grammars:
    """The grammars of a model's vocabulary: the frontend and the workers of one process share what either compiled."""
    return Grammars(settings)
