"""What completions and chat share: running a request in the engine, counting its tokens and its time, noticing its failure."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from quire.engine.input_processor import TokenizedPrompt
from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.errors import error_of_finished
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.answers import ReasoningCount
from quire.entrypoints.openai.protocol import GenerationFields, Timing, Usage, build_usage
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams

ResultT = TypeVar("ResultT")


class QueuedFields(Protocol):
    """What every request that is queued has."""

    cache_salt: str | None
    priority: int | None


def salted(prompt: TokenizedPrompt, cache_salt: str | None) -> TokenizedPrompt:
    return prompt if cache_salt is None else dataclasses.replace(prompt, cache_salt=cache_salt)


def start_generation(
    state: ServerState,
    request: QueuedFields,
    prompt: TokenizedPrompt,
    params: SamplingParams | BeamSearchParams,
    public_id: str,
) -> AsyncIterator[RequestOutput]:
    """The engine's outputs for one prompt."""
    request_id = state.engine_request_id(public_id)
    prompt = salted(prompt, request.cache_salt)
    if isinstance(params, BeamSearchParams):
        return state.engine.beam_search(prompt, params, request_id)
    return state.engine.generate(prompt, params, request_id, priority=request.priority or 0)


async def open_generation(
    state: ServerState, request: QueuedFields, prompt: TokenizedPrompt, params: SamplingParams, request_id: str
) -> OutputStream:
    """The running request, by the engine's id of it, for a reader that wants to be called."""
    prompt = salted(prompt, request.cache_salt)
    return await state.engine.open_stream(prompt, params, request_id, priority=request.priority or 0)


async def all_of(runs: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """The results of what runs together. One that fails cancels the others, and its error is raised."""
    if len(runs) == 1:
        return [await runs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in runs]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def last_output(outputs: AsyncIterator[RequestOutput], public_id: str) -> RequestOutput:
    """The final output of a request that is not streamed."""
    final: RequestOutput | None = None
    async for output in outputs:
        check_output(output, public_id)
        final = output
    if final is None:
        raise error_of_finished(None, public_id)
    return final


def check_output(output: RequestOutput, public_id: str) -> None:
    """Raise when the engine ended the request with an error."""
    if output.error is not None or any(choice.finish_reason == "error" for choice in output.outputs):
        raise error_of_finished(output.error, public_id)


@dataclasses.dataclass(slots=True)
class TokenCount:
    """A running count of one request's tokens.

    Attributes:
        page: tokens of a page of the prefix cache; 0 where it is off, or several prompts are counted.
        times: of the parts that have ended; None where they are not asked for.
    """

    prompt: int = 0
    completion: int = 0
    cached: int | None = None
    details: bool = False
    thoughts: ReasoningCount | None = None
    page: int = 0
    times: list[RequestMetrics] | None = None

    def add_choice(self, choice: CompletionOutput) -> int:
        """Count an answer's new tokens; returns how many of them, which come first, are thoughts or their markers."""
        self.completion += len(choice.token_ids)
        return 0 if self.thoughts is None else self.thoughts.add(choice.index, choice.token_ids)

    @property
    def num_thoughts(self) -> int:
        """Tokens of reasoning; 0 where nobody can tell."""
        return 0 if self.thoughts is None else self.thoughts.total

    @property
    def created(self) -> int:
        """Prompt tokens that were computed and are now in the prefix cache, which keeps whole pages."""
        return max(0, self.prompt // self.page * self.page - (self.cached or 0)) if self.page else 0

    def usage(self) -> Usage:
        """As the protocol's usage block."""
        cached = (self.cached or 0) if self.details else None
        reasoning = None if self.thoughts is None else self.thoughts.total
        return build_usage(self.prompt, self.completion, cached, reasoning, self.created if self.page else None)

    def timing(self) -> Timing | None:
        """Where the time went; None where nobody asked."""
        return build_timing(self.times) if self.times else None

    def add_cached(self, output: RequestOutput) -> None:
        """Note the prefix cache's share, once it is known."""
        if output.num_cached_tokens is not None and output.num_cached_tokens >= 0:
            self.cached = max(self.cached or 0, output.num_cached_tokens)

    def add_times(self, output: RequestOutput) -> None:
        """Note when things happened to a part that has ended, if anybody asked."""
        if self.times is not None and output.finished and output.metrics is not None:
            self.times.append(output.metrics)


def page_size(state: ServerState) -> int:
    """Tokens of a page of the prefix cache; 0 where there is none."""
    cache = state.engine.config.cache
    return cache.block_size if cache.enable_prefix_caching else 0


def wants_timing(state: ServerState, request: GenerationFields) -> bool:
    """Whether the answer tells times: because the client asks, or the operator does."""
    asked = request.return_timing
    return state.settings.enable_per_request_metrics if asked is None else asked


def wants_usage(request: GenerationFields) -> tuple[bool, bool]:
    """Whether a stream ends with a usage chunk, and whether every chunk carries usage, which needs the former."""
    options = request.stream_options
    if options is None:
        return bool(request.return_timing), False
    include = bool(options.include_usage)
    return include or bool(request.return_timing), include and bool(options.continuous_usage_stats)


def build_timing(parts: Sequence[RequestMetrics]) -> Timing:
    """The times of a request, or of its parts (several prompts) together: from the first arrival to the last token."""
    arrival = min(part.arrival_time for part in parts)
    scheduled = min((part.scheduled_time for part in parts if part.scheduled_time), default=None)
    first = min((part.first_token_time for part in parts if part.first_token_time), default=None)
    last = max(max(part.last_token_time, part.finished_time, arrival) for part in parts)
    tokens = sum(part.num_generation_tokens for part in parts)
    timing = Timing(queue_time_ms=_milliseconds(arrival, scheduled), generation_time_ms=_milliseconds(first, last))
    timing.time_to_first_token_ms = _milliseconds(scheduled, first)
    if timing.generation_time_ms is not None and tokens > len(parts):
        timing.mean_itl_ms = round(timing.generation_time_ms * len(parts) / (tokens - len(parts)), 3)
    if scheduled is not None and last > scheduled:
        timing.tokens_per_second = round(tokens / (last - scheduled), 2)
    return timing


def _milliseconds(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(max(0.0, end - begin) * 1e3, 3)
