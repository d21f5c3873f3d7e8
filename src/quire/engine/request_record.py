"""What the frontend remembers of a request until it ends: its prompt, its parameters, and all that it has emitted.

This is also the journal: from a `RequestRecord` a request can be given to a new engine core and go on where it stopped.
Turns tokens and logprobs into `RequestOutput`s. An output is built when it is read, from where the last one ended:
a slow reader gets several steps in one output, and nothing piles up meanwhile.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from quire.errors import QuireError
from quire.logger import init_logger
from quire.logprobs import FlatLogprobs, Logprob, LogprobsOnePosition
from quire.outputs import (
    AnyOutput,
    CompletionOutput,
    LateChunkingMetadata,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)
from quire.request import EngineCoreOutput, EngineRequest, Pooled
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizers.detokenizer import Detokenizer, detokenize, make_detokenizer
from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.token_texts import CONTEXT_TOKENS, texts_at

logger = init_logger(__name__)


class StopStrings:
    """The stop strings of one request.

    Args:
        stops: at least one; none empty.
        include: whether the output keeps the stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._longest = max(map(len, self._stops))

    def find(self, text: str, checked: int) -> tuple[str, int] | None:
        """The stop string that ends first after position `checked`, and where the output's text ends because of it.

        The first to be complete wins; among those that end at the same character, the longest. So the result does not
        depend on how the text was cut into pieces.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, checked - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        end, start, stop = best
        return stop, end if self._include else start

    def held_back(self, text: str) -> int:
        """Characters at the text's end that may turn out to begin a stop string; none when stop strings are kept."""
        if self._include:
            return 0
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) and len(stop) > length for stop in self._stops):
                return length
        return 0


SamplePositions = FlatLogprobs | list[LogprobsOnePosition]
PromptPositions = FlatLogprobs | list[LogprobsOnePosition | None]


def build_position(
    token_ids: Sequence[int],
    values: Sequence[float],
    rank: int,
    texts: Sequence[str | None],
    *,
    are_named: bool = False,
) -> LogprobsOnePosition:
    """One position's logprobs: the token itself first, with its rank; then the best ones, ranked 1, 2, …, or those that were
    named, whose ranks are unknown. `texts`: of each token."""
    position: LogprobsOnePosition = {}
    for index, token_id in enumerate(token_ids):
        if token_id not in position:
            own_rank = (None if are_named else index) if index else rank
            position[token_id] = Logprob(values[index], own_rank, texts[index])
    return position


NO_TOKENS = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
"""Parameters of a sequence that gets no tokens: a pooling request's."""


