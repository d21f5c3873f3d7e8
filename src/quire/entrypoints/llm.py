"""The offline API: a list of prompts in, a list of finished outputs out.

Thin: what may be asked is checked by the input processor before anything is queued, and the engine does the rest.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, Unpack

from quire import param_checks as checks
from quire.adapters import LoRARequest
from quire.config import EngineConfig, ModelConfig
from quire.engine.arg_resolve import UsageContext
from quire.engine.arg_utils import EngineArgs
from quire.engine.beam_search import BeamSearch, BeamSearches
from quire.engine.caller import asking
from quire.engine.collector import CollectorPause
from quire.engine.control import EngineControl
from quire.engine.frontend import with_processor_options
from quire.engine.input_processor import TokenizedPrompt, check_params
from quire.engine.llm_engine import LLMEngine
from quire.engine.request_record import RequestRecord
from quire.engine.tokenization import Tokenization
from quire.entrypoints.ahead import PART, Ahead, Prepare
from quire.entrypoints.conversations import (
    Adapters,
    adapters_per_prompt,
    as_prompts,
    check_content_format,
    check_count,
    normalize_messages,
    split_conversations,
    with_media,
)
from quire.entrypoints.interrupt import DeferredInterrupt
from quire.entrypoints.media_parts import MediaMessages
from quire.entrypoints.pooling import PoolingMethods
from quire.entrypoints.progress import Progress, Tqdm
from quire.errors import EngineDeadError, EngineError, RequestError
from quire.inputs import PromptType
from quire.logprobs import LogprobsOnePosition
from quire.multimodal.media_source import in_threads
from quire.outputs import AnyOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.tokenizers.content_format import ContentFormat
from quire.tokenizers.interface import Tokenizer, check_template_variables

if TYPE_CHECKING:
    from quire.metrics.snapshot import Metric


class _Call(NamedTuple):
    """What makes the requests of some of a call's prompts, and how many prompts there are."""

    prepare: Prepare
    count: int


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis. `tokens` and `text` begin with the prompt; `logprobs` has one entry a generated token."""

    tokens: list[int]
    logprobs: list[LogprobsOnePosition]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's hypotheses, best first."""

    sequences: list[BeamSearchSequence]


ItemT = TypeVar("ItemT")


def build_output(search: BeamSearch) -> BeamSearchOutput:
    """A finished search as users get it."""
    prompt, tokenizer = search.prompt.token_ids, search.tokenizer
    skip = search.params.skip_special_tokens
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                tokens=prompt + beam.token_ids,
                logprobs=beam.logprobs,
                cum_logprob=beam.cum_logprob,
                text=tokenizer.decode(prompt + beam.token_ids, skip) if tokenizer is not None else None,
                finish_reason="stop" if beam.ended_by_eos else "length",
            )
            for beam in search.beams()
        ]
    )


ParamsPerPrompt = SamplingParams | Sequence[SamplingParams] | None
Priority = int | Sequence[int] | None


class ChatOptions(TypedDict, total=False):
    """How conversations become prompts. `priority`, `tokenization_kwargs` and `mm_processor_kwargs` are as in `generate`;
    `continue_final_message` goes on with the last message and needs `add_generation_prompt=False`; `chat_template_kwargs` are
    further variables of the template."""

    priority: Priority
    chat_template: str | None
    chat_template_content_format: ContentFormat
    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    chat_template_kwargs: dict[str, Any] | None
    tokenization_kwargs: dict[str, Any] | None
    mm_processor_kwargs: dict[str, Any] | None


