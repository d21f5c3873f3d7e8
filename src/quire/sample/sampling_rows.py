"""What the sampler keeps of each row: parameters in arrays, and objects only for rows that need them.

`features` is one bit set a row. A batch takes the fast path when the union of its rows' bits says that nobody needs more.
Knows nothing of logits.

Legend: R rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.kernels.step import SampleColumns
from quire.sample.constraints import RowConstraints
from quire.sample.grammar_masks import GrammarSource
from quire.sample.logits_processor import LogitsProcessor, RowProcessor, adapt_callable
from quire.sample.penalties import are_penalized
from quire.sampling_params import GREEDY_BELOW, SamplingParams

IntArray = npt.NDArray[np.int32]
RANDOM = 1
FILTER = 2
LOGPROBS = 4
CONSTRAINTS = 8
PENALTIES = 16
PROCESSORS = 32
ENGINE_PROCESSORS = 64
FAILED = 128
_ON_ITS_WAY = -1
"""Stands for a token that was drawn and did not arrive yet."""
EDITS = CONSTRAINTS | PENALTIES | PROCESSORS | ENGINE_PROCESSORS


@dataclasses.dataclass(slots=True)
class RowObjects:
    """What does not fit into an array, for rows with features beyond temperature and filters."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    constraints: RowConstraints | None = None
    processors: list[RowProcessor] = dataclasses.field(default_factory=list)
    engine_processors: list[LogitsProcessor] = dataclasses.field(default_factory=list)
    failure: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that are known."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


def _needs_objects(params: SamplingParams) -> bool:
    """Whether a request has features that do not fit into an array."""
    return RowConstraints.are_needed(params) or are_penalized(params) or bool(params.logits_processors)


