"""What every protocol's request becomes: a checked generation, which runs in the engine and counts its tokens and its time."""

import asyncio
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

from quire.engine.caller import RequestOptions
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.errors import error_of_finished
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.answers import ReasoningCount
from quire.entrypoints.openai.protocol import QueuedFields, Timing, Usage, build_usage
from quire.entrypoints.openai.sampling import OWN_FORM, naming_form
from quire.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams

ResultT = TypeVar("ResultT")


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

    def add_output(self, output: RequestOutput) -> None:
        """Note the prefix cache's share, once it is known, and the times of a part that has ended."""
        if output.num_cached_tokens is not None and output.num_cached_tokens >= 0:
            self.cached = max(self.cached or 0, output.num_cached_tokens)
        if self.times is not None and output.finished and output.metrics is not None:
            self.times.append(output.metrics)

    def add_choice(self, choice: CompletionOutput) -> int:
        """Count an answer's new tokens; returns how many of them, which come first, are thoughts or their markers."""
        self.completion += len(choice.token_ids)
        return 0 if self.thoughts is None else self.thoughts.add(choice.index, choice.token_ids)

    @property
    def num_thoughts(self) -> int:
        """Tokens of reasoning; 0 where they cannot be told apart."""
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
        """Where the time went; None where the request does not ask for it."""
        return total_timing([self])


RequestT = TypeVar("RequestT", bound=QueuedFields)


@dataclasses.dataclass(kw_only=True, slots=True)
class Generation(Generic[RequestT]):
    """A checked request, ready to run; of a request with several prompts, one of them.

    Attributes:
        public_id: the id in the answer. The engine has one of its own, `request_id`.
        resumed: tokens that were made before; the first output has them again.
        form: the field in which the client has said what form the answer has.
    """

    state: ServerState
    request: RequestT
    prompt: TokenizedPrompt
    params: SamplingParams | BeamSearchParams
    public_id: str
    model: str
    count: TokenCount
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    request_id: str = ""
    resumed: list[int] = dataclasses.field(default_factory=list[int])
    form: str = OWN_FORM

    def __post_init__(self) -> None:
        self.request_id = self.state.engine_request_id(self.public_id)
        self.count.prompt = len(self.prompt.token_ids)
        if self.request.cache_salt is not None:
            self.prompt = dataclasses.replace(self.prompt, cache_salt=self.request.cache_salt)

    @property
    def num_choices(self) -> int:
        """Answers that the engine gives."""
        return self.params.n if isinstance(self.params, SamplingParams) else self.params.beam_width

    async def open(self) -> OutputStream:
        """Queue a request whose answer is streamed."""
        assert isinstance(self.params, SamplingParams)
        engine, options = self.state.engine, RequestOptions(priority=self.request.priority or 0)
        if self.resumed:
            options["resumed_token_ids"] = self.resumed
        with naming_form(self.form):
            return await engine.open_stream(self.prompt, self.params, self.request_id, **options)

    async def finish(self) -> RequestOutput:
        """The final output of a request that is not streamed. Raises HTTPError if the engine ends it with an error."""
        engine, final, priority = self.state.engine, None, self.request.priority or 0
        if isinstance(self.params, BeamSearchParams):
            outputs = engine.beam_search(self.prompt, self.params, self.request_id, priority=priority)
        else:
            outputs = engine.generate(self.prompt, self.params, self.request_id, priority=priority)
        with naming_form(self.form):
            async for output in outputs:
                self.note(output)
                final = output
        if final is None:
            raise error_of_finished(None, self.public_id)
        return final

    def note(self, output: RequestOutput) -> None:
        """Take from an output what all protocols count. Raises HTTPError if the engine ended the request with an error."""
        if output.error is not None or any(choice.finish_reason == "error" for choice in output.outputs):
            raise error_of_finished(output.error, self.public_id)
        self.count.add_output(output)


async def all_of(runs: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """The results of what runs together. If one fails, the others are cancelled and its error is raised."""
    if len(runs) == 1:
        return [await runs[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run) for run in runs]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def new_count(state: ServerState, return_timing: bool | None) -> TokenCount:
    """A count before there are any tokens. The operator chooses what it tells, and whether times are told unless the
    request says so (`return_timing`)."""
    settings = state.settings
    timed = settings.enable_per_request_metrics if return_timing is None else return_timing
    return TokenCount(details=settings.enable_prompt_tokens_details, times=[] if timed else None)


def total_timing(counts: Sequence[TokenCount]) -> Timing | None:
    """The times of a request of several parts; None where the request does not ask for them."""
    times = [part for count in counts for part in count.times or ()]
    return build_timing(times) if times else None


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The usage of a request of several parts."""
    details = [usage.prompt_tokens_details for usage in usages if usage.prompt_tokens_details]
    thoughts = [usage.completion_tokens_details for usage in usages if usage.completion_tokens_details]
    tells_created = bool(details) and details[0].created_cache_tokens is not None
    return build_usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(each.cached_tokens for each in details) if details else None,
        sum(each.reasoning_tokens for each in thoughts) if thoughts else None,
        sum(each.created_cache_tokens or 0 for each in details) if tells_created else None,
    )


def page_size(state: ServerState) -> int:
    """Tokens of a page of the prefix cache; 0 where there is none."""
    cache = state.engine.config.cache
    return cache.block_size if cache.enable_prefix_caching else 0


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
