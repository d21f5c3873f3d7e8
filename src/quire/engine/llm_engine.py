"""The synchronous engine: add requests, call `step`, get outputs."""

import abc
import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire import envs
from quire import param_checks as checks
from quire.config import EngineConfig, ModelConfig
from quire.config.observability import profile_overrides
from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import EngineArgs
from quire.engine.core_client import CoreClient, InprocClient, ProcessClient
from quire.engine.input_processor import InputProcessor, ProcessedRequest, TokenizedPrompt
from quire.engine.messages import Ready, Utility
from quire.engine.output_processor import OutputProcessor, StatsHook
from quire.engine.pausing import check_mode
from quire.engine.pooling_processor import PoolingProcessor
from quire.engine.request_state import NO_TOKENS, PoolingRecord, RequestRecord
from quire.engine.tokenization import Tokenization
from quire.engine.tokenizer_source import TokenizerSource
from quire.errors import ConfigError, RequestError
from quire.executor.interface import Executor
from quire.inputs import PromptType
from quire.metrics.engine_metrics import EngineMetrics, StatsLogger
from quire.outputs import AnyOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.timeline import STARTUP
from quire.tokenizers.interface import Tokenizer

if TYPE_CHECKING:
    from quire.metrics.snapshot import Metric


class EngineControl(abc.ABC):
    """What an engine may be told besides requests; `AsyncControl` is the same for `AsyncLLM`."""

    @abc.abstractmethod
    def call(self, utility: Utility, *args: Any) -> Any:
        """Call a utility of the core and wait for its value."""

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; with `reset_running_requests` these compute theirs again. There is no connector."""
        del reset_connector
        return bool(self.call(Utility.RESET_PREFIX_CACHE, reset_running_requests))

    def release_kv_cache_memory(self) -> None:
        """Give the KV cache's memory back until `wake_up(["kv_cache"])`; unfinished requests stand still, and are computed
        anew."""
        self.call(Utility.RELEASE_KV_CACHE)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`, or `weights`, `kv_cache` or `scheduling` (a pause) alone; whether nothing sleeps any more."""
        return bool(self.call(Utility.WAKE_UP, tags))

    def is_sleeping(self) -> bool:
        return bool(self.call(Utility.IS_SLEEPING))

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Profile the workers' steps from now on, as `profiler_config` says.
        Raises RequestError: profiles are off, one is being taken, or an argument cannot be used.

        Args:
            profile_prefix: how the traces' names begin.
            delay_iterations: steps to leave out first; max_iterations: steps after which it ends by itself.
            profiler_kwargs: further fields of `profiler_config` for this profile.
        """
        overrides = profile_overrides(delay_iterations, max_iterations, profiler_kwargs)
        args = (check_profile_prefix(profile_prefix), overrides)
        check_profile_started(self.collective_rpc("start_profile", args=args))

    def stop_profile(self) -> list[str]:
        """End the profile; the files that were written. Raises RequestError: none is being taken."""
        return profile_files(self.collective_rpc("stop_profile"))

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker, or a function whose first argument is the worker.
        Raises RequestError: there is no such method, or workers in other processes cannot be sent a function.
        Raises TimeoutError: workers in other processes gave no answer within `timeout` seconds; one in this process is waited
        for."""
        return self.call(Utility.COLLECTIVE_RPC, method, list(args), kwargs, timeout)

    def reset_mm_cache(self) -> None:
        """Forget media that were prepared. None are kept: no model reads media yet."""

    def reset_encoder_cache(self) -> None:
        """Forget encoders' outputs. None are kept: no model reads media yet."""

    def explain(self) -> dict[str, Any]:
        return self.call(Utility.EXPLAIN)


