"""From the core's outputs to the requests' records: tokens, stop strings, logprobs, ends, figures.

Knows every unfinished request of one frontend. Knows nothing of queues, sockets or event loops: it says which requests
have new outputs and which the core should abort because a stop string was completed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from quire.engine.messages import to_error
from quire.engine.request_record import RequestRecord, SequenceState
from quire.errors import QuireError, RequestError
from quire.metrics.engine_metrics import FinishedRequest
from quire.request import EngineCoreOutput, EngineCoreOutputs, FinishReason, SchedulerStats, WeightState

DETOKENIZE_EVERY = 16
"""Steps after which a quiet sequence's tokens become text: joining a few at a time costs no more than all at once."""


class StatsHook(Protocol):
    """Is told what the engine does; `metrics.EngineMetrics` is one. Times in seconds."""

    def record_step(self, stats: SchedulerStats) -> None:
        """A step's figures."""

    def record_first_token(self, seconds_since_arrival: float, num_prompt_tokens: int) -> None:
        """A sequence's first token came."""

    def record_next_tokens(self, seconds: float, count: int = 1, times: int = 1) -> None:
        """`count` further tokens of a sequence came, `seconds` after those before them; the same of `times` sequences."""

    def record_finished(self, request: FinishedRequest) -> None:
        """A sequence ended."""


