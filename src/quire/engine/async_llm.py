"""The asynchronous engine: `async for output in engine.generate(…)`.

The core runs in a thread or a process of its own. Its messages come into the event loop together, and readers are called from
there (`request_stream.py`), after the outputs of all steps that have come.
"""

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Unpack

from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine import messages
from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import AsyncEngineArgs, EngineArgs
from quire.engine.beam_search import BeamSearch, BeamSearches
from quire.engine.caller import CALLER, Caller, RequestOptions, asking, check_copy, check_options, merge_caller
from quire.engine.control import NOTED, AsyncControl
from quire.engine.core_client import CoreClient
from quire.engine.frontend import Frontend
from quire.engine.input_processor import TokenizedPrompt, check_params
from quire.engine.output_processor import StatsHook
from quire.engine.process_client import open_client
from quire.engine.queue_view import QueueView
from quire.engine.request_record import RequestRecord
from quire.engine.request_stream import RequestStream
from quire.engine.request_tracing import RequestLog, RequestTracing
from quire.engine.router import FrontendSlot, RoutedClient, first_serial
from quire.engine.tokenization import Tokenization
from quire.errors import CapacityError, DeadlineError, EngineDeadError, EngineError, QuireError, RequestError
from quire.inputs import PromptType
from quire.logger import init_logger
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.events import EventKind
from quire.metrics.spans import SpanWriter
from quire.outputs import AnyOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from quire.pooling_params import PoolingParams
from quire.request import EngineCoreOutputs
from quire.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from quire.tokenizers.interface import Tokenizer

logger = init_logger(__name__)

INLINE_CHARACTERS = 8192
"""Texts up to this length are tokenized on the event loop (about 1 ms); longer ones in a thread."""

POSITIONS_AT_ONCE = 256
"""Prompt logprobs of so many positions are made ready before the event loop looks at everything else again (2 ms)."""

ADD_WITHIN_S = 0.001
"""Requests that arrive together travel to the core together, but none waits longer than this for the next."""


