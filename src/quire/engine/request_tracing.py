"""From requests' records to spans: attributes, the caller's trace, and the timeline as events.

A span is built when its request has ended, on the event loop, after the core was asked for the timeline; it is sent elsewhere.
Also the lines of the log about single requests, which leave texts out unless the operator asks for them (`log_prompts`): a log is
read by more people than an answer is.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from quire.config import ObservabilityConfig
from quire.engine.request_record import RequestRecord, SequenceState
from quire.errors import QuireError
from quire.logger import init_logger
from quire.metrics.engine_metrics import FinishedRequest
from quire.metrics.spans import TRACE_HEADERS, RequestSpan, SpanWriter

logger = init_logger(__name__)

_SHOWN = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "ignore_eos"),
    *("logprobs", "prompt_logprobs"),
)
"""Parameters that hold numbers, and nothing that a user wrote."""


_MARKER = re.compile(r"<\|[^|>]*\|>")
"""A chat template's marker, such as `<|im_start|>`."""
WORDS_KEPT, WORDS_LENGTH = 200, 80


class RequestLog:
    """Writes the lines that the configuration asks for.

    Attributes:
        first_words: how the last prompts began, by request, where lines may hold texts.
    """

    def __init__(self, config: ObservabilityConfig) -> None:
        self._shows_texts = config.log_prompts
        self._limit = config.max_log_len
        self._logs_requests = config.enable_log_requests
        self._logs_outputs = config.enable_log_outputs
        self.first_words: dict[str, str] = {}

    @staticmethod
    def of(config: ObservabilityConfig) -> "RequestLog | None":
        """A log, where any line is wanted."""
        return RequestLog(config) if config.enable_log_requests or config.enable_log_outputs else None

    def received(self, record: RequestRecord) -> None:
        if not self._logs_requests:
            return
        if self._shows_texts and record.prompt is not None:
            self._remember(record, record.prompt)
        fields: dict[str, Any] = {"prompt_tokens": len(record.prompt_token_ids)}
        defaults = type(record.params)()
        for name in _SHOWN:
            value = getattr(record.params, name)
            if value != getattr(defaults, name):
                fields[name] = value
        salt, priority = record.engine_requests[0].cache_salt, record.engine_requests[0].priority
        if salt is not None:
            fields["has_cache_salt"] = True
        if priority:
            fields["priority"] = priority
        self._write("received", record, fields, "prompt", record.prompt, record.prompt_token_ids)

    def _remember(self, record: RequestRecord, prompt: str) -> None:
        length = WORDS_LENGTH if self._limit is None else min(self._limit, WORDS_LENGTH)
        words = " ".join(_MARKER.sub(" ", prompt[: 4 * WORDS_LENGTH]).split())[:length]
        self.first_words |= {request.request_id: words for request in record.engine_requests}
        while len(self.first_words) > WORDS_KEPT:
            del self.first_words[next(iter(self.first_words))]

    def ended(self, record: RequestRecord, sequence: SequenceState, finished: FinishedRequest) -> None:
        if not self._logs_outputs:
            return
        fields: dict[str, Any] = {"index": sequence.index} if len(record.sequences) > 1 else {}
        fields |= {"output_tokens": finished.num_generation_tokens, "finish_reason": finished.finish_reason}
        if finished.time_to_first_token is not None:
            fields["first_token_s"] = round(finished.time_to_first_token, 4)
        if finished.end_to_end is not None:
            fields["total_s"] = round(finished.end_to_end, 4)
        text = None
        if self._shows_texts and record.tokenizer is not None:
            limit = (
                len(sequence.token_ids) if self._limit is None else self._limit + 1
            )  # a token has a character or more
            text = record.tokenizer.decode(sequence.token_ids[:limit], skip_special_tokens=True)
        self._write("ended", record, fields, "output", text, sequence.token_ids)

    def _write(
        self,
        event: str,
        record: RequestRecord,
        fields: dict[str, Any],
        kind: str,
        text: str | None,
        token_ids: list[int],
    ) -> None:
        if self._shows_texts:
            if text is None:
                fields[f"{kind}_token_ids"] = token_ids[: self._limit]
            else:
                fields[kind] = text[: self._limit]
                if len(fields[kind]) < len(text):
                    fields[f"{kind}_is_cut"] = True
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        extra = {"fields": {"event": f"request_{event}", "request_id": record.request_id, **fields}}
        logger.info("request %s %s: %s", record.request_id, event, shown, extra=extra)