class SamplingRows:
    """Sampling state of all rows."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        engine_processors: list[LogitsProcessor],
        grammars: GrammarSource | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars
        self._engine_processors = engine_processors
        self.features_R = np.zeros(max_rows, dtype=np.uint8)
        self.inverse_temperature_R = np.full(max_rows, np.inf, dtype=np.float32)
        self.seed_R = np.zeros(max_rows, dtype=np.int64)
        self.top_k_R = np.zeros(max_rows, dtype=np.int32)
        self.top_p_R = np.ones(max_rows, dtype=np.float32)
        self.min_p_R = np.zeros(max_rows, dtype=np.float32)
        self.num_logprobs_R = np.zeros(max_rows, dtype=np.int32)
        self.num_prompt_logprobs_R = np.zeros(max_rows, dtype=np.int32)
        self.may_jump_R = np.zeros(max_rows, dtype=np.bool_)
        self.named: dict[int, IntArray] = {}
        """Tokens that a row wants logprobs of, in place of the likeliest ones."""
        self.objects: dict[int, RowObjects] = {}

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        """A request takes the row. Nothing that a custom processor does here can raise: it fails the row later."""
        is_random = params.temperature >= GREEDY_BELOW
        self.inverse_temperature_R[row] = 1.0 / params.temperature if is_random else np.inf
        self.seed_R[row] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF).astype(np.int64)
        self.top_k_R[row] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p_R[row] = params.top_p
        self.min_p_R[row] = params.min_p
        features = RANDOM if is_random else 0
        if is_random and (self.top_k_R[row] or params.top_p < 1 or params.min_p > 0):
            features |= FILTER
        if params.logprobs is not None:
            features |= LOGPROBS
            self.num_logprobs_R[row] = self._at_most_vocabulary(params.logprobs)
        if params.logprob_token_ids is not None:
            features |= LOGPROBS
            self.named[row] = np.array(params.logprob_token_ids, dtype=np.int32)
            self.num_logprobs_R[row] = len(self.named[row])
        self.num_prompt_logprobs_R[row] = self._at_most_vocabulary(params.prompt_logprobs or 0)
        self.may_jump_R[row] = False
        if self._engine_processors or _needs_objects(params):  # a long prompt is made a list only for them
            objects = RowObjects(list(prompt_token_ids), list(output_token_ids))
            features |= self._add_objects(row, params, objects)
            if features & (EDITS | FAILED):
                self.objects[row] = objects
            # A request with logprobs, penalties or code of its own gets every token sampled.
            has_jumps = self.grammars is not None and self.grammars.jumps
            is_free = has_jumps and not features & ~(RANDOM | FILTER | CONSTRAINTS)
            self.may_jump_R[row] = is_free and objects.constraints is not None and objects.constraints.may_jump
        self.features_R[row] = features

    def pack(self, rows_S: IntArray, positions_S: IntArray, columns: SampleColumns) -> None:
        """Write what a step's rows sample with to columns on the host."""
        count = len(rows_S)
        columns.rows_S.numpy()[:count], columns.positions_S.numpy()[:count] = rows_S, positions_S
        for values_R, column_S in (
            (self.inverse_temperature_R, columns.inverse_temperature_S),
            (self.seed_R, columns.seed_S),
            (self.top_k_R, columns.top_k_S),
            (self.top_p_R, columns.top_p_S),
            (self.min_p_R, columns.min_p_S),
        ):
            values_R.take(rows_S, out=column_S.numpy()[:count], mode="clip")

    def is_named(self, rows_N: IntArray) -> npt.NDArray[np.bool_]:
        """Which rows name the tokens that they want logprobs of."""
        if not self.named:
            return np.zeros(len(rows_N), dtype=np.bool_)
        return np.array([row in self.named for row in rows_N.tolist()], dtype=np.bool_)

    def named_table(self, rows_N: IntArray) -> IntArray:
        """[N, K]: those tokens; token 0 fills shorter lists."""
        named = [self.named[row] for row in rows_N.tolist()]
        table_NK = np.zeros((len(named), max(map(len, named))), dtype=np.int32)
        for line, ids in zip(table_NK, named, strict=True):
            line[: len(ids)] = ids
        return table_NK

    def _at_most_vocabulary(self, count: int) -> int:
        return self.vocab_size if count < 0 else min(count, self.vocab_size)

    def _add_objects(self, row: int, params: SamplingParams, objects: RowObjects) -> int:
        features = 0
        output = objects.output_token_ids
        if RowConstraints.are_needed(params):
            num_prompt = len(objects.prompt_token_ids)
            grammar = None
            if params.structured_outputs is not None:
                assert self.grammars is not None, "a sampler without grammars got a request with structured_outputs"
                grammar = self.grammars.start(params)
            objects.constraints = RowConstraints(params, num_prompt, output, self.vocab_size, grammar)
            features |= CONSTRAINTS
        if are_penalized(params):
            features |= PENALTIES
        try:
            if params.logits_processors:
                objects.processors = [adapt_callable(function) for function in params.logits_processors]
                features |= PROCESSORS
            for processor in self._engine_processors:
                processor.validate_params(params)
                if processor.add_row(row, params, objects.prompt_token_ids, output):
                    objects.engine_processors.append(processor)
                    features |= ENGINE_PROCESSORS
        except Exception as error:  # a user's code: whatever it raises ends this request alone
            objects.failure = describe_failure(error)
            features |= FAILED
        return features

    def find_forced(self, rows_S: IntArray, positions_S: IntArray) -> dict[int, list[int]]:
        """By row, the tokens that can only follow the one drawn at its position, if that is the last one known."""
        members = np.flatnonzero(self.may_jump_R[rows_S])
        rows: list[int] = []
        outputs: list[tuple[Any, list[int]]] = []
        for row, position in zip(rows_S[members].tolist(), positions_S[members].tolist(), strict=True):
            objects = self.objects[row]
            if objects.constraints is not None and objects.num_tokens == position + 1:
                rows.append(row)
                outputs.append((objects.constraints.grammar, objects.output_token_ids))
        if not rows or self.grammars is None:
            return {}
        return {rows[index]: token_ids for index, token_ids in self.grammars.forced(outputs).items()}

    def put_tokens(self, row: int, position: int, token_ids: list[int]) -> None:
        """Tokens that nobody has to draw stand from this position on."""
        objects = self.objects.get(row)
        if objects is not None:
            output, begin = objects.output_token_ids, position - len(objects.prompt_token_ids)
            output += [_ON_ITS_WAY] * (begin - len(output))
            output[begin:] = token_ids

    def remove(self, row: int) -> None:
        """The row is free again."""
        self.features_R[row] = 0
        self.may_jump_R[row] = False
        self.named.pop(row, None)
        self.inverse_temperature_R[row] = np.inf
        objects = self.objects.pop(row, None)
        if objects is not None:
            for processor in objects.engine_processors:
                processor.remove_row(row)

    def end_constraints(self, row: int) -> None:
        """Nothing is forbidden to the row any more: it returns to the fast path if it has no other feature."""
        features = int(self.features_R[row]) & ~CONSTRAINTS
        self.features_R[row] = features
        if features & (EDITS | FAILED):
            self.objects[row].constraints = None
        else:
            del self.objects[row]


def describe_failure(error: Exception) -> str:
    """What a request's owner is told about the failure of custom code."""
    return f"a logits processor failed: {type(error).__name__}: {error}"