class LLM(PoolingMethods, EngineControl):
    """A model, ready to generate, or to embed, classify and score.

    Args:
        model: a local folder or a hub id; without one, the built-in demo model.
        kwargs: any field of `EngineArgs` (dtype, max_model_len, gpu_memory_utilization, …).

    Raises:
        ConfigError: a setting that cannot work; the message names it.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("disable_log_stats", True)
        self._start(LLMEngine.from_engine_args(EngineArgs(model=model, **kwargs), UsageContext.LLM_CLASS))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        """From arguments that were put together before."""
        return cls._from_engine(LLMEngine.from_engine_args(engine_args, UsageContext.LLM_CLASS))

    @classmethod
    def from_engine_config(cls, config: EngineConfig) -> "LLM":
        """From a configuration that is resolved."""
        return cls._from_engine(LLMEngine.from_engine_config(config))

    @classmethod
    def _from_engine(cls, engine: LLMEngine) -> "LLM":
        llm = cls.__new__(cls)
        llm._start(engine)
        return llm

    def _start(self, engine: LLMEngine) -> None:
        self.llm_engine = engine
        self._ids = map(str, itertools.count())
        self._enqueued: dict[str, AnyOutput | None] = {}
        """Requests that `wait_for_completion` has not returned yet, in order; with their last outputs, once they have ended."""

    # --- generating ---

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsPerPrompt = None,
        *,
        use_tqdm: Tqdm = True,
        lora_request: Adapters = None,
        priority: Priority = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs are in the prompts' order.
        Raises RequestError: a prompt or a parameter cannot be served; then nothing was queued.
        Raises EngineDeadError: the engine failed.

        Args:
            prompts: text, a list of token ids, a dict with `prompt` or `prompt_token_ids`, or a list of any of these.
            sampling_params: for all prompts, or one for each; None takes the model's own defaults.
            use_tqdm: show progress; or a function to make the progress bar with.
            lora_request: an adapter for all prompts, or one (or None) for each.
            priority: one number for all prompts, or one for each; lower runs first, under the `priority` policy.
            tokenization_kwargs: `add_special_tokens`, `truncate_prompt_tokens`, `truncation_side`.
            mm_processor_kwargs: options of the model's media processor, for prompts that name none of their own.
        """
        call = self._prompts(prompts, sampling_params, lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
        return self._run_all(call, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsPerPrompt = None,
        lora_request: Adapters = None,
        priority: Priority = None,
        use_tqdm: Tqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts as `generate` does and return their ids; `wait_for_completion` gives the outputs."""
        call = self._prompts(prompts, sampling_params, lora_request, priority, tokenization_kwargs, mm_processor_kwargs)
        return self._enqueue(call)

    def _prompts(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsPerPrompt,
        lora_request: Adapters,
        priority: Priority,
        tokenization_kwargs: dict[str, Any] | None,
        mm_processor_kwargs: dict[str, Any] | None,
    ) -> "_Call":
        tokenization = Tokenization.of(tokenization_kwargs)
        special = tokenization.add_special_tokens is not False
        read = functools.partial(self.llm_engine.input_processor.tokenize_batch, add_special_tokens=special)
        given = with_processor_options(as_prompts(prompts), mm_processor_kwargs)
        return self._call(given, read, tokenization, sampling_params, priority, lora_request)

    def _call(
        self,
        given: Sequence[ItemT],
        read: Callable[[list[ItemT]], list[TokenizedPrompt]],
        tokenization: Tokenization,
        sampling_params: ParamsPerPrompt,
        priority: Priority,
        lora_request: Adapters,
    ) -> "_Call":
        count = len(given)
        params, priorities = self._params_per_prompt(sampling_params, count), _priorities(priority, count)
        adapters = adapters_per_prompt(lora_request, count)

        def prepare(part: slice) -> list[RequestRecord]:
            prompts = self._read(given[part], read, tokenization, adapters[part])
            return self._process(prompts, params[part], priorities[part], adapters[part])

        return _Call(prepare, count)

    def _read(
        self,
        given: Sequence[ItemT],
        read: Callable[[list[ItemT]], list[TokenizedPrompt]],
        tokenization: Tokenization,
        lora_request: Adapters,
    ) -> list[TokenizedPrompt]:
        tokenized: list[TokenizedPrompt] = []
        for own, some in self._by_tokenizer(given, lora_request):
            with asking(own):
                tokenized += read(some)
        return tokenization.cut(tokenized, self.model_config.max_model_len)

    def _by_tokenizer(
        self, given: Sequence[ItemT], lora_request: Adapters
    ) -> Iterator[tuple[LoRARequest | None, list[ItemT]]]:
        """Prompts side by side that are read by one tokenizer: an adapter's own, or (None) the model's."""
        own = self.llm_engine.tokenizer_source.own
        pairs = zip(map(own, adapters_per_prompt(lora_request, len(given))), given, strict=True)
        for adapter, some in itertools.groupby(pairs, key=operator.itemgetter(0)):
            yield adapter, [each for _, each in some]

    def _enqueue(self, call: "_Call") -> list[str]:
        requests = call.prepare(slice(None))
        self.llm_engine.add_processed(requests)
        ids = [request.request_id for request in requests]
        self._enqueued |= dict.fromkeys(ids)
        return ids

    def wait_for_completion(
        self, output_type: type[Any] | tuple[type[Any], ...] | None = None, *, use_tqdm: Tqdm = True
    ) -> list[Any]:
        """Run everything that was enqueued to its end; the outputs are in the order of the queue. `output_type`: the class
        (or one of some classes) that every output must have.
        Raises RequestError: the engine sleeps or is paused, or an output has another class."""
        with DeferredInterrupt() as interrupt:
            try:
                outputs = self._finish(list(self._enqueued), use_tqdm, interrupt)
            finally:
                self._enqueued.clear()
        for output in outputs:
            if output_type is not None and not isinstance(output, output_type):
                types = output_type if isinstance(output_type, tuple) else (output_type,)
                wanted = " or ".join(each.__name__ for each in types)
                message = f"output_type is {wanted}, and an output is a {type(output).__name__}"
                raise RequestError(message, param="output_type")
        return outputs

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: ParamsPerPrompt = None,
        use_tqdm: Tqdm = True,
        lora_request: Adapters = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answer one conversation or several; as `generate`, with the model's chat template.

        Args:
            messages: a list of messages (`role`, `content`), or a list of such lists.
            options: see `ChatOptions`.
        """
        return self._run_all(self._conversations(messages, sampling_params, lora_request, **options), use_tqdm)

    def enqueue_chat(
        self,
        messages: Sequence[Any],
        sampling_params: ParamsPerPrompt = None,
        use_tqdm: Tqdm = True,
        lora_request: Adapters = None,
        **options: Unpack[ChatOptions],
    ) -> list[str]:
        """Queue conversations as `chat` does and return their ids; `wait_for_completion` gives the outputs."""
        return self._enqueue(self._conversations(messages, sampling_params, lora_request, **options))

    def _conversations(
        self,
        messages: Sequence[Any],
        sampling_params: ParamsPerPrompt,
        lora_request: Adapters,
        *,
        priority: Priority = None,
        chat_template_content_format: ContentFormat = "auto",
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> "_Call":
        check_template_variables(chat_template_kwargs or {})
        tokenization = Tokenization.of(tokenization_kwargs)
        template = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "content_format": check_content_format(chat_template_content_format),
        } | (chat_template_kwargs or {})
        special = tokenization.add_special_tokens is True
        read = functools.partial(
            self._render, template=template, add_special_tokens=special, mm_processor_kwargs=mm_processor_kwargs
        )
        given = split_conversations(messages)
        return self._call(given, read, tokenization, sampling_params, priority, lora_request)

    def _render(
        self,
        conversations: Sequence[Any],
        template: dict[str, Any],
        add_special_tokens: bool,
        mm_processor_kwargs: dict[str, Any] | None,
    ) -> list[TokenizedPrompt]:
        """One prompt a conversation."""
        tokenizer, processor = self.get_tokenizer(), self.llm_engine.input_processor
        if markers := processor.markers:
            render = functools.partial(
                self._render_media,
                tokenizer=tokenizer,
                template=template,
                special=add_special_tokens,
                options=mm_processor_kwargs,
            )
            is_text = not tokenizer.writes_tokens
            taken = [MediaMessages(each, markers, is_text=is_text) for each in conversations]
            return in_threads(render, taken)
        rendered: list[Any] = [
            tokenizer.apply_chat_template(
                normalize_messages(conversation), tokenize=tokenizer.writes_tokens, **template
            )
            for conversation in conversations
        ]
        if tokenizer.writes_tokens:
            return [TokenizedPrompt(token_ids) for token_ids in rendered]
        return self.llm_engine.input_processor.tokenize_batch(rendered, add_special_tokens)

    def _render_media(
        self,
        taken: MediaMessages,
        tokenizer: Tokenizer,
        template: dict[str, Any],
        special: bool,
        options: dict[str, Any] | None,
    ) -> TokenizedPrompt:
        processor, conversation = self.llm_engine.input_processor, normalize_messages(taken.messages)
        rendered = tokenizer.apply_chat_template(conversation, tokenize=tokenizer.writes_tokens, **template)
        assert processor.media is not None
        processor.media.check_counts(taken.count())
        items = taken.read(processor.media.source)
        return with_media(taken, items, rendered, processor, special, options)

    def _process(
        self,
        prompts: list[TokenizedPrompt],
        params: list[SamplingParams],
        priorities: Sequence[int],
        adapters: Sequence[LoRARequest | None],
    ) -> list[RequestRecord]:
        """Check all, so that all or none are queued."""
        process, processed = self.llm_engine.input_processor.process, list[RequestRecord]()
        for prompt, one, rank, adapter in zip(prompts, params, priorities, adapters, strict=True):
            with asking(adapter):
                processed.append(process(next(self._ids), prompt, one, priority=rank, adapter=adapter))
        return processed

    def _params_per_prompt(self, given: ParamsPerPrompt, count: int) -> list[SamplingParams]:
        """One for each prompt, asking for the final output only."""
        if given is None:
            given = self.get_default_sampling_params()
        if not isinstance(given, Sequence):
            return [_final_only(given)] * count
        check_count(given, count, "sampling_params")
        final = {id(params): _final_only(params) for params in given}
        return [final[id(params)] for params in given]

    def _run_all(self, call: "_Call", use_tqdm: Tqdm) -> list[Any]:
        """Prepare and run everything; prompts of a model that reads media in parts, of which the next ones are read meanwhile."""
        part = call.count if self.llm_engine.input_processor.media is None else PART
        with CollectorPause() as pause, contextlib.closing(Ahead(call.prepare, call.count, part)) as ahead:
            return self._run(ahead.first, use_tqdm, pause, ahead)

    def _run(
        self,
        requests: Sequence[RequestRecord],
        use_tqdm: Tqdm = False,
        pause: CollectorPause | None = None,
        ahead: Ahead | None = None,
    ) -> list[Any]:
        """Run requests, and then those of `ahead`, to their end; Ctrl-C and errors take all of them back. `pause` is settled when
        these are queued."""
        with DeferredInterrupt() as interrupt:
            self.llm_engine.add_processed(requests)
            if pause is not None:
                pause.settle(len(requests))
            return self._finish([request.request_id for request in requests], use_tqdm, interrupt, ahead)

    def _stands_still(self) -> bool:
        """Whether no step would go on with a request. A core that dies under the question is started again, and does."""
        try:
            return self.llm_engine.is_standing_still()
        except EngineDeadError:
            raise
        except EngineError:
            return False

    def _finish(
        self, ids: list[str], use_tqdm: Tqdm, interrupt: DeferredInterrupt, ahead: Ahead | None = None
    ) -> list[Any]:
        """Step until these requests have ended; what was enqueued and ends meanwhile is kept for `wait_for_completion`."""
        engine = self.llm_engine
        finished = {request_id: output for request_id in ids if (output := self._enqueued.get(request_id)) is not None}
        wanted = set(ids)
        progress = Progress(len(ids) if ahead is None else ahead.count, use_tqdm)
        try:
            if len(finished) < len(ids) and self._stands_still():
                raise RequestError("the engine sleeps or is paused; wake it up first (wake_up)", param="wake_up")
            while len(finished) < len(ids) or (ahead is not None and ahead.is_left):
                if ahead is not None:
                    ids += (more := self._queue_more(ahead, len(ids) - len(finished)))
                    wanted.update(more)
                for output in engine.step():
                    if output.request_id in self._enqueued:
                        self._enqueued[output.request_id] = output
                    if output.request_id in wanted:  # others are of the user's who gave them to `llm_engine` directly
                        finished[output.request_id] = output
                        progress.advance(output)
                interrupt.check()
        finally:
            progress.close()
            if len(finished) < len(ids):
                engine.abort_request([request_id for request_id in ids if request_id not in finished])
                engine.discard_aborted()
        return [finished[request_id] for request_id in ids]

    def _queue_more(self, ahead: Ahead, num_unfinished: int) -> list[str]:
        """Queue the part that is prepared, if it would run soon."""
        if num_unfinished > self.llm_engine.config.scheduler.max_num_seqs + PART:
            return []
        requests = ahead.take(wait=not num_unfinished)
        self.llm_engine.add_processed(requests)
        return [request.request_id for request in requests]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: Tqdm = False,
        concurrency_limit: int | None = None,
        priority: Priority = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences of each prompt, as Transformers' `generate(num_beams=…)` defines them.
        Raises RequestError: a prompt or a parameter cannot be served."""
        if concurrency_limit is not None and concurrency_limit < 1:
            raise RequestError(f"concurrency_limit is {concurrency_limit}; at least 1", param="concurrency_limit")
        engine = self.llm_engine
        given = as_prompts(prompts)
        tokenized = self._read(given, engine.input_processor.tokenize_batch, Tokenization(), lora_request)
        model, count = engine.config.model, len(tokenized)
        priorities, adapters = _priorities(priority, count), adapters_per_prompt(lora_request, count)
        searches = list[BeamSearch]()
        for prompt, rank, adapter in zip(tokenized, priorities, adapters, strict=True):
            with asking(adapter):
                tokenizer = engine.tokenizer_source.get()
            searches.append(BeamSearch(model, tokenizer, prompt, params, rank, adapter))
        driver = BeamSearches(searches, engine.input_processor, self._ids, concurrency_limit)
        while requests := driver.next_requests():
            driver.advance(self._run(requests))
        return [build_output(search) for search in searches]

    # --- the rest ---

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own sampling defaults (its generation config); a new object each time."""
        return SamplingParams(**self.llm_engine.config.model.default_sampling)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError: there is none."""
        return self.llm_engine.get_tokenizer()

    @property
    def model_config(self) -> ModelConfig:
        """The model's settings."""
        return self.llm_engine.model_config

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before a request needs it. Raises RequestError: it cannot be used."""
        return self.llm_engine.add_lora(lora_request)

    def get_metrics(self, names: str = "quire") -> list["Metric"]:
        """As `LLMEngine.get_metrics`: they are kept with `disable_log_stats=False`."""
        return self.llm_engine.get_metrics(names)

    def call(self, utility: str, *args: Any, **kwargs: Any) -> Any:
        """Call a utility of the core and wait for its value."""
        return self.llm_engine.call(utility, *args, **kwargs)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back until `wake_up`: level 0 none (a pause), 1 the KV cache, 2 the weights too.

        Args:
            mode: what becomes of enqueued requests: `abort` ends them, `keep` lets them go on later; `wait` wants that there are
                none.
        """
        self.llm_engine.sleep(level, mode)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Devices that the model is spread over; there is no data parallelism yet."""
        return self.llm_engine.config.parallel.world_size

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write each rank's finished weights to a folder, which `load_format="sharded_state"` reads without any work.

        The configuration files and the tokenizer are not copied.

        Args:
            pattern: of file names, with `{rank}` and `{part}`.
            max_size: bytes a file, about.
        """
        self.collective_rpc("save_sharded_state", args=(path, pattern, max_size))

    def shutdown(self) -> None:
        """Give everything back; may be called twice."""
        self.llm_engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _priorities(given: Priority, count: int) -> Sequence[int]:
    """One for each prompt. Raises RequestError: there are more or fewer, or one is no whole number."""
    listed = given if isinstance(given, Sequence) else [given or 0] * count
    check_count(listed, count, "priority")
    low, high = -(1 << 63), (1 << 63) - 1
    return [checks.whole("priority", each, low, high, "a whole number of at most 64 bits") for each in listed]


def _final_only(params: SamplingParams) -> SamplingParams:
    """A copy that asks for the final output only."""
    check_params(params, SamplingParams, "sampling_params")
    final = copy.copy(params)
    final.output_kind = RequestOutputKind.FINAL_ONLY
    return final
