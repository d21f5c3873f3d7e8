"""`POST /v1/chat/completions`: from a typed request to an answer or a stream of chunks; `/batch`: several conversations."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.config import limits
from quire.engine.input_processor import TokenizedPrompt
from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.errors import HTTPError, bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import DONE, ChunkWriter, chat_chunk_writer, error_event, failure_of
from quire.entrypoints.openai import sampling
from quire.entrypoints.openai.answers import AnswerReader, PieceReader, answer_reader
from quire.entrypoints.openai.generation import (
    TokenCount,
    all_of,
    check_output,
    last_output,
    open_generation,
    page_size,
    start_generation,
    wants_timing,
    wants_usage,
)
from quire.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from quire.entrypoints.openai.prompts import chat_prompt, normalize_messages
from quire.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Usage,
    build_usage,
)
from quire.entrypoints.openai.sampling import constrain_answer, limit_thinking
from quire.entrypoints.openai.tool_choice import read_tool_choice
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.tokenizers.interface import Tokenizer


@dataclasses.dataclass(slots=True)
class ChatJob:
    """A checked request, ready to run."""

    request: ChatCompletionRequest
    prompt: TokenizedPrompt
    params: SamplingParams | BeamSearchParams
    public_id: str
    model: str
    role: str
    echoed: str
    created: int
    reader: AnswerReader | None = None
    tokenizer: Tokenizer | None = None


async def prepare_chat(
    state: ServerState, request: ChatCompletionRequest, public_id: str, prompt_field: str = "messages"
) -> ChatJob:
    """Check a request and tokenize its prompt. Raises what the client must be told, who wrote `prompt_field`."""
    model = state.resolve_model(request.model)
    sampling.apply_defaults(state.settings, request)
    sampling.refuse_unsupported(request)
    state.check_request_template(request.chat_template)
    read_tool_choice(request)  # before a template reads the tools
    sampling.check_stream_options(request)
    logprobs = sampling.chat_logprobs_count(request)
    config = state.engine.config.model
    asked, asked_name = sampling.asked_chat_tokens(request)
    prompt = await chat_prompt(request, state.engine.get_tokenizer(), asked, config.max_model_len, state.settings)
    defaults = config.default_sampling
    max_tokens = sampling.resolve_max_tokens(
        asked, len(prompt.token_ids), config.max_model_len, defaults.get("max_tokens"), asked_name, prompt_field
    )
    params: SamplingParams | BeamSearchParams
    if request.use_beam_search:
        for field in ("logprobs", "logprob_token_ids"):
            if getattr(request, field):
                raise bad_field(field, "not available with use_beam_search.", "not_supported")
        params = sampling.build_beam_search_params(request, max_tokens=max_tokens, defaults=defaults)
    else:
        params = sampling.build_sampling_params(request, max_tokens=max_tokens, logprobs=logprobs, defaults=defaults)
    reader = None
    if (tokenizer := state.engine.get_tokenizer()) is not None:
        reader = answer_reader(state.formats, request, tokenizer, prompt.token_ids, state.settings)
    if reader is not None and reader.keeps_special_tokens and isinstance(params, SamplingParams):
        params.skip_special_tokens = False
    constrain_answer(params, reader, tokenizer)
    limit_thinking(params, state.formats, reader, tokenizer, prompt.token_ids)
    last = normalize_messages(request.messages)[-1]
    continues = not _adds_generation_prompt(request) and last["role"] == "assistant"
    role = "assistant" if continues else state.settings.response_role
    echoed = str(last.get("content") or "") if request.echo and last["role"] == role else ""
    chat_id, created = f"chatcmpl-{public_id}", int(time.time())
    return ChatJob(request, prompt, params, chat_id, model, role, echoed, created, reader, tokenizer)


def _adds_generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


async def answer_chat(state: ServerState, job: ChatJob) -> ChatCompletionResponse:
    """The whole answer of a request that is not streamed."""
    outputs = start_generation(state, job.request, job.prompt, job.params, job.public_id)
    output = await last_output(outputs, job.public_id)
    count = token_count(state, job)
    count.add_cached(output)
    count.add_times(output)
    for choice in output.outputs:
        count.add_choice(choice)
    request = job.request
    response = ChatCompletionResponse(
        id=job.public_id,
        created=job.created,
        model=job.model,
        choices=[_choice(job, choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)],
        usage=count.usage(),
        metrics=count.timing(),
        system_fingerprint=state.fingerprint,
    )
    if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
    if request.return_token_ids:
        response.prompt_token_ids = job.prompt.token_ids
    if request.return_prompt_text:
        response.prompt_text = job.prompt.text
    return response


def token_count(state: ServerState, job: ChatJob) -> TokenCount:
    """A count of a request's tokens, before there are any answers."""
    thoughts = None if job.reader is None else job.reader.reasoning_count()
    details = state.settings.enable_prompt_tokens_details
    times = [] if wants_timing(state, job.request) else None
    prompt = len(job.prompt.token_ids)
    return TokenCount(prompt, details=details, thoughts=thoughts, times=times, page=page_size(state))