class LLMEngine(EngineControl):
    """Requests in, outputs out, one step at a time, in the caller's thread.

    Args:
        config: the engine's.
        multiprocess: run the core in a process of its own.
        executor: who runs the steps (in-process only); by default what the configuration names.
        stat_hooks: told about steps, tokens and finished requests, besides the engine's own `metrics`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        multiprocess: bool = False,
        executor: Executor | None = None,
        stat_hooks: Sequence[StatsHook] = (),
    ) -> None:
        source = TokenizerSource(config.model)
        self._client: CoreClient = ProcessClient(config) if multiprocess else InprocClient(config, executor)
        self.config = config = settle(config, self._client.ready)
        try:
            self.tokenizer: Tokenizer | None = source.get()
        except ConfigError:
            self._client.shutdown()
            raise
        self._tokenizer_source = source
        self.input_processor = InputProcessor(config, source, allow_functions=not multiprocess)
        self.pooling_processor = PoolingProcessor(config, source, self.input_processor)
        self.metrics: EngineMetrics | None = None
        self._stats_logger: StatsLogger | None = None
        hooks = list(stat_hooks)
        if not config.observability.disable_log_stats:
            self.metrics = EngineMetrics(config.model.model, config.model.max_model_len)
            self._stats_logger = StatsLogger(self.metrics, config.observability.log_stats_interval_s)
            hooks.append(self.metrics)
        self._outputs = OutputProcessor(hooks)
        self._aborted: list[RequestRecord] = []

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext | None = None,
        stat_loggers: Sequence[StatsHook] | None = None,
        enable_multiprocessing: bool | None = None,
    ) -> "LLMEngine":
        """An engine from arguments that are not resolved yet."""
        with STARTUP.phase("configuration"):
            config = engine_args.create_engine_config(usage_context)
        return cls.from_engine_config(config, stat_loggers, enable_multiprocessing)

    @classmethod
    def from_engine_config(
        cls,
        config: EngineConfig,
        stat_loggers: Sequence[StatsHook] | None = None,
        enable_multiprocessing: bool | None = None,
    ) -> "LLMEngine":
        """An engine from a resolved configuration; None leaves the choice to QUIRE_ENABLE_MULTIPROCESSING."""
        multiprocess = envs.QUIRE_ENABLE_MULTIPROCESSING if enable_multiprocessing is None else enable_multiprocessing
        return cls(config, multiprocess=multiprocess, stat_hooks=stat_loggers or ())

    # --- requests ---

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
        *,
        tenant: str = "",
    ) -> str:
        """Queue a request; gives its id.
        Raises RequestError: it cannot be served; nothing was queued.

        Args:
            prompt_text: the text of a prompt that is given as token ids, for the output.
            trace_headers, session_id: accepted for compatibility: a synchronous engine writes no spans, and knows no sessions.
        """
        del trace_headers, session_id
        if kv_hints is not None:
            raise RequestError("kv_hints are not available yet: leave them out", param="kv_hints")
        check_lora(lora_request)
        tokenization = Tokenization.of(tokenization_kwargs)
        if not isinstance(prompt, TokenizedPrompt):
            prompt = self.input_processor.tokenize(prompt, tokenization.add_special_tokens is not False)
        if prompt_text is not None:
            prompt = dataclasses.replace(prompt, text=prompt_text)
        processor: Any = self.input_processor
        if isinstance(params, PoolingParams):
            processor, params = self.pooling_processor, tokenization.of_pooling(params)
        else:
            (prompt,) = tokenization.cut([prompt], self.config.model.max_model_len)
        processed = processor.process(
            request_id, prompt, params, arrival_time=arrival_time, priority=priority, tenant=tenant
        )
        self.add_processed([processed])
        return request_id

    def add_processed(self, requests: Sequence[ProcessedRequest]) -> None:
        """Queue requests that were processed before: all of them, or none. Raises RequestError: an id is in use."""
        added: list[str] = []
        try:
            for processed in requests:
                self._outputs.add(make_record(processed))
                added.append(processed.request_id)
            self._client.add_requests([request for processed in requests for request in processed.engine_requests])
        except BaseException:
            for request_id in added:
                self._outputs.discard(request_id)
            raise

    def abort_request(self, request_ids: str | Sequence[str], internal: bool = False) -> None:
        """End requests at once; the next `step` gives their last outputs. Unknown ids are ignored. `internal` has no meaning:
        there is one kind of ids."""
        del internal
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        records, core_ids = self._outputs.abort(ids, time.monotonic())
        self._aborted += records
        if core_ids:
            self._client.abort_requests(core_ids)

    def discard_aborted(self) -> None:
        """Nobody wants the last outputs of what was aborted."""
        self._aborted.clear()

    def step(self) -> list[AnyOutput]:
        """Run one step: the outputs of every request that has news. Raises EngineDeadError: the core has failed."""
        touched, self._aborted = self._aborted, []
        if not touched and len(self._outputs):
            outputs = self._client.get_outputs()
            touched, aborts = self._outputs.process(outputs, time.monotonic())
            if aborts:
                self._client.abort_requests(aborts)
            self._outputs.detokenize_some()  # the device works on the next step meanwhile
            self.do_log_stats()
        built = [record.build_output() for record in touched]
        return [output for output in built if output is not None]

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._aborted) or len(self._outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests that have not ended; one with n > 1 counts once."""
        return len(self._outputs)

    # --- the rest ---

    def call(self, utility: Utility, *args: Any) -> Any:
        """Call a utility of the core and wait for its value."""
        return self._client.call(utility, *args)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError: there is none."""
        if self.tokenizer is None:
            raise ConfigError(f"there is no tokenizer: {self._tokenizer_source.why_absent}", setting="tokenizer")
        return self.tokenizer

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: level 0 none (a pause: new requests wait), 1 the KV cache, 2 the weights too.
        Raises RequestError: no such mode, or requests are unfinished.

        Args:
            mode: what becomes of unfinished requests: `abort` ends them, `keep` lets them stand still and go on later; `wait`
                wants that there are none.
        """
        check_mode(mode)
        if mode == "wait" and len(self._outputs):
            raise RequestError("mode is 'wait', and requests are unfinished: step until they have ended", param="mode")
        if mode == "abort":
            self.abort_request([record.request_id for record in self._outputs.records])
        self._client.call(Utility.SLEEP, level, mode)

    def is_standing_still(self) -> bool:
        """Whether steps give no news of unfinished requests: the core is paused, or sleeps with requests that were kept."""
        return bool(self._client.call(Utility.IS_STANDING_STILL))

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: `generate`, or what it pools."""
        return supported_tasks(self.config)

    def get_metrics(self, names: str = "quire") -> list["Metric"]:
        """Counters, gauges and histograms of this engine, as they are now.
        Raises RequestError: they are not kept (`disable_log_stats=False` keeps them).

        Args:
            names: their prefix: `quire` (`quire:num_requests_running`), `vllm` or `both`.
        """
        if self.metrics is None:
            message = "metrics are off; make the engine with disable_log_stats=False"
            raise RequestError(message, param="disable_log_stats")
        from quire.metrics.prometheus import PREFIXES, cache_info
        from quire.metrics.snapshot import take_snapshot

        if names not in PREFIXES:
            raise RequestError(f"names is {names!r}; it may be {', '.join(PREFIXES)}", param="names")
        return take_snapshot(self.metrics, cache_info(self.config.cache), names)

    @property
    def vllm_config(self) -> EngineConfig:
        """The configuration, as programs written for vLLM ask for it (`vllm_config.model_config` …)."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        """The model's settings."""
        return self.config.model

    def do_log_stats(self) -> None:
        """Write the log line with throughput and load, if it is time for one."""
        if self._stats_logger is not None:
            self._stats_logger.tick()

    def shutdown(self) -> None:
        """End the core and give everything back; may be called twice."""
        self._client.shutdown()


