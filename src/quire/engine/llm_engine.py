"""The synchronous engine: add requests, call `step`, get outputs."""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.adapters import LoRARequest
from quire.config import EngineConfig
from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import EngineArgs
from quire.engine.caller import asking
from quire.engine.control import EngineControl
from quire.engine.core_client import BlockingClient, InprocClient, WaitingClient
from quire.engine.frontend import Frontend
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.messages import AbortRequests, AddRequests, GivenUp, Restarted, Restarting
from quire.engine.output_processor import StatsHook
from quire.engine.request_record import RequestRecord
from quire.engine.tokenization import Tokenization
from quire.errors import ConfigError, RequestError
from quire.executor.interface import Executor
from quire.inputs import PromptType
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.events import EventKind
from quire.outputs import AnyOutput
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams
from quire.timeline import STARTUP
from quire.tokenizers.interface import Tokenizer

if TYPE_CHECKING:
    from quire.metrics.snapshot import Metric


class LLMEngine(Frontend[BlockingClient], EngineControl):
    """Requests in, outputs out, one step at a time, in the caller's thread.

    Args:
        config: the engine's.
        multiprocess: run the core in a process of its own; None: where `recovery` asks for one.
        executor: runs the steps (in-process only); by default the one that the configuration names.
        stat_hooks: told about steps, tokens and finished requests, besides the engine's own `metrics`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        multiprocess: bool | None = None,
        executor: Executor | None = None,
        stat_hooks: Sequence[StatsHook] = (),
    ) -> None:
        self.metrics: EngineMetrics | None = None
        if not config.observability.disable_log_stats:
            bounds = config.observability.custom_histogram_buckets
            self.metrics = EngineMetrics(config.model.model, config.model.max_model_len, bounds)

        self._ended: list[RequestRecord] = []
        """Requests that ended without an output of the core; `step` gives their last outputs."""

        def start_core() -> BlockingClient:
            wish = config.parallel.wish_for_processes
            if multiprocess is False and wish is not None:
                raise ConfigError(f"{wish} needs a core in a process of its own: allow one", setting=wish.split("=")[0])
            if not (multiprocess or wish):
                return InprocClient(config, executor)
            from quire.engine.process_client import open_client  # not needed, and slow to import, in-process

            client = WaitingClient(functools.partial(open_client, config, "process"))
            client.on_change = self._core_changed
            return client

        super().__init__(config, start_core, self.metrics, stat_hooks, for_server=False)

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
        """An engine from a resolved configuration; None leaves the choice to QUIRE_ENABLE_MULTIPROCESSING and `recovery`."""
        multiprocess = envs.QUIRE_ENABLE_MULTIPROCESSING if enable_multiprocessing is None else enable_multiprocessing
        return cls(config, multiprocess=multiprocess, stat_hooks=stat_loggers or ())

    # --- requests ---

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
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
        fields: dict[str, Any] = {"prompt_text": prompt_text, "arrival_time": arrival_time, "priority": priority}
        tokenization = Tokenization.of(tokenization_kwargs)
        with asking(lora_request):
            tokenized = self.tokenize(prompt, params, tokenization)
            record = self.process(
                request_id, tokenized, params, tokenization, **fields, tenant=tenant, adapter=lora_request
            )
        self.add_processed([record])
        return request_id

    def add_processed(self, requests: Sequence[RequestRecord]) -> None:
        """Queue requests that were processed before: all of them, or none. Raises RequestError: an id is in use."""
        added: list[str] = []
        try:
            for record in requests:
                self._outputs.add(record)
                added.append(record.request_id)
            self._client.check_alive()
            self._client.send(AddRequests([request for record in requests for request in record.engine_requests]))
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
        self._ended += records
        if core_ids:
            self._client.send(AbortRequests(core_ids))

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter, and try it with one token; requests that come soon find it loaded. What other requests get meanwhile
        is told by the next `step`.
        Raises RequestError: it cannot be used."""
        name, prompt, params = self._trial(lora_request)
        self.add_request(name, prompt, params, lora_request=lora_request)
        record = next(each for each in self._outputs.records if each.request_id == name)
        while not record.is_finished:
            touched = self._advance()
            self._ended += [each for each in touched if each is not record and each not in self._ended]
        if record.error is not None:
            raise RequestError(record.error, param="lora_request")
        return True

    def discard_aborted(self) -> None:
        """Drop the last outputs of requests that were aborted."""
        self._ended.clear()

    def step(self) -> list[AnyOutput]:
        """Run one step: the outputs of every request that has something new. Raises EngineDeadError: the core has failed."""
        touched, self._ended = self._ended, []
        if not touched and len(self._outputs):
            touched = self._advance()
            self._outputs.detokenize_some()  # the device works on the next step meanwhile
            self.do_log_stats()
        built = [record.build_output() for record in touched]
        return [output for output in built if output is not None]

    def _advance(self) -> list[RequestRecord]:
        """Take in one step's outputs; the requests that have new ones."""
        touched, aborts = self._outputs.process(self._client.get_outputs(), time.monotonic())
        if aborts:
            self._client.send(AbortRequests(aborts))
        return touched

    def _core_changed(self, message: Restarting | GivenUp | Restarted) -> None:
        """The core has died and is started again."""
        match message:
            case Restarting(message=text):
                self.events.add(EventKind.RESTART, text)
            case GivenUp():
                self._ended += self._give_up(message)
            case Restarted(core_ids=core_ids):
                self._send_again(core_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._ended) or len(self._outputs) > 0

    # --- the rest ---

    def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of the core and wait for its value."""
        return self._client.call(utility, *args, **kwargs)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError: there is none."""
        tokenizer = self.tokenizer_source.get()
        if tokenizer is None:
            raise ConfigError(f"there is no tokenizer: {self.tokenizer_source.why_absent}", setting="tokenizer")
        return tokenizer

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: level 0 none (a pause: new requests wait), 1 the KV cache, 2 the weights too.
        Raises RequestError: no such mode, or requests are unfinished.

        Args:
            mode: what becomes of unfinished requests: `abort` ends them, `keep` lets them stand still and go on later; `wait`
                wants that there are none.
        """
        if mode == "wait" and len(self._outputs):
            raise RequestError("mode is 'wait', and requests are unfinished: step until they have ended", param="mode")
        self.call("sleep", level, mode)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for: `generate`, or what it pools."""
        return self._supported_tasks()

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

    def do_log_stats(self) -> None:
        """Write the log line with throughput and load, if it is time for one."""
        self._log_stats()

    def shutdown(self) -> None:
        """End the core and give everything back; may be called twice."""
        self._client.shutdown()