async def open_chat(state: ServerState, job: ChatJob, public_id: str) -> OutputStream:
    """Queue a request whose answer is streamed."""
    assert isinstance(job.params, SamplingParams)
    request_id = state.engine_request_id(public_id)
    return await open_generation(state, job.request, job.prompt, job.params, request_id)


def _choice(job: ChatJob, choice: CompletionOutput) -> ChatChoice:
    message, finish_reason = ChatMessage(role=job.role, content=job.echoed + choice.text), choice.finish_reason
    if job.reader is not None:
        answer = job.reader.whole(choice.text)
        message.content = job.echoed + answer.content or None
        if answer.reasoning:
            message.reasoning = answer.reasoning
        if answer.calls:
            message.tool_calls = job.reader.tool_calls(answer)
            finish_reason = job.reader.finish_reason(finish_reason, len(answer.calls))
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=_logprobs(job, choice),
        finish_reason=finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids) if job.request.return_token_ids else None,
    )


def _logprobs(job: ChatJob, choice: CompletionOutput) -> ChatLogprobs | None:
    request = job.request
    if choice.logprobs is None:
        return None
    as_ids, named = bool(request.return_tokens_as_token_ids), request.logprob_token_ids
    return chat_logprobs(
        choice.token_ids, choice.logprobs, None if named else request.top_logprobs or 0, as_ids, job.tokenizer
    )


class ChatStream:
    """Writes the chunks of a streamed answer. See `push.AnswerStream`."""

    def __init__(self, state: ServerState, job: ChatJob) -> None:
        self._state = state
        self._job = job
        self._include_usage, self._continuous = wants_usage(job.request)
        self._writer = chat_chunk_writer(job.public_id, job.created, job.model, self._include_usage, state.fingerprint)
        self._count = token_count(state, job)
        self._readers = [PieceReader(job.reader) for _ in range(_num_choices(job))]
        self._opened = False
        self.takes_text = not (self._continuous or _tells_tokens(job.request))

    async def open(self) -> OutputStream:
        return await open_chat(self._state, self._job, self._job.public_id)

    def write(self, output: RequestOutput) -> bytes:
        """An output as chunks; before the first, who speaks."""
        check_output(output, self._job.public_id)
        pieces: list[bytes] = []
        if not self._opened:
            self._opened = True
            self._count.add_cached(output)
            pieces.extend(_opening(self._job, self._writer, self._count, self._continuous))
        self._count.add_times(output)
        for choice in output.outputs:
            self._count.add_choice(choice)
            if self.takes_text and choice.finish_reason is None:
                pieces.append(self._text(choice.index, choice.text))
            else:
                usage = self._count.usage() if self._continuous else None
                pieces.extend(_rich_chunks(self._job, self._writer, choice, self._readers[choice.index], usage))
        return b"".join(pieces)

    def write_text(self, text: str) -> bytes:
        return self._text(0, text)

    def _text(self, index: int, text: str) -> bytes:
        """A step of a choice that goes on and tells nothing but its text."""
        reader = self._readers[index]
        if (kind := reader.plain_kind(text)) is not None:
            return self._writer.text(index, text, kind)
        chunks = b""
        for piece in reader.read_text(text):
            if piece.kind == "content" or piece.kind == "reasoning":
                chunks += self._writer.text(index, piece.text, piece.kind)
            else:
                delta: dict[str, Any] = {"index": index, "delta": reader.delta(piece)}
                chunks += self._writer.choice({**delta, "logprobs": None, "finish_reason": None})
        return chunks

    async def end(self, error: Exception | None) -> bytes:
        if error is not None:
            return error_event(failure_of(error, self._job.public_id), self._state.settings.error_format) + DONE
        usage = self._writer.usage(self._count.usage(), self._count.timing()) if self._include_usage else b""
        return usage + DONE