class SequenceState:
    """One generated sequence: a request has `n` of them.

    Attributes:
        core_id: its id in the engine core.
        token_ids: every token emitted so far.
        text: their text, as far as it was needed.
        is_quiet: nothing has to be done for a token but to keep it: no reader before the end, no stop strings.
        has_stops: each token's text is looked at as it comes.
        weight_versions: which tokens were made by which weights, as far as these have changed; all of it when it has ended.
        is_plain: until it ends there is nothing to tell but its text as it comes.
    """

    def __init__(self, request: EngineRequest, index: int, tokenizer: Tokenizer | None) -> None:
        params = request.sampling_params or NO_TOKENS
        self.core_id = request.request_id
        self.index = index
        self.params: SamplingParams = params
        self.prompt_token_ids = request.prompt_token_ids
        self.token_ids: list[int] = list(request.resumed_token_ids)
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.logprobs: SamplePositions | None = None
        if params.logprobs is not None:
            self.logprobs = FlatLogprobs() if params.flat_logprobs else []
        self.first_token_time = self.last_token_time = 0.0
        self.num_preemptions = 0
        self.sent_tokens = self.sent_chars = 0
        self.sent_finish = False
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        self._tokenizer = tokenizer if params.detokenize else None
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._detokenizer: Detokenizer | None = None
        self._fed = 0
        self._checked = 0
        self._hide_last = False
        self.has_stops = self._stops is not None
        self.is_quiet = params.output_kind is RequestOutputKind.FINAL_ONLY and not self.has_stops
        self._adapter = request.adapter
        self._interval = params.stream_interval or 1
        tells_text = self._tokenizer is not None and self.logprobs is None and self._interval == 1
        is_delta = params.output_kind is RequestOutputKind.DELTA
        self.is_plain = tells_text and is_delta
        self._ends: list[int] | None = [] if is_delta and self.logprobs is not None else None
        self.weight_versions: list[WeightVersionSpan] = []

    # --- tokens come in ---

    def append(self, token_id: int) -> bool:
        """Keep one token; true when a stop string is complete, which ends the sequence."""
        self.token_ids.append(token_id)
        if self._stops is None:
            return False
        return self._advance_and_check(len(self.token_ids))

    def note_weights(self, version: str) -> None:
        """The tokens that came since the last note were made by these weights."""
        start, end = self.weight_versions[-1].end if self.weight_versions else 0, len(self.token_ids)
        if end > start:
            self.weight_versions.append(WeightVersionSpan(version, start, end))

    def append_logprobs(self, output: EngineCoreOutput) -> None:
        """Keep the logprobs of the tokens that came with `output`."""
        told = output.logprobs
        if self.logprobs is None or told is None:
            return
        are_named = self.params.logprob_token_ids is not None
        before = self.token_ids[-CONTEXT_TOKENS:]
        for token_ids, values, rank in zip(told.token_ids, told.logprobs, told.ranks, strict=True):
            texts = self._texts_of(before, token_ids)
            self.logprobs.append(build_position(token_ids, values, rank, texts, are_named=are_named))
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + values[0]
            before.append(token_ids[0])

    def _texts_of(self, before: list[int], token_ids: Sequence[int]) -> Sequence[str | None]:
        """The texts of the tokens that could follow the output `before`; the first token may end the prompt's last character."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        if len(before) < CONTEXT_TOKENS:
            prompt_end = self.prompt_token_ids[-CONTEXT_TOKENS:]
            return texts_at(self._tokenizer, [*prompt_end, *before], token_ids, keeps_broken=bool(before))
        return texts_at(self._tokenizer, before, token_ids)

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """The core ended this sequence, or the user did. A stop token leaves no text unless the user asked for it."""
        self.stop_reason = stop_reason
        self._hide_last = reason == "stop" and not self.params.include_stop_str_in_output
        if self._stops is not None:
            if self._advance_and_check(len(self.token_ids) - self._hide_last):
                return
            if self._detokenizer is not None and self._keep(self._detokenizer.finish()):
                return
        self.finish_reason = reason

    def _advance_and_check(self, end: int) -> bool:
        """Detokenise up to token `end`, one token at a time; true when a stop string is complete: the rest is dropped. A
        tokenizer that fails ends this sequence alone."""
        if self._tokenizer is None:
            return False
        try:
            if self._detokenizer is None:
                self._detokenizer = self._make_detokenizer(self._tokenizer)
            while self._fed < end:
                piece = self._detokenizer.feed((self.token_ids[self._fed],))
                self._fed += 1
                is_complete = bool(piece) and self._keep(piece)
                if self._ends is not None:
                    self._ends.append(len(self.text))
                if is_complete:
                    return True
        except Exception:
            logger.exception("The tokens of %s cannot be turned into text.", self.core_id)
            self.finish_reason = "error"
            return True
        return False

    def _keep(self, piece: str) -> bool:
        """Append to the text and look for stop strings; before `min_tokens` nothing stops."""
        self.text += piece
        assert self._stops is not None
        if self._fed > self.params.min_tokens:
            found = self._stops.find(self.text, self._checked)
            if found is not None:
                self.stop_reason, end = found
                self.text = self.text[:end]
                self.finish_reason = "stop"
                del self.token_ids[self._fed :]
                if self.logprobs is not None:
                    self._drop_logprobs_beyond(self._fed)
                return True
        self._checked = len(self.text)
        return False

    def _drop_logprobs_beyond(self, count: int) -> None:
        """The stop string ended before the last tokens of a step: their logprobs go with them."""
        if self.logprobs is None or len(self.logprobs) <= count:
            return
        gone = self.logprobs[count:]
        self.logprobs = self.logprobs[:count]
        token_of = (next(iter(position.values())).logprob for position in gone)
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) - sum(token_of)

    def _make_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        params = self.params
        return make_detokenizer(
            tokenizer, self.prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )

    # --- outputs go out ---

    def detokenize_ahead(self, least: int) -> None:
        """Make text of the tokens so far, before anybody reads it: of at least `least` tokens, and where that is cheap."""
        has_tokens = len(self.token_ids) - self._fed >= least and self.finish_reason is None
        if has_tokens and self._tokenizer is not None and self._tokenizer.token_bytes is not None:
            self._catch_up_text()

    def _catch_up_text(self) -> None:
        """Without stop strings text is made here, when it is read. At the end of a quiet request: all at once."""
        if self._tokenizer is None or self._stops is not None:
            return
        end = len(self.token_ids) - self._hide_last
        if self._detokenizer is None and self.finish_reason is not None:
            params = self.params
            self.text = detokenize(
                self._tokenizer,
                self.prompt_token_ids,
                self.token_ids[:end],
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
            return
        if self._detokenizer is None:
            self._detokenizer = self._make_detokenizer(self._tokenizer)
        if self._ends is not None:
            for token_id in self.token_ids[self._fed : end]:
                self.text += self._detokenizer.feed((token_id,))
                self._ends.append(len(self.text))
        elif self._fed < end:
            self.text += self._detokenizer.feed(self.token_ids[self._fed : end])
        self._fed = max(self._fed, end)
        if self.finish_reason is not None:
            self.text += self._detokenizer.finish()

    def take_text(self) -> str | None:
        """New text, maybe none, of a plain sequence that was built before and goes on: all there is to tell of it. None of any
        other. The next output leaves it out, and has its tokens."""
        detokenizer = self._detokenizer
        if detokenizer is None or self.finish_reason is not None or not self.is_plain:
            return None
        if self._stops is not None:
            sent = self.sent_chars
            self.sent_chars = max(sent, len(self.text) - self._stops.held_back(self.text))
            return self.text[sent : self.sent_chars]
        token_ids, fed = self.token_ids, self._fed
        self._fed = len(token_ids)
        return detokenizer.feed(token_ids[fed:])

    def has_output(self) -> bool:
        """Whether something came since the last output was built, and is enough to be told."""
        least = self.sent_tokens + (self._interval if self.sent_tokens else 1)
        return len(self.token_ids) >= least or (self.finish_reason is not None and not self.sent_finish)

    def build(self, as_delta: bool) -> CompletionOutput:
        """This sequence's part of an output: all of it, or what came since the last one."""
        if not self.sent_finish:
            self._catch_up_text()
        chars = len(self.text)
        if self.finish_reason is None and self._stops is not None:
            chars = max(self.sent_chars, chars - self._stops.held_back(self.text))
        first_char, first_token = (self.sent_chars, self.sent_tokens) if as_delta else (0, 0)
        completion = CompletionOutput(
            index=self.index,
            text=self.text[first_char:chars],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            lora_request=self._adapter,
            weight_versions=None if self.finish_reason is None else self.weight_versions,
        )
        if self._ends is not None:
            ends = [min(end, chars) - first_char for end in self._ends[first_token:]]
            hidden = len(completion.token_ids) - len(ends)  # a stop token
            completion.text_ends = [*ends, *[chars - first_char] * hidden]
        self.sent_chars, self.sent_tokens = chars, len(self.token_ids)
        self.sent_finish = self.finish_reason is not None
        return completion


