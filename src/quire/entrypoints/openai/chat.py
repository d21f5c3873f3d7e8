"""`POST /v1/chat/completions`: from a typed request to an answer or a stream of chunks."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from quire.entrypoints.openai.answers import AnswerReader, answer_reader
from quire.entrypoints.openai.errors import bad_request
from quire.entrypoints.openai.generation import (
    TokenCount,
    check_output,
    closable,
    last_output,
    start_generation,
    wants_usage,
)
from quire.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from quire.entrypoints.openai.messages import normalize_messages
from quire.entrypoints.openai.prompts import Prompt, chat_prompt
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.entrypoints.openai.responses import (
    UNSET,
    ChatChoice,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from quire.entrypoints.openai.sampling import (
    asked_chat_tokens,
    build_beam_search_params,
    build_sampling_params,
    chat_logprobs_count,
    check_stream_options,
    resolve_max_tokens,
)
from quire.entrypoints.openai.sse import ChunkWriter, chat_chunk_writer
from quire.entrypoints.openai.state import ServerState
from quire.entrypoints.openai.structured import find_thinking
from quire.entrypoints.openai.unsupported import refuse_unsupported_chat
from quire.outputs import CompletionOutput
from quire.parsers.stream import AnswerParser
from quire.sampling_params import BeamSearchParams, SamplingParams


@dataclasses.dataclass(slots=True)
class ChatJob:
    """A checked request, ready to run."""

    request: ChatCompletionRequest
    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    public_id: str
    model: str
    role: str
    echoed: str
    created: int
    reader: AnswerReader | None = None


async def prepare_chat(
    state: ServerState, request: ChatCompletionRequest, public_id: str, prompt_field: str = "messages"
) -> ChatJob:
    """Check a request and tokenize its prompt. Raises what the client must be told, who wrote `prompt_field`."""
    model = state.resolve_model(request.model)
    refuse_unsupported_chat(request, trust_chat_template=state.settings.trust_request_chat_template)
    check_stream_options(request)
    logprobs = chat_logprobs_count(request)
    config = state.engine.config.model
    asked, asked_name = asked_chat_tokens(request)
    prompt = await chat_prompt(request, state.engine.get_tokenizer(), asked, config.max_model_len)
    defaults = config.default_sampling
    max_tokens = resolve_max_tokens(
        asked, len(prompt.token_ids), config.max_model_len, defaults.get("max_tokens"), asked_name, prompt_field
    )
    params: SamplingParams | BeamSearchParams
    if request.use_beam_search:
        if logprobs is not None:
            raise bad_request("logprobs: not available with use_beam_search.", "logprobs", "not_supported")
        params = build_beam_search_params(request, max_tokens=max_tokens, defaults=defaults)
    else:
        params = build_sampling_params(request, max_tokens=max_tokens, logprobs=logprobs, defaults=defaults)
    reader = None
    if (tokenizer := state.engine.get_tokenizer()) is not None:
        reader = answer_reader(state.formats, request, tokenizer, prompt.token_ids)
    if reader is not None and reader.keeps_special_tokens and isinstance(params, SamplingParams):
        params.skip_special_tokens = False
    if (
        reader is not None
        and tokenizer is not None
        and isinstance(params, SamplingParams)
        and params.structured_outputs
    ):
        params.thinking = find_thinking(reader, tokenizer)
    last = normalize_messages(request.messages)[-1]
    continues = not _adds_generation_prompt(request) and last["role"] == "assistant"
    role = "assistant" if continues else state.settings.response_role
    echoed = str(last.get("content") or "") if request.echo and last["role"] == role else ""
    return ChatJob(request, prompt, params, f"chatcmpl-{public_id}", model, role, echoed, int(time.time()), reader)


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
    for choice in output.outputs:
        count.add_choice(choice)
    request = job.request
    response = ChatCompletionResponse(
        id=job.public_id,
        created=job.created,
        model=job.model,
        choices=[_choice(job, choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)],
        usage=count.usage(),
    )
    if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
    if request.return_token_ids:
        response.prompt_token_ids = job.prompt.token_ids
    return response


def token_count(state: ServerState, job: ChatJob) -> TokenCount:
    """A count of a request's tokens, before there are any answers."""
    thoughts = None if job.reader is None else job.reader.reasoning_count()
    details = state.settings.enable_prompt_tokens_details
    return TokenCount(len(job.prompt.token_ids), details=details, thoughts=thoughts)


