"""The hash model: a model runner without tensors, whose token stream betrays any misplaced page.

Its "KV cache" stores hashes of the token and position that each slot was written for; its "attention" reads them back
through the row's page table; the next token is a keyed hash of what was read. If anything upstream (scheduler, prefix
cache, preemption, swap) corrupts or misplaces one page, the stream differs from `HashModel.oracle`, which knows only
the prompt. It implements the whole executor contract. Knows nothing of schedulers, and needs no torch.

Two "layers", as in a real model: a slot's first value depends on its own token and position alone, its second on every
token that was visible from it. A page reused under a wrong prefix is therefore noticed even where its tokens match.
A recurrent layer keeps one state a page, a hash chained over all tokens up to the page's last computed one.
"""

import dataclasses
import hashlib
from collections import deque
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec, KVKind
from quire.core.output import ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenLogprobs
from quire.errors import EngineError
from quire.executor.interface import Executor
from quire.request import Pooled
from quire.sampling_params import SamplingParams

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
MAX_IN_FLIGHT = 2
UNSEEN_WINDOW = 0xFFFF_FFFF
RECURRENT = -1
"""Stands among a model's windows for recurrent layers."""

U64Array = npt.NDArray[np.uint64]


def mix(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on a Python integer."""
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_A) & MASK
    value = ((value ^ (value >> 27)) * MIX_B) & MASK
    return value ^ (value >> 31)


def mix_array(values: U64Array) -> U64Array:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_B)
    return values ^ (values >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class HashModel:
    """The model's "weights".

    Attributes:
        key: another key, another model.
        windows: one entry a layer: tokens that stay visible (0 means all; `RECURRENT` is a layer with a state). Equal
            entries form one KV group.
        vocab_size: the last id is the end of sequence; ordinary tokens are those below it.
        eos_every: about one token in this many is the end of sequence; 0 means never.
        forced_every: about one token in this many says what follows it; 0 means never.
    """

    key: bytes = b"hash model"
    windows: tuple[int, ...] = (0,)
    vocab_size: int = 1000
    eos_every: int = 0
    forced_every: int = 0

    @property
    def eos_token_id(self) -> int:
        """The id that ends a sequence."""
        return self.vocab_size - 1

    def layer_key(self, window: int) -> int:
        """What layers of this window mix into their values."""
        digest = hashlib.blake2b(window.to_bytes(8, "little", signed=True), digest_size=8, key=self.key[:64]).digest()
        return int.from_bytes(digest, "little")

    def choose(self, seed: int, position: int, attended: list[int], banned: frozenset[int]) -> int:
        """The token after `position`, from what each distinct window attended to."""
        state = mix(seed + self.layer_key(UNSEEN_WINDOW))
        for value in attended:
            state = mix(state ^ value)
        state = mix(state + position)
        if self.eos_every and (state >> 32) % self.eos_every == 0:
            token = self.eos_token_id
        else:
            token = state % (self.vocab_size - 1)
        while token in banned:
            token = (token + 1) % self.vocab_size
        return token

    def forced(self, token_ids: list[int], num_prompt_tokens: int, params: SamplingParams, seed: int) -> list[int]:
        """Tokens that follow these for certain, maybe beyond the request's end: what `oracle` says, which knows all."""
        chosen = mix(seed + mix(len(token_ids)))
        if not self.forced_every or params.logprobs is not None or chosen % self.forced_every:
            return []
        endless = msgspec.structs.replace(params, max_tokens=None)
        if not params.min_tokens:
            endless = msgspec.structs.replace(endless, ignore_eos=True, stop_token_ids=None)
        num_output = len(token_ids) - num_prompt_tokens
        stream = self.oracle(token_ids[:num_prompt_tokens], endless, seed, num_output + 1 + (chosen >> 32) % 9)
        return stream[num_output:]

    def oracle(self, prompt: list[int], params: SamplingParams, seed: int, n_tokens: int) -> list[int]:
        """The stream that a correct engine emits: at most `n_tokens` and `max_tokens`, up to and with a stopping token.

        Written on the prefix alone, one token at a time, in plain integers: slow and obvious.
        """
        stops, banned = stop_ids(params), masked_ids(params)
        histories = [
            _Chain(self.layer_key(window)) if window == RECURRENT else _History(self.layer_key(window), window)
            for window in sorted(set(self.windows))
        ]
        for position, token in enumerate(prompt):
            for history in histories:
                history.append(token, position)
        output: list[int] = []
        limit = n_tokens if params.max_tokens is None else min(n_tokens, params.max_tokens)
        while len(output) < limit:
            position = len(prompt) + len(output) - 1
            is_masked = len(output) < params.min_tokens
            attended = [history.attended() for history in histories]
            token = self.choose(seed, position, attended, banned if is_masked else frozenset())
            output.append(token)
            if token in stops and len(output) >= params.min_tokens:
                break
            for history in histories:
                history.append(token, position + 1)
        return output


class _History:
    """The oracle's "attention" for one window: both values of every past position, in plain lists."""

    def __init__(self, key: int, window: int) -> None:
        self._key = key
        self._window = window
        self._first: list[int] = []
        self._second: list[int] = []
        self._first_sum = 0
        self._second_sum = 0

    def append(self, token: int, position: int) -> None:
        value = mix(mix(token + self._key) + position)
        read = mix(value + position * GOLDEN)
        self._first.append(read)
        self._first_sum += read
        leaving = position - self._window if self._window else -1
        if leaving >= 0:
            self._first_sum -= self._first[leaving]
        second = mix(mix(value ^ (self._first_sum & MASK)) + position * GOLDEN)
        self._second.append(second)
        self._second_sum += second
        if leaving >= 0:
            self._second_sum -= self._second[leaving]

    def attended(self) -> int:
        return self._second_sum & MASK


class _Chain:
    """The oracle's recurrent layer: a state that every token changes."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._state = 0

    def append(self, token: int, position: int) -> None:
        self._state = next_state(self._state, token + self._key, position)

    def attended(self) -> int:
        return self._state


def next_state(state: int, token: int, position: int) -> int:
    """A recurrent layer's state after one more token."""
    return mix(mix(state ^ mix(token)) + position)


def stop_ids(params: SamplingParams) -> frozenset[int]:
    """Every token id that ends a request with these parameters."""
    eos = () if params.ignore_eos else params.eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids or ())