@dataclasses.dataclass(slots=True, eq=False)
class RequestRecord:
    """One user's request and its `n` sequences.

    Attributes:
        notify: called when there is something new to read; None where the caller asks by himself.
        unread: prompt logprobs that have come and are not in `prompt_logprobs` yet.
        error: why it failed, where it did.
        refusal: the error that the core refused it with, where it did: a client's fault, or a lack of room.
        death: of the engine, before it has ended.
        pooled: what the pooler gave, if it is a pooling request.
        scheduled_time: when its first sequence left the core's queue; 0 as long as that is not known.
        trace_headers: of the caller, where spans are written.
        kv_transfer_params: where its prompt's pages are, for another engine.
        copy: the model's copy that computes it, as soon as it has told anything.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    engine_requests: list[EngineRequest]
    arrival_time: float
    tokenizer: Tokenizer | None
    sequences: list[SequenceState] = dataclasses.field(default_factory=list[SequenceState])
    num_unfinished: int = 0
    notify: Callable[[], None] | None = None
    prompt_logprobs: PromptPositions | None = None
    unread: collections.deque[tuple[list[int], list[float], int]] = dataclasses.field(
        default_factory=collections.deque[tuple[list[int], list[float], int]]
    )
    num_cached_tokens: int | None = None
    error: str | None = None
    refusal: QuireError | None = None
    death: QuireError | None = None
    prompt_logprobs_sent: bool = False
    pooled: Pooled | None = None
    scheduled_time: float = 0.0
    trace_headers: Mapping[str, str] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    copy: int = 0

    def begin(self) -> None:
        """Its sequences begin, as the core is given them."""
        self.sequences = [
            SequenceState(request, index, self.tokenizer) for index, request in enumerate(self.engine_requests)
        ]
        self.num_unfinished = len(self.sequences)
        self._begin_prompt_logprobs()

    def _begin_prompt_logprobs(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = FlatLogprobs() if self.params.flat_logprobs else []
            self.prompt_logprobs.append(None)
            self.unread.clear()

    @property
    def _has_all_prompt_logprobs(self) -> bool:
        """Whether none are missing: they have come, or were not asked for."""
        return self.prompt_logprobs is None or len(self.prompt_logprobs) + len(self.unread) >= len(
            self.prompt_token_ids
        )

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def note_cached(self, num_tokens: int) -> None:
        """So many tokens of the core's prompt were in the prefix cache. An adapter's virtual ones are none of the user's."""
        adapter = self.engine_requests[0].adapter
        self.num_cached_tokens = max(0, num_tokens - (0 if adapter is None else adapter.num_virtual_tokens))

    def fail(self, death: QuireError) -> None:
        """The engine has died: there will be no more."""
        self.death = death
        for sequence in self.sequences:
            sequence.is_plain = False

    def resumption(self) -> list[EngineRequest]:
        """What to give a new core so that every unfinished sequence goes on where it stopped: same prompt, parameters and
        seed, with the tokens emitted so far. Prompt logprobs of which a part came begin again."""
        if not self._has_all_prompt_logprobs:
            self._begin_prompt_logprobs()
        return [
            msgspec.structs.replace(request, resumed_token_ids=list(sequence.token_ids))
            for request, sequence in zip(self.engine_requests, self.sequences, strict=True)
            if sequence.finish_reason is None
        ]

    def append_prompt_logprobs(self, output: EngineCoreOutput) -> None:
        """Keep prompt logprobs as chunks of the prompt are computed (siblings with n > 1 repeat them: once is enough)."""
        told = output.prompt_logprobs
        if told is not None and not self._has_all_prompt_logprobs:  # a request that was sent again told them before
            self.unread.extend(zip(told.token_ids, told.logprobs, told.ranks, strict=True))

    def read_prompt_logprobs(self, most: int | None = None) -> None:
        """Make what users see of the prompt logprobs that have come: of all, or of so many positions."""
        positions = self.prompt_logprobs
        if positions is None:
            return
        for _ in range(len(self.unread) if most is None else min(most, len(self.unread))):
            token_ids, values, rank = self.unread.popleft()
            place = len(positions)
            before = self.prompt_token_ids[max(0, place - CONTEXT_TOKENS) : place]
            texts: Sequence[str | None] = [None] * len(token_ids)
            if self.tokenizer is not None and self.params.detokenize:
                texts = texts_at(self.tokenizer, before, token_ids)
            positions.append(build_position(token_ids, values, rank, texts))

    def build_output(self) -> AnyOutput | None:
        """What there is to tell since the last call; None when that is nothing (or not yet, for `FINAL_ONLY`)."""
        kind = self.params.output_kind
        is_finished = self.num_unfinished == 0
        if kind is RequestOutputKind.FINAL_ONLY and not is_finished:
            return None
        as_delta = kind is RequestOutputKind.DELTA
        if as_delta:
            completions = [sequence.build(True) for sequence in self.sequences if sequence.has_output()]
        elif any(sequence.has_output() for sequence in self.sequences):
            completions = [sequence.build(False) for sequence in self.sequences]
        else:
            completions = []
        if not completions:
            return None
        self.read_prompt_logprobs()
        prompt_logprobs = None if as_delta and self.prompt_logprobs_sent else self.prompt_logprobs
        self.prompt_logprobs_sent = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=completions,
            finished=is_finished,
            metrics=self._metrics(),
            lora_request=self.engine_requests[0].adapter,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            kv_transfer_params=self.kv_transfer_params,
        )

    def _metrics(self) -> RequestMetrics:
        if len(self.sequences) == 1:  # a streamed output a token: worth a microsecond
            only = self.sequences[0]
            last = only.last_token_time
            finished = 0.0 if self.num_unfinished else last
            count = len(only.token_ids)
            return RequestMetrics(self.arrival_time, only.first_token_time, last, finished, count, self.scheduled_time)
        firsts = [sequence.first_token_time for sequence in self.sequences if sequence.first_token_time]
        last = max(sequence.last_token_time for sequence in self.sequences)
        return RequestMetrics(
            arrival_time=self.arrival_time,
            first_token_time=min(firsts, default=0.0),
            last_token_time=last,
            finished_time=last if self.is_finished else 0.0,
            num_generation_tokens=sum(len(sequence.token_ids) for sequence in self.sequences),
            scheduled_time=self.scheduled_time,
        )


@dataclasses.dataclass(slots=True, eq=False)
class PoolingRecord(RequestRecord):
    """A pooling request: nothing is told of it before its end. `late_chunking`: what its vectors are of."""

    late_chunking: LateChunkingMetadata | None = None

    def build_output(self) -> PoolingRequestOutput[PoolingOutput] | None:
        """The pooled numbers; empty where the request was aborted or failed."""
        if self.num_unfinished or self.sequences[0].sent_finish:
            return None
        self.sequences[0].sent_finish = True
        values = np.zeros(0, np.float32) if self.pooled is None else self.pooled.to_array()
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(values),
            prompt_token_ids=self.prompt_token_ids,
            finished=True,
            num_cached_tokens=self.num_cached_tokens or 0,
            error=self.error,
            late_chunking=None if self.pooled is None else self.late_chunking,
        )
