"""What both engines are made of: a tokenizer, processors of inputs and outputs, figures, and a client of the core.

Knows no transport: `LLMEngine` waits for the core's outputs, `AsyncLLM` is called with them.
"""

import dataclasses
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, Generic, TypeVar

from quire.adapters import LoRARequest
from quire.config import EngineConfig, ModelConfig
from quire.engine.core_client import CoreClient
from quire.engine.input_processor import InputProcessor, TokenizedPrompt, prepare_grammars
from quire.engine.io_processor import load_io_processor
from quire.engine.messages import AbortRequests, AddRequests, GivenUp
from quire.engine.output_processor import OutputProcessor, StatsHook
from quire.engine.pooling_processor import PoolingProcessor
from quire.engine.request_record import RequestRecord
from quire.engine.stat_loggers import load_stat_loggers
from quire.engine.tokenization import Tokenization
from quire.engine.tokenizer_source import TokenizerSource
from quire.errors import ConfigError, EngineError
from quire.inputs import PromptType
from quire.logger import init_logger
from quire.metrics.engine_metrics import EngineMetrics, StatsLogger
from quire.metrics.events import EventKind, EventLog
from quire.multimodal.checkpoint_processors import read_ahead
from quire.platforms import current_platform
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.tokenizers.interface import Tokenizer

logger = init_logger(__name__)
ClientT = TypeVar("ClientT", bound=CoreClient)