def _opening(job: ChatJob, writer: ChunkWriter, count: TokenCount, continuous: bool) -> list[bytes]:
    """The first chunk of every choice: who speaks; and the text that `echo` asks for."""
    chunks: list[bytes] = []
    prompt: dict[str, Any] = {}
    if job.request.return_token_ids:
        prompt["prompt_token_ids"] = job.prompt.token_ids
    if job.request.return_prompt_text:
        prompt["prompt_text"] = job.prompt.text
    for index in range(_num_choices(job)):
        delta = {"role": job.role, "content": ""}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunks.append(writer.choice(choice, count.usage() if continuous else None, prompt))
        if job.echoed:
            chunks.append(writer.text(index, job.echoed))
    return chunks


def _num_choices(job: ChatJob) -> int:
    return job.params.n if isinstance(job.params, SamplingParams) else job.params.beam_width


def _deltas(job: ChatJob, choice: CompletionOutput, reader: PieceReader) -> list[dict[str, Any]]:
    """What a step's text adds to the message. A step whose tokens are wanted too has at least one delta."""
    deltas = [reader.delta(piece) for piece in reader.read(choice)]
    return deltas or ([{"content": ""}] if choice.token_ids and _tells_tokens(job.request) else [])


def _tells_tokens(request: ChatCompletionRequest) -> bool:
    """Whether chunks tell of their tokens."""
    return bool(request.logprobs or request.logprob_token_ids or request.return_token_ids)


def _rich_chunks(
    job: ChatJob, writer: ChunkWriter, choice: CompletionOutput, reader: PieceReader, usage: Usage | None
) -> list[bytes]:
    """The message's parts, the first with logprobs and token ids; then the finish reason in a chunk of its own."""
    chunks: list[bytes] = []
    for number, delta in enumerate(_deltas(job, choice, reader)):
        logprobs = None if number else _logprobs(job, choice)
        chunk: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if job.request.return_token_ids and not number:
            chunk["token_ids"] = list(choice.token_ids)
        chunks.append(writer.choice(chunk, usage))
    if choice.finish_reason is not None:
        reason = choice.finish_reason
        finish: dict[str, Any] = {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason if job.reader is None else job.reader.finish_reason(reason, reader.num_calls),
            "stop_reason": choice.stop_reason,
        }
        chunks.append(writer.choice(finish, usage))
    return chunks


_OF_ONE = ("stream", "prompt_logprobs", "return_prompt_text", "return_timing")
"""What an answer tells of one conversation only."""


async def answer_chat_batch(state: ServerState, request: BatchChatRequest, public_id: str) -> ChatCompletionResponse:
    """Answer every conversation. One that cannot be answered is the request's error, and cancels the others."""
    jobs = await _prepare(state, request, public_id)
    answers = await all_of([answer_chat(state, job) for job in jobs])
    choices = [choice for answer in answers for choice in answer.choices]
    for index, choice in enumerate(choices):
        choice.index = index
    merged, usage = answers[0], _total([answer.usage for answer in answers])
    return msgspec.structs.replace(
        merged, choices=choices, usage=usage, prompt_token_ids=None, prompt_text=None, metrics=None
    )


async def _prepare(state: ServerState, request: BatchChatRequest, public_id: str) -> list[ChatJob]:
    for field in _OF_ONE:
        if (value := getattr(request, field)) is not None and value is not False:
            raise bad_field(field, "not available for a batch of conversations.", "not_supported")
    count = len(request.messages)
    if not 0 < count <= limits.MAX_PROMPTS:
        raise bad_field("messages", f"{count} conversations; 1 to {limits.MAX_PROMPTS} in one request.")
    if count * (request.n or 1) > limits.MAX_N:
        message = f"{request.n} answers to {count} conversations; at most {limits.MAX_N} sequences in one request."
        raise bad_field("n", message)
    fields = msgspec.structs.asdict(request)
    return [
        await _prepare_one(state, fields | {"messages": messages}, public_id, f"messages[{index}]")
        for index, messages in enumerate(request.messages)
    ]


async def _prepare_one(state: ServerState, fields: dict[str, Any], public_id: str, path: str) -> ChatJob:
    try:
        return await prepare_chat(state, ChatCompletionRequest(**fields), public_id)
    except HTTPError as error:
        param = error.detail.param
        if param is None or not param.startswith("messages"):
            raise
        message = error.detail.message.replace("messages", path, 1)
        param = param.replace("messages", path, 1)
        raise HTTPError(error.status, message, param=param, code=error.code) from None


def _total(usages: Sequence[Usage]) -> Usage:
    details = [usage.prompt_tokens_details for usage in usages]
    thoughts = [usage.completion_tokens_details for usage in usages]
    return build_usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        None if details[0] is None else sum(one.cached_tokens for one in details if one is not None),
        None if not thoughts[0] else sum(one.reasoning_tokens for one in thoughts if one),
        None if details[0] is None else sum(one.created_cache_tokens or 0 for one in details if one is not None),
    )