def make_record(processed: ProcessedRequest) -> RequestRecord:
    """The record of a request that is about to be queued."""
    pools = isinstance(processed.params, PoolingParams)
    return (PoolingRecord if pools else RequestRecord)(
        request_id=processed.request_id,
        prompt=processed.prompt.text,
        prompt_token_ids=processed.prompt.token_ids,
        params=NO_TOKENS if isinstance(processed.params, PoolingParams) else processed.params,
        engine_requests=processed.engine_requests,
        arrival_time=processed.arrival_time,
        tokenizer=processed.tokenizer,
    )


def supported_tasks(config: EngineConfig) -> tuple[str, ...]:
    """What an engine's model can be asked for."""
    return ("generate",) if config.model.pooling is None else tuple(config.model.pooling.tasks)


def check_profile_started(problems: list[str | None]) -> None:
    """Raise a RequestError where a worker's `start_profile` said why it cannot."""
    if problems[0] is not None:
        raise RequestError(problems[0], param="profiler_config")


def profile_files(results: list[dict[str, str | None]]) -> list[str]:
    """The files that the workers' `stop_profile` wrote. Raises RequestError: no profile was being taken."""
    if results[0]["problem"] is not None:
        raise RequestError(results[0]["problem"], param="profiler_config")
    return [result["file"] for result in results if result["file"] is not None]


def settle(config: EngineConfig, ready: Ready) -> EngineConfig:
    """The configuration with what the core found at its start."""
    return config.settled(ready.num_blocks, ready.block_size, ready.max_model_len, ready.max_concurrency)


def check_profile_prefix(prefix: str | None) -> str:
    """How a trace's name begins. Raises RequestError: it is not a plain name."""
    if prefix is not None and not re.fullmatch(r"[A-Za-z0-9_-]{0,64}", prefix):
        checks.refuse("profile_prefix", prefix, "up to 64 letters, digits, '-' and '_'")
    return prefix or ""


def check_media(mm_processor_kwargs: Any) -> None:
    """Media are not read yet. Raises RequestError: they have options all the same."""
    if mm_processor_kwargs:
        raise RequestError(
            "media input is not supported yet: leave mm_processor_kwargs out", param="mm_processor_kwargs"
        )


def check_lora(lora_request: Any) -> None:
    """Adapters are not there yet."""
    if lora_request is not None:
        raise RequestError("LoRA adapters are not supported yet", param="lora_request")