class OutputProcessor:
    """Every unfinished request, by its own id and by its sequences' ids in the core.

    Args:
        hooks: hear of everything.
        copies: for each of the model's copies, who hears first of what it alone does; none where there is one.

    Attributes:
        on_end: called with each sequence that ends, its record and its figures.
        weight_version: of the weights that tokens come from.
    """

    def __init__(self, hooks: Sequence[StatsHook] = (), copies: Sequence[StatsHook] = ()) -> None:
        self.hooks: list[StatsHook] = list(hooks)
        self._copies = copies
        self.on_end: list[Callable[[RequestRecord, SequenceState, FinishedRequest], None]] = []
        self.weight_version = WeightState().version
        self._records: dict[str, RequestRecord] = {}
        self._sequences: dict[str, tuple[RequestRecord, SequenceState]] = {}
        self._silent: list[SequenceState] = []
        self._num_silent = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def records(self) -> list[RequestRecord]:
        return list(self._records.values())

    def add(self, record: RequestRecord) -> None:
        """A new request. Raises RequestError: its id is in use."""
        if record.request_id in self._records:
            message = f"request_id {record.request_id!r} is in use by a request that has not ended"
            raise RequestError(message, param="request_id")
        self._records[record.request_id] = record
        record.begin()
        for sequence in record.sequences:
            self._sequences[sequence.core_id] = (record, sequence)

    def discard(self, request_id: str) -> None:
        """Forget a request that the core never got."""
        record = self._records.pop(request_id, None)
        for sequence in record.sequences if record is not None else ():
            self._sequences.pop(sequence.core_id, None)

    def abort(self, request_ids: Iterable[str], now: float) -> tuple[list[RequestRecord], list[str]]:
        """End requests at the user's wish: their records, and the core's ids to abort. Unknown ids are ignored."""
        records: list[RequestRecord] = []
        core_ids: list[str] = []
        for request_id in request_ids:
            record = self._records.get(request_id)
            if record is None:
                continue
            for sequence in record.sequences:
                if sequence.finish_reason is None:
                    core_ids.append(sequence.core_id)
                    sequence.finish("abort")
                    self._end(record, sequence, now)
            records.append(record)
        return records, core_ids

    def find(self, core_ids: Iterable[str]) -> RequestRecord | None:
        """The unfinished request that these of the core's ids belong to."""
        return next((found[0] for each in core_ids if (found := self._sequences.get(each)) is not None), None)

    def having(self, core_ids: Iterable[str]) -> list[RequestRecord]:
        """The unfinished requests with these of the core's ids, each once."""
        found = (self._sequences.get(each) for each in core_ids)
        return list({each[0].request_id: each[0] for each in found if each is not None}.values())

    def fail(self, record: RequestRecord, error: QuireError, now: float) -> list[str]:
        """End a request that cannot go on; the core's ids of what was unfinished of it."""
        record.error, record.refusal = str(error), error
        unfinished = [sequence for sequence in record.sequences if sequence.finish_reason is None]
        for sequence in unfinished:
            sequence.finish("error")
            self._end(record, sequence, now)
        return [sequence.core_id for sequence in unfinished]

    def process(self, outputs: EngineCoreOutputs, now: float) -> tuple[list[RequestRecord], list[str]]:
        """Take in one step's outputs. Returns the records that have something new, a record once for each of its sequences, and
        sequences that the core should abort."""
        touched: list[RequestRecord] = []
        aborts: list[str] = []
        sequences = self._sequences
        has_hooks = bool(self.hooks)
        # Sequences by the time of their last token before this one, which is nearly always the same: one record for all of them.
        waits: dict[float, int] = {}
        for core_id, token_id in zip(outputs.plain_ids, outputs.plain_tokens, strict=True):
            found = sequences.get(core_id)
            if found is None:  # aborted while the step was under way
                continue
            record, sequence = found
            if sequence.is_quiet and not has_hooks:  # the offline case: only keep the token
                sequence.token_ids.append(token_id)
                sequence.first_token_time = sequence.first_token_time or now
                continue
            if sequence.has_stops:
                is_stopped = sequence.append(token_id)
            else:
                is_stopped = False
                sequence.token_ids.append(token_id)
            last = sequence.last_token_time
            if not last:
                record.copy = outputs.engine
                self._record_tokens(record, sequence, 1, now)
            elif has_hooks:
                waits[last] = waits.get(last, 0) + 1
            sequence.last_token_time = now
            if is_stopped:
                aborts.append(core_id)
                self._end(record, sequence, now)
            if not sequence.is_quiet:
                touched.append(record)
        hooks = self._hooks_of(outputs.engine)
        for last, times in waits.items():
            for hook in hooks:
                hook.record_next_tokens(now - last, 1, times)
        for output in outputs.outputs:
            found = sequences.get(output.request_id)
            if found is not None:
                found[0].copy = outputs.engine
                self._process_one(*found, output, now, touched, aborts)
        if outputs.stats is not None:
            for hook in hooks:
                hook.record_step(outputs.stats)
        if outputs.weights is not None:
            self._change_weights(outputs.weights)
        return touched, aborts

    def _change_weights(self, weights: WeightState) -> None:
        for _, sequence in self._sequences.values():
            sequence.note_weights(self.weight_version)
        self.weight_version = weights.version

    def detokenize_some(self) -> None:
        """Make text for some sequences that are read only at their end; after `DETOKENIZE_EVERY` calls, for all of them.
        So little is left to do when many end at once. Meant for moments in which the device works."""
        if not self._silent:
            self._silent = [sequence for _, sequence in self._sequences.values() if sequence.is_quiet]
            self._num_silent = -(-len(self._silent) // DETOKENIZE_EVERY)
        for sequence in self._silent[-self._num_silent :]:
            sequence.detokenize_ahead(DETOKENIZE_EVERY)
        del self._silent[-self._num_silent :]

    def _process_one(
        self,
        record: RequestRecord,
        sequence: SequenceState,
        output: EngineCoreOutput,
        now: float,
        touched: list[RequestRecord],
        aborts: list[str],
    ) -> None:
        """An output that is more than one plain token."""
        if output.num_cached_tokens >= 0 and record.num_cached_tokens is None:
            record.note_cached(output.num_cached_tokens)
            record.scheduled_time = output.scheduled_at
            record.kv_transfer_params = output.kv_transfer_params
        sequence.num_preemptions = max(sequence.num_preemptions, output.num_preemptions)
        if output.pooled is not None:
            record.pooled = output.pooled
        if sequence.index == 0:
            record.append_prompt_logprobs(output)
        sequence.append_logprobs(output)
        if output.finish_reason is None:
            stopped = any(sequence.append(token_id) for token_id in output.new_token_ids if not sequence.finish_reason)
            if stopped:
                aborts.append(sequence.core_id)
        else:
            self._finish(record, sequence, output)
        if output.new_token_ids:
            self._record_tokens(record, sequence, len(output.new_token_ids), now)
        if sequence.finish_reason is not None:
            self._end(record, sequence, now)
        if output.new_token_ids or sequence.finish_reason is not None:
            touched.append(record)

    @staticmethod
    def _finish(record: RequestRecord, sequence: SequenceState, output: EngineCoreOutput) -> None:
        """The core ended it; a stop string in its last tokens comes first."""
        reason = str(output.finish_reason)
        *earlier, last = output.new_token_ids or [None]
        if any(sequence.append(token_id) for token_id in earlier if token_id is not None):
            return
        if last is not None:
            if output.finish_reason is FinishReason.STOP:
                sequence.token_ids.append(last)  # the stop token: whether its text is shown is `finish`'s to say
            elif sequence.append(last):
                return
        if output.error is not None:
            record.error = output.error
            record.refusal = None if output.refusal is None else to_error(output.refusal, output.error)
        sequence.finish(reason, output.stop_reason)

    def _hooks_of(self, copy: int) -> Sequence[StatsHook]:
        """Who hears of what one of the model's copies does."""
        return [self._copies[copy], *self.hooks] if self._copies else self.hooks

    def _record_tokens(self, record: RequestRecord, sequence: SequenceState, count: int, now: float) -> None:
        if not sequence.first_token_time:
            sequence.first_token_time = now
            for hook in self._hooks_of(record.copy):
                hook.record_first_token(now - record.arrival_time, len(sequence.prompt_token_ids))
            count -= 1
        if count > 0:
            for hook in self._hooks_of(record.copy):
                hook.record_next_tokens(now - (sequence.last_token_time or sequence.first_token_time), count)
        sequence.last_token_time = now

    def _end(self, record: RequestRecord, sequence: SequenceState, now: float) -> None:
        """A sequence ended: forget it, and its request with the last of them."""
        self._sequences.pop(sequence.core_id, None)
        sequence.note_weights(self.weight_version)
        sequence.last_token_time = now
        record.num_unfinished -= 1
        if record.num_unfinished == 0:
            self._records.pop(record.request_id, None)
        if not self._sequences:
            self._silent.clear()
        if self.hooks or self.on_end:
            finished = _finished(record, sequence, now)
            for hook in self._hooks_of(record.copy):
                hook.record_finished(finished)
            for listener in self.on_end:
                listener(record, sequence, finished)


def _finished(record: RequestRecord, sequence: SequenceState, now: float) -> FinishedRequest:
    first = sequence.first_token_time
    return FinishedRequest(
        finish_reason=sequence.finish_reason or "abort",
        num_prompt_tokens=len(sequence.prompt_token_ids),
        num_generation_tokens=len(sequence.token_ids),
        time_to_first_token=first - record.arrival_time if first else None,
        decode_time=now - first if first else None,
        end_to_end=now - record.arrival_time,
        max_tokens=sequence.params.max_tokens,
        n=record.params.n,
        num_cached_tokens=record.num_cached_tokens or 0,
        scheduled=record.scheduled_time - record.arrival_time if record.scheduled_time else None,
        most_tokens=max(len(one.token_ids) for one in record.sequences) if record.num_unfinished == 0 else None,
        num_preemptions=sequence.num_preemptions,
        tenant=record.engine_requests[sequence.index].tenant,
    )