def masked_ids(params: SamplingParams) -> frozenset[int]:
    """Token ids that may not be sampled before `min_tokens`."""
    return frozenset(params.eos_token_ids) | frozenset(params.stop_token_ids or ())


@dataclasses.dataclass
class Faults:
    """Trouble drawn from a seed. Rates are per step (slow, lost) and per row and step (error)."""

    seed: int = 0
    slow_step_rate: float = 0.0
    row_error_rate: float = 0.0
    lost_step_rate: float = 0.0


@dataclasses.dataclass
class _Row:
    """What the runner keeps of a row."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: list[list[int]]
    params: SamplingParams | None
    pooling: bool
    seed: int
    banned: frozenset[int]


class HashExecutor(Executor):
    """Runs `HashModel` over pages, by the letter of the contract; anything that breaks the contract is an EngineError.

    A step is computed when it is collected, so that a caller who changes a step after handing it over is found out.

    Args:
        config: the engine's configuration; may be None where a test drives the scheduler itself.
        model: the "weights"; by default one full layer over the configured vocabulary.
        block_size: tokens a page; by default the configuration's.
        kv_bytes: what `available_kv_bytes` answers.
        faults: trouble to inject; by default none.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        model: HashModel | None = None,
        block_size: int | None = None,
        kv_bytes: int = 1 << 20,
        faults: Faults | None = None,
    ) -> None:
        if config is not None:
            super().__init__(config)
        self.model = model or HashModel(vocab_size=config.model.vocab_size if config else 1000)
        self._block_size = block_size or (config.cache.block_size if config else 16)
        self._kv_bytes = kv_bytes
        self._faults = faults or Faults()
        self._random = Random(self._faults.seed)
        self._rows: dict[int, _Row] = {}
        self._in_flight: deque[SchedulerOutput] = deque()
        self._windows: list[int] = []

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Sixteen bytes a token and layer: two 64-bit values. A state takes a page of them."""
        return [self._spec(window) for window in self.model.windows]

    def _spec(self, window: int) -> KVCacheSpec:
        if window == RECURRENT:
            return KVCacheSpec(KVKind.RECURRENT, self._block_size, bytes_per_token=16 * self._block_size)
        kind = KVKind.SLIDING_WINDOW if window else KVKind.FULL
        return KVCacheSpec(kind, self._block_size, bytes_per_token=16, window=window)

    def available_kv_bytes(self) -> int:
        return self._kv_bytes

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        """One store for all groups, as in a real pool: a page used by two groups at once is corrupted."""
        specs = [group.spec for group in kv_cache.groups]
        self._windows = [RECURRENT if spec.kind is KVKind.RECURRENT else spec.window for spec in specs]
        self._block_size = kv_cache.block_size
        self._first = np.zeros((kv_cache.num_blocks, self._block_size), dtype=np.uint64)
        self._second = np.zeros_like(self._first)
        self._host_first = np.zeros((kv_cache.num_host_blocks, self._block_size), dtype=np.uint64)
        self._host_second = np.zeros_like(self._host_first)

    def execute(self, step: SchedulerOutput) -> None:
        """Accept a step; it runs at `collect`."""
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            raise EngineError(f"step {step.step_id} was started with {MAX_IN_FLIGHT} steps in flight already")
        self._in_flight.append(step)

    def collect(self) -> ModelRunnerOutput:
        if not self._in_flight:
            raise EngineError("collect() without a step in flight")
        step = self._in_flight.popleft()
        self._apply(step)
        return self._compute(step)

    def sleep(self, level: int = 1) -> None:
        """Forget the pages."""
        self._first[:] = 0
        self._second[:] = 0

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Pages are there already."""

    def explain(self) -> dict[str, Any]:
        """What this stands on."""
        return {"model": "hash model", "windows": self.model.windows, "vocab_size": self.model.vocab_size}

    def _apply(self, step: SchedulerOutput) -> None:
        """The diff, in the contract's order."""
        for row in step.finished_rows:
            if self._rows.pop(row, None) is None:
                raise EngineError(f"step {step.step_id} finishes row {row}, which nobody owns")
        for device_page, host_page in step.swap_outs:
            self._host_first[host_page] = self._first[device_page]
            self._host_second[host_page] = self._second[device_page]
        for request in step.new_requests:
            self._add_row(step, request)
        for row, group, pages in step.new_blocks:
            self._row(step, row).tables[group].extend(pages)
        for host_page, device_page in step.swap_ins:
            self._first[device_page] = self._host_first[host_page]
            self._second[device_page] = self._host_second[host_page]
        for row, position, token_ids in step.known_tokens:
            self._row(step, row).token_ids[position:] = token_ids

    def _add_row(self, step: SchedulerOutput, request: NewRequestData) -> None:
        if request.row in self._rows:
            raise EngineError(f"step {step.step_id} gives row {request.row} to {request.request_id}, but it is taken")
        if len(request.block_ids) != len(self._windows):
            raise EngineError(f"{request.request_id} has tables for {len(request.block_ids)} KV groups")
        params = request.sampling_params
        self._rows[request.row] = _Row(
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            tables=[list(table) for table in request.block_ids],
            params=params,
            pooling=request.pooling_params is not None,
            seed=request.seed,
            banned=masked_ids(params) if params and params.min_tokens else frozenset(),
        )

    def _row(self, step: SchedulerOutput, row: int) -> _Row:
        if row not in self._rows:
            raise EngineError(f"step {step.step_id} names row {row}, which nobody owns")
        return self._rows[row]

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        scheduled = dict(zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True))
        if len(scheduled) != len(step.rows) or sum(scheduled.values()) != step.total_num_tokens:
            raise EngineError(f"step {step.step_id}: rows repeat, or its tokens do not add up")
        result = ModelRunnerOutput(step_id=step.step_id, rows=step.rows[:0], token_ids=step.rows[:0])
        result.logprobs, result.prompt_logprobs, result.row_errors, result.pooled = {}, {}, {}, {}
        result.forced, result.accepted = {}, {}
        written: dict[int, int] = {}
        attended: dict[int, list[int]] = {}
        behind: dict[int, list[list[int]]] = {}
        kept = {number: self._states_of(step, number) for number in step.drafts}
        for number, count in scheduled.items():
            drafts = step.drafts.get(number, [])
            attended[number] = self._run_row(step, number, count - len(drafts), written)
            behind[number] = self._run_drafts(step, number, count - len(drafts), drafts, written)
        rows: list[int] = []
        tokens: list[int] = []
        before = {
            number: (self._rows[number].num_computed_tokens, len(self._rows[number].token_ids)) for number in scheduled
        }
        for number, needs_sample in zip(scheduled, step.needs_sample.tolist(), strict=True):
            row = self._rows[number]
            start = row.num_computed_tokens
            row.num_computed_tokens = end = start + scheduled[number] - len(behind[number])
            if needs_sample is not (end == len(row.token_ids)):
                raise EngineError(f"step {step.step_id}: row {number} has {len(row.token_ids)} tokens, {end} computed")
            self._report_prompt_logprobs(number, row, start, end, result)
            if self._random.random() < self._faults.row_error_rate:
                self._poison(row, start, start + scheduled[number])
                result.row_errors[number] = "injected fault"
                row.token_ids.extend([0] if needs_sample else [])
            elif needs_sample and row.pooling:
                numbers = [(value % 1000) / 1000 for value in attended[number]]
                result.pooled[number] = Pooled.from_array(np.array(numbers, np.float32))
                row.token_ids.append(0)
            elif needs_sample:
                rows.append(number)
                tokens.append(self._sample(number, row, attended[number], result))
                self._accept(number, row, step.drafts.get(number, []), behind[number], tokens[-1], result)
                if len(result.accepted.get(number, ())) < len(behind[number]) and RECURRENT in self._windows:
                    self._put_back(row, start, kept[number])
        if self._faults.lost_step_rate and self._random.random() < self._faults.lost_step_rate:
            return self._lose(step, rows, before)
        result.rows = np.array(rows, dtype=np.int32)
        result.token_ids = np.array(tokens, dtype=np.int32)
        result.step_ms = self._step_ms(step)
        return result

    def _lose(self, step: SchedulerOutput, sampled: list[int], before: dict[int, tuple[int, int]]) -> ModelRunnerOutput:
        """A device without memory may have written anything of the step's tokens, and tells none. `before`: where its rows
        stood."""
        for number, count in zip(step.rows.tolist(), step.num_scheduled_tokens.tolist(), strict=True):
            row = self._rows[number]
            start, length = before[number]
            self._poison(row, start, start + count)
            row.num_computed_tokens = start + count - len(step.drafts.get(number, ()))
            if number in sampled:
                row.token_ids[length:] = [0]
        return ModelRunnerOutput(step.step_id, step.rows[:0], step.rows[:0], lost="out of memory, injected")

    def _run_row(self, step: SchedulerOutput, number: int, count: int, written: dict[int, int]) -> list[int]:
        """Compute a row's new tokens in every group; returns what the last one saw, once a window."""
        row = self._row(step, number)
        start, end = row.num_computed_tokens, row.num_computed_tokens + count
        if count < 1 or end > len(row.token_ids):
            message = f"step {step.step_id}: row {number} has {len(row.token_ids)} tokens, told to compute {end}"
            raise EngineError(message)
        attended: dict[int, int] = {}
        for group, window in enumerate(self._windows):
            if window == RECURRENT:
                value = self._recur(step, number, group, start, end, written)
            else:
                value = self._attend(step, number, group, start, end, written)
            if attended.setdefault(window, value) != value:
                attended[window] = mix(attended[window] ^ value)
        return [attended[window] for window in sorted(attended)]

    def _states_of(self, step: SchedulerOutput, number: int) -> dict[int, tuple[Any, Any]]:
        """The pages that a row's states are read from, and what is in them."""
        row, found = self._row(step, number), dict[int, tuple[Any, Any]]()
        for group, window in enumerate(self._windows):
            if window == RECURRENT:
                page = row.tables[group][(row.num_computed_tokens - 1) // self._block_size]
                found[page] = self._first[page].copy(), self._second[page].copy()
        return found

    def _put_back(self, row: _Row, start: int, states: dict[int, tuple[Any, Any]]) -> None:
        """A draft was wrong: the row goes on from where the step began."""
        for page, (first, second) in states.items():
            self._first[page], self._second[page] = first, second
        row.num_computed_tokens = start

    def _run_drafts(
        self, step: SchedulerOutput, number: int, count: int, drafts: list[int], written: dict[int, int]
    ) -> list[list[int]]:
        """Compute a row's drafts behind its last token, `count` of which precede them: what each of them saw. What they leave in
        the cache stays there, and is computed again where a draft was wrong."""
        row = self._rows[number]
        length, start = len(row.token_ids), row.num_computed_tokens
        if drafts and start + count != length:
            raise EngineError(f"step {step.step_id}: row {number} has drafts, and not all of its tokens are computed")
        row.token_ids += drafts
        seen: list[list[int]] = []
        for offset in range(len(drafts)):
            row.num_computed_tokens = length + offset
            seen.append(self._run_row(step, number, 1, written))
        row.num_computed_tokens = start
        del row.token_ids[length:]
        return seen

    def _accept(
        self, number: int, row: _Row, drafts: list[int], behind: list[list[int]], token: int, result: ModelRunnerOutput
    ) -> None:
        """Draw behind each draft that was right."""
        accepted: list[int] = []
        for draft, attended in zip(drafts, behind, strict=True):
            if draft != token:
                break
            logprobs = result.logprobs.pop(number, None)
            result.forced.pop(number, None)
            row.num_computed_tokens += 1
            token = self._sample(number, row, attended, result)
            accepted.append(token)
            if logprobs is not None:
                result.logprobs[number] = joined(logprobs, result.logprobs[number])
        if accepted:
            result.accepted[number] = accepted

    def _attend(
        self, step: SchedulerOutput, number: int, group: int, start: int, end: int, written: dict[int, int]
    ) -> int:
        """A layer that keeps both values of every token: what the last token attends to."""
        window = self._windows[group]
        tokens = np.array(self._rows[number].token_ids[start:end], dtype=np.uint64)
        low = max(0, start - window + 1) if window else 0
        slots = self._slots(step, number, group, low, end)
        new_slots = slots[start - low :]
        self._claim(step, number, group, new_slots, written)
        key = np.uint64(self.model.layer_key(window))
        values = mix_array(mix_array(tokens + key) + np.arange(start, end, dtype=np.uint64))
        first, second = self._first.reshape(-1), self._second.reshape(-1)
        first[new_slots] = values
        second[new_slots] = mix_array(values ^ visible_sums(first[slots], low, start, window))
        return int(visible_sums(second[slots], low, start, window)[-1])

    def _recur(
        self, step: SchedulerOutput, number: int, group: int, start: int, end: int, written: dict[int, int]
    ) -> int:
        """A layer that keeps a state: read where the last step left it, written at every page's end and at the step's."""
        token_ids, size = self._rows[number].token_ids, self._block_size
        slots = self._slots(step, number, group, max(0, start - 1), end)
        self._claim(step, number, group, slots[min(start, 1) :], written)
        pages = slots // size
        state = self._load_state(int(pages[0])) if start else 0
        key = self.model.layer_key(RECURRENT)
        for position, page in zip(range(start, end), pages[min(start, 1) :].tolist(), strict=True):
            state = next_state(state, token_ids[position] + key, position)
            if position + 1 == end or (position + 1) % size == 0:
                self._first[page], self._second[page] = state, mix(state)
        return state

    def _load_state(self, page: int) -> int:
        """The state that fills a page; something else where anybody has written into it."""
        state = int(self._first[page, 0])
        if (self._first[page] != state).any() or (self._second[page] != mix(state)).any():
            return mix(int(self._first[page].sum(dtype=np.uint64)) + state)
        return state

    def _slots(self, step: SchedulerOutput, number: int, group: int, low: int, end: int) -> npt.NDArray[np.int64]:
        """Slot of each position from `low` to `end` - 1, through the row's page table."""
        table = self._rows[number].tables[group]
        size = self._block_size
        if len(table) * size < end:
            raise EngineError(f"step {step.step_id}: row {number} computes {end} tokens in {len(table)} pages")
        positions = np.arange(low, end)
        pages = np.array(table[low // size : (end - 1) // size + 1], dtype=np.int64)
        return pages[positions // size - low // size] * size + positions % size

    def _claim(
        self, step: SchedulerOutput, number: int, group: int, slots: npt.NDArray[np.int64], written: dict[int, int]
    ) -> None:
        """Page 0 is nobody's, and in one step a page has one writer."""
        for page in set((slots // self._block_size).tolist()):
            if page == 0 or written.setdefault(page, (number << 8) | group) != (number << 8) | group:
                raise EngineError(f"step {step.step_id}: row {number} writes page {page}, which is not its own")

    def _sample(self, number: int, row: _Row, attended: list[int], result: ModelRunnerOutput) -> int:
        position = len(row.token_ids) - 1
        params = row.params
        is_masked = params is not None and position + 1 - row.num_prompt_tokens < params.min_tokens
        token = self.model.choose(row.seed, position, attended, row.banned if is_masked else frozenset())
        row.token_ids.append(token)
        if params is not None and params.logprobs is not None:
            result.logprobs[number] = self._logprobs([token], params.logprobs)
            for token_id in params.logprob_token_ids or ():
                result.logprobs[number].token_ids[0].append(token_id)
                result.logprobs[number].logprobs[0].append(-0.6931 * (1 + (token_id - token) % self.model.vocab_size))
        forced = self.model.forced(row.token_ids, row.num_prompt_tokens, params, row.seed) if params is not None else []
        if forced:
            result.forced[number] = forced
        return token

    def _report_prompt_logprobs(self, number: int, row: _Row, start: int, end: int, result: ModelRunnerOutput) -> None:
        params = row.params
        if params is None or params.prompt_logprobs is None:
            return
        targets = row.token_ids[start + 1 : min(end + 1, row.num_prompt_tokens)]
        if targets:
            result.prompt_logprobs[number] = self._logprobs(targets, params.prompt_logprobs)

    def _logprobs(self, tokens: list[int], count: int) -> TokenLogprobs:
        """A made-up distribution that halves from the token on; rank 1 is the token itself."""
        count = self.model.vocab_size - 1 if count < 0 else count
        size = self.model.vocab_size
        ids = [[token] + [(token + offset) % size for offset in range(count)] for token in tokens]
        values = [[-0.6931] + [-0.6931 * (offset + 1) for offset in range(count)] for _ in tokens]
        return TokenLogprobs(token_ids=ids, logprobs=values, ranks=[1] * len(tokens))

    def _poison(self, row: _Row, start: int, end: int) -> None:
        """A failed computation leaves rubbish where it would have written."""
        for table, window in zip(row.tables, self._windows, strict=True):
            for page in table[start // self._block_size : (end - 1) // self._block_size + 1]:
                is_begun = page == table[start // self._block_size] and window != RECURRENT
                offset = start % self._block_size if is_begun else 0
                self._first[page, offset:] = np.uint64(GOLDEN)
                self._second[page, offset:] = np.uint64(GOLDEN)

    def _step_ms(self, step: SchedulerOutput) -> float:
        """A plausible device: a fixed cost, and one for each token and sequence."""
        step_ms = 1.0 + 0.01 * step.total_num_tokens + 0.02 * len(step.rows)
        return step_ms * 50 if self._random.random() < self._faults.slow_step_rate else step_ms


def joined(first: TokenLogprobs, second: TokenLogprobs) -> TokenLogprobs:
    """Those of both, one after the other."""
    return TokenLogprobs(
        first.token_ids + second.token_ids, first.logprobs + second.logprobs, first.ranks + second.ranks
    )


def visible_sums(values: U64Array, low: int, start: int, window: int) -> U64Array:
    """What each position from `start` on attends to: the sum over visible positions, each mixed with where it was read.

    `values` are those of positions `low` and after. Sums wrap at 64 bits.
    """
    positions = np.arange(low, low + len(values), dtype=np.uint64)
    sums = np.cumsum(mix_array(values + positions * np.uint64(GOLDEN)), dtype=np.uint64)
    if not window:
        return sums[start - low :]
    ends = np.arange(start, low + len(values))
    before = ends - window - low
    behind = np.where(before >= 0, sums[np.maximum(before, 0)], np.uint64(0))
    return sums[start - low :] - behind
