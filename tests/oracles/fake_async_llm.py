"""A stand-in for the asynchronous engine: bytes are tokens, the answer is the prompt's bytes in upper case, again and again.

Tests hold it back with `gate`, let it fail with `failure`, and see what was aborted.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from quire.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    HFConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire.engine.caller import CALLER, Caller
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.queue_view import QueueView
from quire.engine.request_stream import OutputStream, no_text
from quire.logprobs import Logprob
from quire.metrics.engine_metrics import EngineMetrics
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizers.chat_template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>"
    "{% endfor %}{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% if shout %}!{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class ByteTokenizer:
    """One token a byte; no special tokens, but id 256 before a text that asks for them."""

    token_bytes = None
    special_ids = frozenset({256})

    def __init__(self) -> None:
        self.template = ChatTemplate(TEMPLATE)

    def id_to_token(self, token_id: int) -> str | None:
        return None if token_id == 256 else chr(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([256] if add_special_tokens else []) + list(text.encode())

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return [chr(token) for token in ids]

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> str:
        template = ChatTemplate.choose(self.template, kwargs.pop("chat_template", None))
        known = {key: kwargs.pop(key) for key in ("tools", "documents", "add_generation_prompt")}
        known["continue_final_message"] = kwargs.pop("continue_final_message")
        return template.render(conversation, variables=kwargs, **known)


def engine_config(max_model_len: int = 512, **model: Any) -> EngineConfig:
    """A configuration around no model at all."""
    return EngineConfig(
        model=ModelConfig(
            model="fake",
            path="fake",
            hf_config=HFConfig({"vocab_size": 257}),
            tokenizer="fake",
            tokenizer_path="fake",
            dtype="float32",
            max_model_len=max_model_len,
            architecture="Fake",
            **model,
        ),
        cache=CacheConfig(),
        parallel=ParallelConfig(),
        scheduler=SchedulerConfig(),
        device=DeviceConfig(),
        load=LoadConfig(),
        attention=AttentionConfig(),
        observability=ObservabilityConfig(),
    )


class FakeStream(OutputStream):
    """What a generator gives, which goes on when that was taken."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        self.take_text = no_text
        self._notify = None
        self._ready: deque[RequestOutput | Exception] = deque()
        self._taken = asyncio.Event()
        self._task = asyncio.ensure_future(self._drain(outputs))

    async def _drain(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    self._put(output)
                    await self._taken.wait()
            except Exception as error:
                self._put(error)

    def _put(self, news: RequestOutput | Exception) -> None:
        self._ready.append(news)
        self._taken.clear()
        if self._notify is not None:
            self._notify()

    def push_to(self, on_output: Callable[[], None]) -> None:
        self._notify = on_output

    def take(self) -> RequestOutput | None:
        if not self._ready:
            return None
        news = self._ready.popleft()
        self._taken.set()
        if isinstance(news, Exception):
            raise news
        self.is_over = news.finished
        return news

    def close(self) -> None:
        self._task.cancel()


def _shown(prompt: TokenizedPrompt) -> dict[str, Any]:
    """A prompt as a dict, without what it does not have."""
    fields = {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text, "cache_salt": prompt.cache_salt}
    return {name: value for name, value in fields.items() if value is not None}


class FakeAsyncLLM:
    """`AsyncLLM`'s face, without an engine."""

    def __init__(self, config: EngineConfig | None = None, tokenizer: ByteTokenizer | None = None) -> None:
        self.config = config or engine_config()
        self.tokenizer = None if self.config.model.skip_tokenizer_init else tokenizer or ByteTokenizer()
        self.metrics = EngineMetrics("fake", 512)
        self.first_words: dict[str, str] = {}
        self.events = self.metrics.events
        self.errored = False
        self.on_death: Callable[[], None] | None = None
        self.failure: Exception | None = None
        self.fail_after = 0
        self.gate: asyncio.Semaphore | None = None
        self.started: list[tuple[str, Any, SamplingParams]] = []
        self.aborted: list[str] = []
        self.yielded = 0
        self.resets = 0
        self.news = asyncio.Event()
        self.num_unfinished = 0
        self.callers: list[Caller] = []
        self.queue = QueueView(self.config.scheduler)

    @property
    def tokenizer_source(self) -> "FakeAsyncLLM":
        return self

    def num_tokens(self) -> int:
        return self.config.model.vocab_size

    def get_tokenizer(self) -> ByteTokenizer | None:
        return self.tokenizer

    async def check_health(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def inspect(self) -> dict[str, Any]:
        await self.check_health()
        return {"running": 0}

    def shutdown(self) -> None:
        """There is no core to end."""

    def get_num_unfinished_requests(self) -> int:
        return self.num_unfinished

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.resets += 1
        return True

    async def abort(self, request_id: Any) -> None:
        self.aborted.append(request_id)

    async def generate(
        self, prompt: TokenizedPrompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        self.started.append((request_id, _shown(prompt), sampling_params))
        self.callers.append(CALLER.get())
        self.news.set()
        finished = False
        try:
            for number in range(sampling_params.max_tokens or 1):
                if self.failure is not None and number >= self.fail_after:
                    raise self.failure
                if self.gate is not None:
                    await self.gate.acquire()
                last = number + 1 == sampling_params.max_tokens
                output = self._output(prompt.token_ids, sampling_params, request_id, number, last)
                if last or sampling_params.output_kind is RequestOutputKind.DELTA:
                    finished = last
                    self.yielded += 1
                    yield output
        finally:
            if not finished:
                self.aborted.append(request_id)
                self.news.set()

    async def open_stream(
        self, prompt: TokenizedPrompt, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> FakeStream:
        return FakeStream(self.generate(prompt, sampling_params, request_id, priority=priority))

    def check_queue(self, num_preparing: int = 0) -> None:
        self.queue.check(CALLER.get().tenant, self.num_unfinished + num_preparing)

    async def beam_search(
        self, prompt: TokenizedPrompt, params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        sampling = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens)
        yield self._output(prompt.token_ids, sampling, request_id, params.max_tokens - 1, True)

    def _output(
        self, prompt: list[int], params: SamplingParams, request_id: str, number: int, last: bool
    ) -> RequestOutput:
        first = number if params.output_kind is RequestOutputKind.DELTA else 0
        answer = bytes(token for token in prompt if token < 256).upper() or b"?"
        token_ids = [answer[index % len(answer)] for index in range(first, number + 1)]
        choices = [
            CompletionOutput(
                index=index,
                text=bytes(token_ids).decode("utf-8", "replace"),
                token_ids=token_ids,
                cumulative_logprob=-float(index),
                logprobs=None
                if params.logprobs is None
                else [_position(token, params.logprobs) for token in token_ids],
                finish_reason="length" if last else None,
            )
            for index in range(params.n)
        ]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(_position(token, params.prompt_logprobs) for token in prompt[1:])]
        return RequestOutput(request_id, None, prompt, prompt_logprobs, choices, last, num_cached_tokens=3)


def _position(token: int, count: int) -> dict[int, Logprob]:
    """The token itself, and `count` likelier or less likely neighbours around it."""
    others = {(token + step) % 256: Logprob(-0.25 * step, step, chr((token + step) % 256)) for step in range(1, count)}
    return {token: Logprob(-0.5, 2, chr(token)), **others}