def _choice(job: ChatJob, choice: CompletionOutput) -> ChatChoice:
    message, finish_reason = ChatMessage(role=job.role, content=job.echoed + choice.text), choice.finish_reason
    if job.reader is not None:
        answer = job.reader.whole(choice.text)
        message.content = job.echoed + answer.content or None
        if answer.reasoning:
            message.reasoning = answer.reasoning
        if answer.calls:
            message.tool_calls = job.reader.tool_calls(answer)
            finish_reason = _finish_reason(finish_reason)
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=_logprobs(job.request, choice),
        finish_reason=finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids) if job.request.return_token_ids else UNSET,
    )


def _finish_reason(reason: str | None) -> str | None:
    """Of an answer that calls tools."""
    return "tool_calls" if reason == "stop" else reason


def _logprobs(request: ChatCompletionRequest, choice: CompletionOutput) -> ChatLogprobs | None:
    if not request.logprobs or choice.logprobs is None:
        return None
    as_ids = bool(request.return_tokens_as_token_ids)
    return chat_logprobs(choice.token_ids, choice.logprobs, request.top_logprobs or 0, as_ids)


async def stream_chat(state: ServerState, job: ChatJob) -> AsyncGenerator[bytes, None]:
    """The chunks of a streamed answer, without the closing `[DONE]`."""
    include_usage, continuous = wants_usage(job.request)
    writer = chat_chunk_writer(job.public_id, job.created, job.model, include_usage)
    count = token_count(state, job)
    parsers = {} if job.reader is None else {index: job.reader.parser() for index in range(_num_choices(job))}
    plain = job.reader is None and not (continuous or job.request.logprobs or job.request.return_token_ids)
    outputs = start_generation(state, job.request, job.prompt, job.params, job.public_id)
    async with aclosing(closable(outputs)) as source:
        opened = False
        async for output in source:
            check_output(output, job.public_id)
            pieces: list[bytes] = []
            if not opened:
                opened = True
                count.add_cached(output)
                pieces.extend(_opening(job, writer, count, continuous))
            for choice in output.outputs:
                count.add_choice(choice)
                if plain and choice.finish_reason is None:
                    if choice.text:
                        pieces.append(writer.text(choice.index, choice.text))
                else:
                    parser = parsers.get(choice.index)
                    pieces.extend(_rich_chunks(job, writer, choice, parser, count.usage() if continuous else None))
            if pieces:
                yield b"".join(pieces)
    if include_usage:
        yield writer.usage(count.usage())


def _opening(job: ChatJob, writer: ChunkWriter, count: TokenCount, continuous: bool) -> list[bytes]:
    """The first chunk of every choice: who speaks; and the text that `echo` asks for."""
    chunks: list[bytes] = []
    for index in range(_num_choices(job)):
        delta = {"role": job.role, "content": ""}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if job.request.return_token_ids:
            choice["prompt_token_ids"] = job.prompt.token_ids
        chunks.append(writer.choice(choice, count.usage() if continuous else None))
        if job.echoed:
            chunks.append(writer.text(index, job.echoed))
    return chunks


def _num_choices(job: ChatJob) -> int:
    return job.params.n if isinstance(job.params, SamplingParams) else job.params.beam_width


def _deltas(job: ChatJob, choice: CompletionOutput, parser: AnswerParser | None) -> list[dict[str, Any]]:
    """What a step's text adds to the message. A step whose tokens are wanted too has at least one delta."""
    if job.reader is None or parser is None:
        deltas: list[dict[str, Any]] = [{"content": choice.text}] if choice.text else []
    else:
        pieces = parser.push(choice.text)
        if choice.finish_reason is not None:
            pieces += parser.finish()
        deltas = [job.reader.delta(piece) for piece in pieces if job.reader.wants(piece)]
    tells_tokens = choice.token_ids and (job.request.logprobs or job.request.return_token_ids)
    return deltas or ([{"content": ""}] if tells_tokens else [])


def _rich_chunks(
    job: ChatJob, writer: ChunkWriter, choice: CompletionOutput, parser: AnswerParser | None, usage: Usage | None
) -> list[bytes]:
    """The message's parts, the first with logprobs and token ids; then the finish reason in a chunk of its own."""
    chunks: list[bytes] = []
    for number, delta in enumerate(_deltas(job, choice, parser)):
        logprobs = None if number else _logprobs(job.request, choice)
        chunk: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if job.request.return_token_ids and not number:
            chunk["token_ids"] = list(choice.token_ids)
        chunks.append(writer.choice(chunk, usage))
    if choice.finish_reason is not None:
        has_calls = parser is not None and parser.num_calls > 0
        finish: dict[str, Any] = {
            "index": choice.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": _finish_reason(choice.finish_reason) if has_calls else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        chunks.append(writer.choice(finish, usage))
    return chunks
