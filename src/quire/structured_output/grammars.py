"""Compiled grammars, and the rows that follow them.

A grammar is compiled once, in a compiler thread, and kept by its hash; each row gets a matcher of its own, which takes
microseconds. Rows only go forward: after a preemption a row is started anew and gets its tokens again. `backend` chooses the
engine. Knows token ids; knows nothing of steps or logits.

Legend: N rows with a grammar, W words of 32 tokens.
"""

import collections
import concurrent.futures
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Collection, Sequence

import msgspec

from quire.config import StructuredOutputsConfig, limits
from quire.errors import RequestError
from quire.logger import init_logger
from quire.sampling_params import StructuredOutputsParams, Thinking
from quire.structured_output.backend import Backend, IntArray, choose_backend, find_backend, is_installed
from quire.structured_output.json_states import read_rules
from quire.structured_output.rows import Filling, FillThread, RowGrammar, Rows, result_of
from quire.structured_output.states import States
from quire.structured_output.string_masks import StringMasks
from quire.structured_output.trial import Trials
from quire.structured_output.vocabulary import Vocabulary

logger = init_logger(__name__)

_COMPILER_THREADS = 2
_MOST_KEPT = 256
_MOST_CHECKED = 4096
_MOST_SHARED = 4


class Grammars:
    """Every grammar of one vocabulary. May be used from several threads.

    Args:
        settings: which engine, and what holds for every request.
    """

    def __init__(self, settings: StructuredOutputsConfig | None = None) -> None:
        self._settings = settings or StructuredOutputsConfig()
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held for seconds
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[tuple[str, tuple[int, ...]], tuple[Backend, StringMasks, list[bytes]]] = {}
        self._kept: collections.OrderedDict[bytes, concurrent.futures.Future[States]] = collections.OrderedDict()
        self._checked: collections.OrderedDict[bytes, RequestError | None] = collections.OrderedDict()
        self._trials: dict[tuple[str, tuple[int, ...]], Trials] = {}
        self._compilers = concurrent.futures.ThreadPoolExecutor(_COMPILER_THREADS, "grammar-compiler")
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
            result_of(self.compile(params, eos_token_ids, load_vocabulary))
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

    def is_known(self, params: StructuredOutputsParams, eos_token_ids: Sequence[int], *, shared: bool) -> bool:
        """Whether `check` with `apart` answers at once; `shared`: and whether it is compiled here, too.

        Raises:
            RequestError: it is too large, or no JSON.
        """
        _, key = self._key(params, eos_token_ids)
        with self._lock:
            return key in self._checked and (not shared or self._is_kept(key))

    def is_compiled(self, params: StructuredOutputsParams, eos_token_ids: Sequence[int]) -> bool:
        """Whether `start` need not wait for the compiler.

        Raises:
            RequestError: it is too large, or no JSON.
        """
        _, key = self._key(params, eos_token_ids)
        with self._lock:
            return self._is_kept(key)

    def _is_kept(self, key: bytes) -> bool:
        """With the lock held."""
        future = self._kept.get(key)
        return future is not None and future.done()

    def _try(
        self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], load_vocabulary: Callable[[], Vocabulary]
    ) -> RequestError | None:
        trials = self._trials_of(choose_backend(self._settings.backend, params), eos_token_ids, load_vocabulary)
        try:
            trials.check(params)
        except RequestError as error:
            return error
        return None

    def _trials_of(
        self, name: str, eos_token_ids: tuple[int, ...], load_vocabulary: Callable[[], Vocabulary]
    ) -> Trials:
        _check_end(eos_token_ids)
        find_backend(name)
        with self._reading:
            trials = self._trials.get((name, eos_token_ids))
            if trials is None:
                trials = Trials(name, eos_token_ids, self._read(load_vocabulary))
                self._trials[name, eos_token_ids] = trials
            return trials

    def close(self) -> None:
        for trials in self._trials.values():
            trials.close()

    def start(
        self,
        params: StructuredOutputsParams,
        eos_token_ids: Sequence[int],
        load_vocabulary: Callable[[], Vocabulary],
        thinking: Thinking | None = None,
    ) -> RowGrammar:
        """A row's beginning. Does not wait: `Filling.finish` tells of a grammar that `check` would refuse."""
        return RowGrammar(self.compile(params, eos_token_ids, load_vocabulary), thinking)

    def begin_fill(self, rows: Rows, masks_NW: IntArray, alone: Collection[int] | None = None) -> Filling:
        """Have other threads find out which tokens may come next.

        Args:
            rows: each with its whole output so far.
            masks_NW: gets one bit a token, the lowest of each word first; C-contiguous. Rows with the same mask share a line.
            alone: rows that share with no other, because the caller is going to change their masks; None: no row shares.
        """
        return Filling(rows, alone, masks_NW, self._fill_thread)

    def forced(self, rows: Rows) -> dict[int, list[int]]:
        """Take in what is new of rows' outputs, and say which tokens follow for certain, by index into the rows, of those
        where any do. What is wrong with a row is told by `begin_fill`."""
        found: dict[int, list[int]] = {}
        for index, (row, output_token_ids) in enumerate(rows):
            if row.follow(output_token_ids) and row.next_of_opening(output_token_ids) is None:
                assert row.at is not None
                if token_ids := row.at.states.forced(row.at):
                    found[index] = token_ids
        return found

    def room(self, row: RowGrammar, output_token_ids: Sequence[int], token_ids: list[int]) -> int:
        """How many of these tokens may follow a row's output one after the other: all of them where its grammar has nothing to
        say there yet."""
        if not row.follow(output_token_ids) or row.next_of_opening(output_token_ids) is not None:
            return len(token_ids)
        assert row.at is not None
        return row.at.states.room(row.at, token_ids)

    def _as_set(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """A request's constraint with what the operator has set for all."""
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
        """The constraint as it is compiled, and its hash.

        Raises:
            RequestError: it is too large, or no JSON.
        """
        params = self._as_set(params)
        if isinstance(params.json, bool):  # is a schema, too
            params = msgspec.structs.replace(params, json=json.dumps(params.json))
        try:
            encoded = msgspec.msgpack.encode((params, list(eos_token_ids)))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            kind, _ = params.constraint()
            raise RequestError(f"structured_outputs.{kind} cannot be written as JSON: {error}", param=kind) from None
        if len(encoded) > limits.MAX_GRAMMAR_BYTES:
            message = f"structured_outputs has {len(encoded)} bytes; at most {limits.MAX_GRAMMAR_BYTES} are allowed"
            raise RequestError(message, param="structured_outputs")
        return params, hashlib.sha256(encoded).digest()

    def compile(
        self, params: StructuredOutputsParams, eos_token_ids: Sequence[int], load_vocabulary: Callable[[], Vocabulary]
    ) -> concurrent.futures.Future[States]:
        """Have a grammar compiled in another thread, unless it is kept; the last ones that were asked for are.

        Raises:
            RequestError: it is too large, or no JSON.
        """
        params, key = self._key(params, eos_token_ids)
        with self._lock:
            future = self._kept.get(key)
            if future is None:
                task = functools.partial(self._build, params, tuple(eos_token_ids), load_vocabulary)
                future = self._kept[key] = self._compilers.submit(task)
                if len(self._kept) > _MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        return future

    def _build(
        self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...], load_vocabulary: Callable[[], Vocabulary]
    ) -> States:
        """In a compiler's thread."""
        name = choose_backend(self._settings.backend, params)
        backend, strings, tokens = self._backend(name, eos_token_ids, load_vocabulary)
        compiled = backend.compile(params)
        kind, value = params.constraint()
        rules = None
        if strings.is_usable and params.whitespace_pattern is None and kind in ("json", "json_object"):
            schema = {"type": "object"} if kind == "json_object" else value
            rules = read_rules(json.loads(schema) if isinstance(schema, str) else schema)
        return States(backend, compiled, rules, strings, tokens, frozenset(eos_token_ids))

    def _backend(
        self, name: str, eos_token_ids: tuple[int, ...], load_vocabulary: Callable[[], Vocabulary]
    ) -> tuple[Backend, StringMasks, list[bytes]]:
        backend_class = find_backend(name)
        _check_end(eos_token_ids)
        with self._reading:
            key = (name, eos_token_ids)
            if key not in self._backends:
                vocabulary = self._read(load_vocabulary)
                strings = StringMasks(vocabulary, frozenset((*vocabulary.special_ids, *eos_token_ids)))
                self._backends[key] = backend_class(vocabulary, eos_token_ids), strings, vocabulary.tokens
            return self._backends[key]

    def read_ahead(
        self,
        load_ends: Callable[[], Sequence[int]],
        load_vocabulary: Callable[[], Vocabulary],
        *,
        apart: bool = False,
    ) -> concurrent.futures.Future[None] | None:
        """Have another thread do what the first request would wait for; None where the engine is not installed.

        Args:
            apart: what the first `check` with `apart` would wait for, which reads the vocabulary too.
        """
        name = "guidance" if self._settings.backend == "auto" else self._settings.backend
        if not is_installed(name):
            return None

        def read() -> None:
            try:
                if apart:
                    self._trials_of(name, tuple(load_ends()), load_vocabulary).begin()
                else:
                    self._backend(name, tuple(load_ends()), load_vocabulary)
            except Exception as error:  # a request with a grammar is told
                logger.debug("grammars cannot be prepared: %s", error)

        return self._compilers.submit(read)

    def _read(self, load_vocabulary: Callable[[], Vocabulary]) -> Vocabulary:
        """With the lock held."""
        if self._vocabulary is None:
            self._vocabulary = load_vocabulary()
        return self._vocabulary


def _check_end(eos_token_ids: Sequence[int]) -> None:
    if not eos_token_ids:
        message = "structured_outputs need a model with an end-of-sequence token: this one states none"
        raise RequestError(message, param="structured_outputs")


@functools.lru_cache(_MOST_SHARED)
def shared_grammars(
    tokenizer_path: str, tokenizer_mode: str, vocab_size: int, settings: StructuredOutputsConfig
) -> Grammars:
    """The grammars of a model's vocabulary: the frontend and the workers of one process share what either compiled."""
    return Grammars(settings)