class Frontend(Generic[ClientT]):
    """A frontend of one engine core.

    Args:
        config: the engine's.
        start_core: starts the core; the tokenizer is read meanwhile.
        metrics: the engine's own figures, where they are kept.
        stat_hooks: told about steps, tokens and finished requests besides.
        for_server: requests come one by one, from clients that are not trusted.

    Attributes:
        events: what happened to it besides answers.
        io_processor: the plugin's that `io_processor_plugin` names.
    """

    def __init__(
        self,
        config: EngineConfig,
        start_core: Callable[[], ClientT],
        metrics: EngineMetrics | None,
        stat_hooks: Sequence[StatsHook],
        *,
        for_server: bool,
    ) -> None:
        self.events = EventLog() if metrics is None else metrics.events
        self.tokenizer_source = source = TokenizerSource(config.model, for_server=for_server)
        own = [] if metrics is None else [metrics]
        num_copies = config.parallel.data_parallel_size
        if metrics is not None:
            metrics.first_copy = config.parallel.data_parallel_start
        copies = metrics.divide(num_copies) if metrics is not None and num_copies > 1 else ()
        self._outputs = OutputProcessor([*own, *stat_hooks, *load_stat_loggers(config)], copies)
        self.io_processor = load_io_processor(config)
        self._stats_logger: StatsLogger | None = None
        if metrics is not None and config.lora is not None:
            metrics.max_loras = config.lora.num_slots(config.scheduler.max_num_seqs)
        if metrics is not None and not config.observability.disable_log_stats:
            self._stats_logger = StatsLogger(metrics, config.observability.log_stats_interval_s)
        # Where steps take the host's cores, so does the core's start; there the first grammar waits for this.
        if for_server and not current_platform(config.device.device).capabilities().computes_on_host.value:
            prepare_grammars(config, source)
        reading = read_ahead(config) if for_server else None
        self._client = start_core()
        ready = self._client.ready
        self.config = config = config.settled(
            ready.num_blocks, ready.block_size, ready.max_model_len, ready.max_concurrency
        )
        self.tokenizer = self._read_tokenizer()
        self.input_processor = InputProcessor(
            config,
            source,
            allow_functions=self._client.shares_memory,
            try_grammars_apart=for_server,
            open_files=not for_server,
        )
        if metrics is not None and self.input_processor.media is not None:
            metrics.media = self.input_processor.media.cache
        if reading is not None:
            reading.join()
        self.pooling_processor = PoolingProcessor(config, source, self.input_processor)

    def _read_tokenizer(self) -> Tokenizer | None:
        try:
            return self.tokenizer_source.get()
        except ConfigError:
            self._client.shutdown()
            raise

    def tokenize(
        self,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        tokenization: Tokenization,
    ) -> TokenizedPrompt:
        """A prompt as token ids. Raises RequestError: it cannot be served."""
        if isinstance(prompt, TokenizedPrompt):
            return prompt
        special = tokenization.add_special_tokens is not False
        if isinstance(params, PoolingParams):
            return self.pooling_processor.tokenize_batch([prompt], special)[0]
        return self.input_processor.tokenize(prompt, special)

    def process(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        tokenization: Tokenization,
        *,
        prompt_text: str | None = None,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str = "",
        adapter: LoRARequest | None = None,
    ) -> RequestRecord:
        """A request that may be queued, of either kind. Raises RequestError: it cannot be served."""
        if prompt_text is not None:
            prompt = dataclasses.replace(prompt, text=prompt_text)
        if isinstance(params, PoolingParams):
            params = tokenization.of_pooling(params)
            process = self.pooling_processor.process
            return process(
                request_id,
                prompt,
                params,
                arrival_time=arrival_time,
                priority=priority,
                tenant=tenant,
                adapter=adapter,
            )
        (prompt,) = tokenization.cut([prompt], self.config.model.max_model_len)
        return self.input_processor.process(
            request_id,
            prompt,
            params,
            arrival_time=arrival_time,
            priority=priority,
            tenant=tenant,
            adapter=adapter,
        )

    def _trial(self, adapter: LoRARequest) -> tuple[str, TokenizedPrompt, SamplingParams | PoolingParams]:
        """The request that tries an adapter: its id, its prompt, and what it wants: as little as possible."""
        params: SamplingParams | PoolingParams = PoolingParams()
        if self.config.model.pooling is None:
            params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        return f"adapter-{adapter.lora_int_id}-{adapter.lora_name}"[:100], TokenizedPrompt([0]), params

    def _send_again(self, core_ids: Sequence[str] | None, but: Container[str] = ()) -> None:
        """Give a new core what is unfinished, or what has these of the core's ids: each request goes on behind its tokens so far.
        `but`: what no core had yet."""
        records = self._outputs.records if core_ids is None else self._outputs.having(core_ids)
        records = [record for record in records if record.request_id not in but]
        if records:
            requests = [request for record in records for request in record.resumption()]
            self._client.send(AddRequests(requests, again=True))
            self.events.add(EventKind.REPLAY, f"request {records[0].request_id} goes on", len(records))

    def _give_up(self, message: GivenUp) -> list[RequestRecord]:
        """A core died because of a request: it fails. It, if it is unfinished."""
        record = self._outputs.find(message.core_ids)
        if record is None:
            return []
        text = f"request {record.request_id} was running alone when the engine core died: {message.message}"
        logger.error("%s; it is given up", text)
        self.events.add(EventKind.GIVEN_UP, text)
        self._client.send(AbortRequests(self._outputs.fail(record, EngineError(text), time.monotonic())))
        return [record]

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended; one with n > 1 counts once."""
        return len(self._outputs)

    def _log_stats(self) -> None:
        """Write the log line with throughput and load, if it is time for one."""
        if self._stats_logger is not None:
            self._stats_logger.tick()

    def _supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: `generate`, or what it pools."""
        pooling = self.config.model.pooling
        return ("generate",) if pooling is None else tuple(pooling.tasks)

    @property
    def vllm_config(self) -> EngineConfig:
        """The configuration, as programs written for vLLM ask for it (`vllm_config.model_config` …)."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        """The model's settings."""
        return self.config.model


def with_processor_options(prompts: list[PromptType], options: dict[str, Any] | None) -> list[PromptType]:
    """Prompts whose media are processed with these options, where they name none of their own."""
    if not options:
        return prompts
    given: Any = {"mm_processor_kwargs": options}
    return [given | prompt if isinstance(prompt, dict) else prompt for prompt in prompts]