Timeline = dict[str, Any]


class RequestTracing:
    """Follows requests and writes a span for each.

    Args:
        model_name: in every span.
        timeline: asks the core what happened to a request of its own.
    """

    def __init__(
        self, writer: SpanWriter, model_name: str, timeline: Callable[[str], Awaitable[Timeline | None]]
    ) -> None:
        self._writer = writer
        self._model_name = model_name
        self._timeline = timeline
        self._tasks: set[asyncio.Task[None]] = set()

    def received(self, record: RequestRecord, trace_headers: Mapping[str, str] | None = None) -> None:
        """A request was queued, with its caller's headers, or in the context of the HTTP request that it came with."""
        record.trace_headers = TRACE_HEADERS.get() if trace_headers is None else trace_headers

    def ended(self, record: RequestRecord, sequence: SequenceState, finished: FinishedRequest) -> None:
        """A sequence has ended; a request ends with its last one."""
        del sequence
        if record.num_unfinished:
            return
        span = build_span(record, finished, self._model_name)
        try:
            task = asyncio.get_running_loop().create_task(self._write(span, record.sequences[0].core_id))
        except RuntimeError:  # no loop runs any more
            self._writer.write(span)
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, span: RequestSpan, core_id: str) -> None:
        try:
            add_timeline(span, await self._timeline(core_id))
        except QuireError:  # the engine died: the span tells what is known here
            pass
        finally:
            self._writer.write(span)

    def shutdown(self) -> None:
        """Send what is left."""
        self._writer.shutdown()


def build_span(record: RequestRecord, finished: FinishedRequest, model_name: str) -> RequestSpan:
    """The span of a request that has just ended, without its timeline."""
    now, params = time.time(), record.params
    elapsed = finished.end_to_end or 0.0
    firsts = [one.first_token_time for one in record.sequences if one.first_token_time]
    first = min(firsts) - record.arrival_time if firsts else None
    scheduled = finished.scheduled
    attributes: dict[str, Any] = {
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.usage.num_sequences": len(record.sequences),
        "gen_ai.usage.prompt_tokens": len(record.prompt_token_ids),
        "gen_ai.usage.completion_tokens": sum(len(one.token_ids) for one in record.sequences),
        "gen_ai.usage.cached_tokens": record.num_cached_tokens,
        "gen_ai.response.finish_reasons": [one.finish_reason or "" for one in record.sequences],
        "gen_ai.latency.time_in_queue": scheduled,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.e2e": elapsed,
        "gen_ai.latency.time_in_model_prefill": None if first is None or scheduled is None else first - scheduled,
        "gen_ai.latency.time_in_model_decode": None if first is None else elapsed - first,
        "gen_ai.latency.time_in_model_inference": None if scheduled is None else elapsed - scheduled,
    }
    begin = int((now - elapsed) * 1e9)
    return RequestSpan(begin, int(now * 1e9), attributes, [], record.trace_headers, record.error)


def add_timeline(span: RequestSpan, timeline: Timeline | None) -> None:
    """What the core knows: events, and where the prompt left the prefix cache."""
    if timeline is None:
        return
    for event in timeline["events"]:
        at = min(max(span.begin_ns + int(event["t_s"] * 1e9), span.begin_ns), span.end_ns)
        span.events.append((at, event["kind"], event["detail"]))
    prefix = timeline["prefix"]
    span.attributes["quire.prefix.hit_tokens"] = prefix["hit_tokens"]
    span.attributes["quire.prefix.why"] = prefix["why"]
