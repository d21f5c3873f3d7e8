"""What the server knows while it lives: the engine once it is ready, the names it serves, who is being served.

Three phases: starting (the port is open, the engine is not there yet), serving, draining.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from quire import envs
from quire.config.hub.listing import HubSettings
from quire.config.limits import MAX_BATCH_FILE_BYTES
from quire.engine.caller import CALLER
from quire.entrypoints.fingerprint import build_fingerprint
from quire.entrypoints.http.adapter_finder import AdapterFinder, Served, ServedAdapters
from quire.entrypoints.http.admission import AdmissionGate
from quire.entrypoints.http.decoding import MAX_BODY_BYTES, BodyDecoder
from quire.entrypoints.http.errors import HTTPError, bad_field, not_ready
from quire.entrypoints.http.siblings import Siblings
from quire.lora.resolver import active_resolvers
from quire.metrics.prometheus import HttpMetrics
from quire.parsers.choice import AUTO, AnswerFormats, apply_response_template, apply_strings, choose_formats

LOAD_ADAPTER = "/v1/load_lora_adapter"
"""The route by which an operator, or another process of this server, has an adapter served."""

if TYPE_CHECKING:
    from quire.config.reasoning import ReasoningConfig
    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.batches.service import Batches
    from quire.entrypoints.responses.store import ResponseStore


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """The operator's choices that routes need."""

    served_model_names: tuple[str, ...] = ()
    lora_modules: Sequence[dict[str, str]] = ()
    download_dir: str | None = None
    hf_token: str | bool | None = None
    response_role: str = "assistant"
    strict: bool = False
    trust_request_chat_template: bool = False
    trust_request_mm_kwargs: bool = False
    enable_prompt_tokens_details: bool = False
    enable_per_request_metrics: bool = False
    metrics_names: str = "quire"
    max_body_bytes: int = MAX_BODY_BYTES
    drain_retry_after_s: int = 5
    reasoning_parser: str = AUTO
    tool_call_parser: str = AUTO
    tool_strict_level: str = AUTO
    default_chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    reasoning_effort_map: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    exclude_tools_when_tool_choice_none: bool = True
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    log_error_stack: bool = False
    sse_keep_alive_interval: float = 0.0
    fingerprint_mode: str = "full"
    fingerprint_value: str | None = None
    responses_store: str | None = None
    batch_store: str | None = None
    max_batch_file_size: int = MAX_BATCH_FILE_BYTES
    error_format: str = "openai"
    api_key_for: str = "clients"
    tenant_header: str | None = None


def answer_formats(
    settings: ServerSettings, config: "ReasoningConfig", template: str | None, folder: str
) -> AnswerFormats:
    """How a model's answers are read, whose tokenizer is in a folder.
    Raises ConfigError if there is no such format, the strings make none, or a response template is wanted and missing."""
    reasoning = settings.reasoning_parser
    if reasoning == AUTO and config.reasoning_parser:
        reasoning = config.reasoning_parser
    formats = choose_formats(reasoning, settings.tool_call_parser, template, settings.tool_strict_level)
    formats = apply_response_template(formats, folder)
    return apply_strings(formats, config.reasoning_start_str, config.reasoning_end_str)