class AsyncLLM(Frontend[CoreClient], AsyncControl):
    """Generates for many readers at once, on one event loop at a time.

    Args:
        config: the engine's.
        core: `inproc` (a thread), `process`, None to let the device decide, or a slot at the router of a core that another
            process runs.
        stat_hooks: told about steps, tokens and finished requests, besides the engine's own `metrics`.

    Raises:
        ConfigError: the model or its tokenizer cannot be used.
        EngineDeadError: the core died while it started.
    """

    def __init__(
        self, config: EngineConfig, *, core: str | FrontendSlot | None = None, stat_hooks: Sequence[StatsHook] = ()
    ) -> None:
        self._to_add: list[RequestRecord] = []
        self._add_since = 0.0
        self._inbox: collections.deque[messages.CoreMessage] = collections.deque()
        self._is_waking = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._restarting = self._stalled = ""
        self.on_death: Callable[[], None] | None = None
        """Called when the core dies, in any thread, and maybe twice."""
        self._is_shut_down = False
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._idle_waiters: list[asyncio.Future[None]] = []
        bounds = config.observability.custom_histogram_buckets
        self.metrics = EngineMetrics(config.model.model, config.model.max_model_len, bounds)

        def start_core() -> CoreClient:
            if isinstance(core, FrontendSlot):
                return RoutedClient(core, self._on_message)
            return open_client(config, core, self._on_message)

        self.queue = QueueView(config.scheduler, config.parallel.data_parallel_size)
        super().__init__(config, start_core, self.metrics, stat_hooks, for_server=True)
        if isinstance(core, FrontendSlot):
            self.input_processor.distinguish(first_serial())
        self._request_log = RequestLog.of(config.observability)
        if self._request_log is not None:
            self._outputs.on_end.append(self._request_log.ended)
        self._tracing: RequestTracing | None = None
        endpoint = config.observability.otlp_traces_endpoint
        if endpoint is not None:
            model_name = (config.model.served_model_name or (config.model.model,))[0]
            self._tracing = RequestTracing(SpanWriter(endpoint), model_name, self.timeline)
            self._outputs.on_end.append(self._tracing.ended)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: UsageContext | None = None,
        stat_loggers: Sequence[StatsHook] | None = None,
        *,
        core: str | None = None,
    ) -> "AsyncLLM":
        """An engine from users' wishes. `start_engine_loop` is accepted and has no meaning: the core always runs."""
        return cls(engine_args.create_engine_config(usage_context), core=core, stat_hooks=stat_loggers or ())

    @classmethod
    def from_engine_config(
        cls, config: EngineConfig, stat_loggers: Sequence[StatsHook] | None = None, *, core: str | None = None
    ) -> "AsyncLLM":
        """An engine from a configuration that is resolved."""
        return cls(config, core=core, stat_hooks=stat_loggers or ())

    # --- generating ---

    async def generate(
        self,
        prompt: PromptType | TokenizedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request, as `sampling_params.output_kind` says. Closing the generator aborts the request.
        Raises RequestError: it cannot be served; nothing was queued.
        Raises CapacityError: the queue is full, or the engine sleeps.
        Raises EngineDeadError: the core has died."""
        check_params(sampling_params, SamplingParams, "sampling_params")
        stream = await self.open_stream(prompt, sampling_params, request_id, **options)
        async with contextlib.aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                if isinstance(output, RequestOutput):
                    yield output

    async def open_stream(
        self,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> RequestStream:
        """Queue a request; for a reader that wants to be called rather than to wait. It must be closed.
        Raises RequestError: it cannot be served; nothing was queued.
        Raises EngineDeadError: the core has died."""
        self._check_alive()
        check_options(options)
        with asking(options.get("lora_request")):
            return await self._open(prompt, params, request_id, options)

    async def _open(
        self,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str,
        options: RequestOptions,
    ) -> RequestStream:
        arrival_time = options.get("arrival_time")
        if arrival_time is None:
            arrival_time = time.monotonic()
        tokenization = Tokenization.of(options.get("tokenization_kwargs"))
        tokenized = await self._tokenize(prompt, params, tokenization)
        constraint: StructuredOutputsParams | None = getattr(params, "structured_outputs", None)
        if constraint is not None and not self.input_processor.knows_grammar(constraint):
            await asyncio.to_thread(self.input_processor.check_grammar, constraint)
        record = self.process(
            request_id,
            tokenized,
            params,
            tokenization,
            prompt_text=options.get("prompt_text"),
            arrival_time=arrival_time,
            priority=options.get("priority", 0),
        )
        if resumed := options.get("resumed_token_ids"):
            (request,) = record.engine_requests
            request.resumed_token_ids = list(resumed)
        return self._queue(record, self._caller(options, arrival_time), options.get("trace_headers"))

    def _caller(self, options: RequestOptions, arrival_time: float) -> Caller:
        return merge_caller(options, arrival_time, self.config.scheduler.request_timeout)

    def _queue(
        self, record: RequestRecord, caller: Caller, trace_headers: Mapping[str, str] | None = None
    ) -> RequestStream:
        self._use_running_loop()
        self._check_alive()
        self.input_processor.attach(record.engine_requests, caller.adapter)
        check_copy(caller.copy, self.config.parallel.data_parallel_size)
        now = time.monotonic()
        if 0.0 < caller.deadline <= now:
            raise DeadlineError("the request's timeout has passed before it was queued")
        for request in record.engine_requests:
            request.tenant, request.tenant_weight, request.deadline = caller.tenant, caller.weight, caller.deadline
            request.is_background, request.copy = caller.is_background, caller.copy
        self._outputs.add(record)
        stream = RequestStream(record, self._abort)
        self._to_add.append(record)
        if caller.deadline:
            stream.timer = asyncio.get_running_loop().call_later(caller.deadline - now, self._expire, record)
        if len(self._to_add) == 1:
            self._add_since = now
            asyncio.get_running_loop().call_soon(self._send_added)
        elif now - self._add_since > ADD_WITHIN_S:
            self._send_added()
        if self._request_log is not None:
            self._request_log.received(record)
        if self._tracing is not None:
            self._tracing.received(record, trace_headers)
        return stream

    @property
    def first_words(self) -> dict[str, str]:
        """How the last prompts began, by request; none where the log may not show them."""
        return {} if self._request_log is None else self._request_log.first_words

    def _expire(self, record: RequestRecord) -> None:
        """A request has run out of time, wherever it is."""
        if not record.is_finished:
            seconds = time.monotonic() - record.arrival_time
            record.refusal = DeadlineError(f"the request did not end within its timeout: {seconds:.3g} s have passed")
            self.events.add(EventKind.DEADLINE, f"request {record.request_id} ran out of time")
            self._abort([record.request_id])

    def check_queue(self, num_preparing: int = 0) -> None:
        """Raises CapacityError where another request of this caller would be refused, of which nothing is known yet.

        Args:
            num_preparing: requests that will come before it.
        """
        self.queue.check(CALLER.get().tenant, len(self._outputs) + num_preparing)

    def _send_added(self) -> None:
        """Give the core what was queued since the last time, in one message; one by one where something cannot be sent."""
        if self._restarting:
            return
        records = [record for record in self._to_add if not record.is_finished]
        self._to_add.clear()
        if not records or self._dead is not None:
            return
        try:
            self._client.send(
                messages.AddRequests([request for record in records for request in record.engine_requests])
            )
        except QuireError:
            for record in records:
                self._send_alone(record)

    def _send_alone(self, record: RequestRecord) -> None:
        try:
            self._client.send(messages.AddRequests(record.engine_requests))
        except QuireError as error:
            self._outputs.discard(record.request_id)
            record.refusal, record.num_unfinished = error, 0
            self._notify([record])

    async def _tokenize(
        self,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        tokenization: Tokenization,
    ) -> TokenizedPrompt:
        """A prompt as token ids; a long text is tokenized in a thread."""
        if not isinstance(prompt, TokenizedPrompt) and self.input_processor.needs_tokenizer(prompt) > INLINE_CHARACTERS:
            return await asyncio.to_thread(self.tokenize, prompt, params, tokenization)
        return self.tokenize(prompt, params, tokenization)

    async def beam_search(
        self, prompt: PromptType | TokenizedPrompt, params: BeamSearchParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """One final output with `beam_width` sequences, best first.
        Raises RequestError: it cannot be served.
        Raises EngineDeadError: the core has died."""
        self._check_alive()
        tokenized = await self._tokenize(prompt, SamplingParams(), Tokenization())
        caller = self._caller({}, time.monotonic())
        search = BeamSearch(self.config.model, self.tokenizer_source.get(), tokenized, params, priority)
        ids = (f"{request_id}.{number}" for number in itertools.count())
        searches = BeamSearches([search], self.input_processor, ids)
        while requests := searches.next_requests():
            tasks = [asyncio.ensure_future(self._final(self._queue(record, caller))) for record in requests]
            try:
                searches.advance(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
        yield search.result(request_id)

    @staticmethod
    async def _final(stream: RequestStream) -> RequestOutput:
        last: AnyOutput | None = None
        async with contextlib.aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                last = output
        assert isinstance(last, RequestOutput)
        return last

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, and try it with one token; requests that come soon find it loaded.
        Raises RequestError: it cannot be used."""
        name, prompt, params = self._trial(lora_request)
        stream = await self.open_stream(prompt, params, name, lora_request=lora_request)
        async with contextlib.aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                if output.error is not None:
                    raise RequestError(output.error, param="lora_request")
        return True

    async def encode(
        self,
        prompt: PromptType | TokenizedPrompt,
        pooling_params: PoolingParams,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The one output of a pooling request. Closing the generator aborts it.
        Raises RequestError: it cannot be served; nothing was queued.
        Raises CapacityError: the queue is full, or the engine sleeps.
        Raises EngineDeadError: the core has died.
        Raises EngineError: its computation failed."""
        check_params(pooling_params, PoolingParams, "pooling_params")
        stream = await self.open_stream(prompt, pooling_params, request_id, **options)
        async with contextlib.aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                if isinstance(output, PoolingRequestOutput):
                    if output.error is not None:
                        raise EngineError(output.error)
                    yield output

    async def abort(self, request_id: str | Sequence[str], internal: bool = False) -> None:
        """End requests; their generators give a last output with finish reason `abort`. Unknown ids are ignored. `internal` has
        no meaning: there is one kind of ids."""
        del internal
        self._abort([request_id] if isinstance(request_id, str) else request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        records, core_ids = self._outputs.abort(request_ids, time.monotonic())
        if core_ids and self._dead is None:
            self._send_added()  # what is aborted must have come before
            self._client.send(messages.AbortRequests(core_ids))
        self._notify(records)
        self._tell_idle_waiters()

    # --- the core's messages ---

    def _use_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._handle_inbox()  # what came while no loop ran

    def _on_message(self, message: messages.CoreMessage) -> None:
        """In the core's or the listener's thread: keep the message and wake the event loop, once for all that wait."""
        self._inbox.append(message)
        if self._loop is None and isinstance(message, messages.Dead):  # nothing was asked yet: no loop would look
            self._die(message.message)
        if not self._is_waking and self._loop is not None:
            self._is_waking = True
            try:
                self._loop.call_soon_threadsafe(self._handle_inbox)
            except RuntimeError:  # the loop is closed: its readers are gone
                self._is_waking = False

    def _handle_inbox(self) -> None:
        """In the event loop: everything that came. Steps that came together are told of together."""
        self._is_waking = False
        touched: list[RequestRecord] = []
        while self._inbox:
            message = self._inbox.popleft()
            match message:
                case messages.Outputs(outputs=outputs):
                    touched += self._take_in(outputs)
                case messages.UtilityResult(call_id=call_id):
                    self._resolve_call(call_id, message)
                case messages.Dead(message=text):
                    self._die(text)
                case messages.Stalled(message=text):
                    self._stall(text)
                case messages.Restarting(message=text, is_whole=is_whole):
                    self._lose_core(text, is_whole)
                case messages.GivenUp():
                    touched += self._give_up(message)
                case messages.Restarted(core_ids=core_ids):
                    self._restarting = ""
                    self.queue.forget()
                    self._send_again(core_ids, but={record.request_id for record in self._to_add})
                    self._send_added()
                case _:
                    pass
        self._notify(touched)
        self._log_stats()
        self._tell_idle_waiters()

    def _take_in(self, outputs: EngineCoreOutputs) -> list[RequestRecord]:
        """A step's outputs: the requests that have new ones. Where they cannot be read, the engine ends: its readers
        would wait for ever."""
        self.queue.state = outputs.queue or self.queue.state
        for output in outputs.outputs:
            if output.refusal is not None and output.refusal.is_late:
                self.events.add(EventKind.DEADLINE, f"request {output.request_id}: {output.error}")
        try:
            touched, aborts = self._outputs.process(outputs, time.monotonic())
            if aborts:
                self._client.send(messages.AbortRequests(aborts))
        except Exception as error:
            logger.exception("The engine core's outputs cannot be read.")
            self._die(f"its outputs could not be read: {error}")
            return []
        return touched

    def _stall(self, reason: str) -> None:
        self._stalled = reason
        if reason:
            self.events.add(EventKind.HANG, reason)

    def _lose_core(self, message: str, is_whole: bool) -> None:
        """The core has died and another one is started. Callers get an error; requests wait. Where copies of it go on, only
        its requests do, and its client answers the callers."""
        self._stalled = ""
        self.events.add(EventKind.RESTART, message)
        if not is_whole:
            return
        self._restarting = message
        self._fail_calls(EngineError(f"the engine core died and is started again: {message}"))

    def _notify(self, records: Sequence[RequestRecord]) -> None:
        """Readers are called; one that fails harms no other. Long prompt logprobs are made ready first, bit by bit."""
        for record in records:
            if record.notify is None:
                continue
            record.read_prompt_logprobs(POSITIONS_AT_ONCE)
            if record.unread and self._loop is not None:
                self._loop.call_soon(self._notify, (record,))
                continue
            try:
                record.notify()
            except Exception:
                logger.exception("The reader of %s failed.", record.request_id)

    def _resolve_call(self, call_id: int, result: messages.UtilityResult) -> None:
        future = self._calls.pop(call_id, None)
        if future is None or future.done():
            return
        try:
            future.set_result(result.get())
        except QuireError as error:
            future.set_exception(error)

    def _die(self, message: str) -> None:
        """The core has ended: every reader and caller gets the error."""
        if self._dead is not None:
            return
        self._dead = EngineDeadError(message)
        if not self._is_shut_down:
            logger.error("the engine is dead: %s", message)
        for record in self._outputs.records:
            record.fail(self._dead)
        self._notify(self._outputs.records)
        self._fail_calls(EngineDeadError(message))
        if self.on_death is not None:
            self.on_death()

    def end_requests(self, error: QuireError) -> None:
        """End all requests: their readers get what has come, and then the error."""
        records = self._outputs.records
        for record in records:
            record.fail(error)
        self._notify(records)

    def _fail_calls(self, error: QuireError) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # --- health ---

    @property
    def is_running(self) -> bool:
        """Whether the engine serves: it has neither died nor been shut down."""
        return self._dead is None and not self._is_shut_down

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended, in whatever way."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self._dead is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """What ended the engine."""
        return self._dead or EngineDeadError("the engine is not dead")

    async def check_health(self) -> None:
        """Raises EngineDeadError when the core makes no progress or has died, also while another one is started."""
        self._check_alive()
        if self._stalled:
            raise EngineDeadError(self._stalled)
        if self._restarting:
            raise EngineDeadError(f"the engine core is started again: {self._restarting}")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead
        if self._is_shut_down:
            raise EngineDeadError("the engine was shut down")

    async def wait_for_requests_to_drain(self, drain_timeout: float | None = None) -> None:
        """Return when no request is unfinished. Raises TimeoutError: that took longer than `drain_timeout` seconds."""
        self._use_running_loop()
        if not len(self._outputs) or self._dead is not None:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle_waiters.append(waiter)
        await asyncio.wait_for(waiter, drain_timeout)

    def _tell_idle_waiters(self) -> None:
        if self._idle_waiters and (not len(self._outputs) or self._dead is not None):
            for waiter in self._idle_waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._idle_waiters.clear()

    # --- utilities ---

    async def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of the core and wait for its value."""
        self._check_alive()
        self._use_running_loop()
        if self._restarting:
            raise CapacityError(f"the engine core is started again: {self._restarting}", retry_after=1.0)
        self._num_calls += 1
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[self._num_calls] = future
        self._send_added()
        self._client.send(messages.UtilityCall(self._num_calls, utility, list(args), kwargs))
        value = await future
        if utility in NOTED:
            self.events.add(EventKind.CONTROL, " ".join([utility, *map(str, (*args, *kwargs.values()))])[:200])
        return value

    async def is_tracing_enabled(self) -> bool:
        """Whether a span is written for each request."""
        return self._tracing is not None

    async def do_log_stats(self) -> None:
        """Write the log line with throughput and load, if it is time for one."""
        self._log_stats()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: `generate`, or what it pools."""
        return self._supported_tasks()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, None where the engine works on token ids alone."""
        return self.tokenizer_source.get()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the core; unfinished requests get `EngineDeadError`. May be called twice, from any thread."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        self._client.shutdown()
        if self._tracing is not None:
            self._tracing.shutdown()


AsyncLLMEngine = AsyncLLM

__all__ = ["AsyncEngineArgs", "AsyncLLM", "AsyncLLMEngine"]