class ServerState:
    """One server's mutable state; lives in `app.state.server`.

    Attributes:
        engine_or_none: the engine; None while it is starting.
        adapters: what is served beside the model.
        responses: the responses that `/v1/responses` keeps; the application sets it.
        batches: files and batches; None where the operator has given no folder for them. The application sets it.
    """

    responses: "ResponseStore"
    batches: "Batches | None" = None

    def __init__(self, settings: ServerSettings, engine: "AsyncLLM | None" = None) -> None:
        self.settings = settings
        self.engine_or_none = engine
        self.adapters = ServedAdapters(settings.lora_modules, self.hub)
        self.decoder = BodyDecoder(strict=settings.strict)
        self.gate = AdmissionGate()
        self.draining = False
        self.forced = False
        self.in_flight = 0
        self.num_preparing = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.started_at = int(time.time())
        self.metrics: Any = None
        self.http = HttpMetrics()
        self.siblings: Siblings | None = None
        self.background: dict[str, Any] = {}
        """Responses that run in the background, by id."""
        self.handed_over: set[str] = set()
        """Ids of those that another server has left, and that do not go on yet."""
        self._sequence = itertools.count()

    @property
    def engine(self) -> "AsyncLLM":
        """The engine. Raises HTTPError, a 503, while it is starting."""
        if self.engine_or_none is None:
            raise not_ready("The server is starting; the model is being loaded.", 1)
        return self.engine_or_none

    def accept_work(self, *, queues: bool = True) -> None:
        """Raise a 503 unless new work may begin, or CapacityError where it would be refused; an operator's does not queue."""
        if self.draining:
            raise not_ready("The server is shutting down.", self.settings.drain_retry_after_s)
        if self.engine.errored:
            raise not_ready("The engine is not running.")
        if queues:
            self.engine.check_queue(self.num_preparing)  # before its body is read; the core looks once more

    @contextlib.contextmanager
    def preparing(self) -> Generator[None]:
        """A request is checked and tokenized; the engine does not know of it yet."""
        self.num_preparing += 1
        try:
            yield
        finally:
            self.num_preparing -= 1

    def begin_request(self) -> None:
        """A request that draining waits for has begun."""
        self.in_flight += 1
        self.idle.clear()

    def end_request(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self.idle.set()

    @functools.cached_property
    def formats(self) -> AnswerFormats:
        """How the model's answers are read."""
        tokenizer = self.engine.get_tokenizer()
        template, folder = getattr(tokenizer, "chat_template", None), getattr(tokenizer, "name_or_path", "")
        return answer_formats(self.settings, self.engine.config.reasoning, template, folder)

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """What answers tell of the configuration that made them."""
        settings = self.settings
        return build_fingerprint(settings.fingerprint_mode, settings.fingerprint_value, self.engine.config) or None

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request may give as `model`; the first one is shown in answers."""
        if self.settings.served_model_names:
            return self.settings.served_model_names
        config = self.engine.config.model
        return config.served_model_name or (config.model,)

    @property
    def hub(self) -> HubSettings:
        """How a hub is asked for adapters."""
        return HubSettings(cache=self.settings.download_dir, token=self.settings.hf_token)

    @functools.cached_property
    def _finder(self) -> AdapterFinder | None:
        if self.engine.config.lora is None or not envs.QUIRE_ALLOW_RUNTIME_LORA_UPDATING:
            return None
        return AdapterFinder(self.engine, self.adapters, active_resolvers(self.hub), self.tell_of_adapter)

    async def tell_of_adapter(self, served: Served) -> None:
        """Have the server's other processes serve an adapter that this one has tried."""
        if self.siblings is not None:
            adapter = served.adapter
            body = {"lora_name": adapter.lora_name, "lora_path": adapter.lora_path, "root": served.root}
            numbers = {"lora_int_id": adapter.lora_int_id, "base_model_name": adapter.base_model_name}
            await self.siblings.tell(LOAD_ADAPTER, msgspec.json.encode(body | numbers))

    async def look_for_model(self, name: Any) -> None:
        """Before a request for a model is looked at: have resolvers find an adapter that is not known yet.
        Raises HTTPError: they do, and it cannot be used."""
        if not isinstance(name, str) or not name or self._finder is None:
            return
        if name not in self.model_names and self.adapters.find(name) is None:
            await self._finder.look_for(name)

    def resolve_model(self, name: str | None) -> str:
        """The name to show in the answer; a 404 for a model that is not served. An adapter's name has what the caller queues from
        now on computed with it."""
        names = self.model_names
        adapter = self.adapters.find(name) if name else None
        CALLER.set(dataclasses.replace(CALLER.get(), adapter=adapter))
        if not name:
            return names[0]
        if adapter is None and name not in names:
            served = [*names, *(each.adapter.lora_name for each in self.adapters.listed())]
            message = f"model: {name[:200]!r} is not served here; served: {', '.join(served[:20])}."
            raise HTTPError(404, message, param="model", code="model_not_found")
        return name

    def check_request_template(self, chat_template: str | None) -> None:
        """A 400 for a request that brings a chat template where the operator has not allowed it."""
        if chat_template is not None and not self.settings.trust_request_chat_template:
            message = "the operator has not allowed templates in requests (--trust-request-chat-template)."
            raise bad_field("chat_template", message)

    def check_processor_options(self, options: dict[str, Any] | None) -> None:
        """A 400 for a request that brings options of the media processor where the operator has not allowed it: they can have it
        make images as large as memory."""
        if options and not self.settings.trust_request_mm_kwargs:
            message = (
                "the operator has not allowed options of the media processor in requests (--trust-request-mm-kwargs)."
            )
            raise bad_field("mm_processor_kwargs", message, "not_supported")

    def engine_request_id(self, public_id: str) -> str:
        """An id that is unique in the engine even when two clients choose the same one."""
        return f"{public_id}-{next(self._sequence):x}"
