"""`POST /v1/chat/completions`: from a checked generation to an answer or a stream of chunks; `/batch`: several conversations."""

from typing import Any

import msgspec

from quire.config import limits
from quire.entrypoints.http.errors import HTTPError, bad_field, from_exception
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat_generation import ChatGeneration, prepare_generation
from quire.entrypoints.openai.chunks import CHAT_TEXT, ChunkStream, chunk_fields, stream_options
from quire.entrypoints.openai.generation import all_of, total_usage
from quire.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs_json
from quire.entrypoints.openai.prompts import content_text
from quire.entrypoints.openai.protocol import (
    BatchChatRequest,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from quire.errors import RequestError
from quire.outputs import CompletionOutput, RequestOutput


async def prepare_chat(state: ServerState, request: ChatCompletionRequest, public_id: str) -> ChatGeneration:
    """Check a request and tokenize its prompt. Raises what the client must be told."""
    return await prepare_generation(state, request, f"chatcmpl-{public_id}")


async def answer_chat(job: ChatGeneration) -> ChatCompletionResponse:
    """The whole answer of a request that is not streamed."""
    output, request = await job.finish(), job.request
    for choice in output.outputs:
        job.count.add_choice(choice)
    role, echoed = _speaker(job)
    response = ChatCompletionResponse(
        id=job.public_id,
        created=job.created,
        model=job.model,
        choices=[
            _choice(job, choice, role, echoed) for choice in sorted(output.outputs, key=lambda choice: choice.index)
        ],
        usage=job.count.usage(),
        metrics=job.count.timing(),
        system_fingerprint=job.state.fingerprint,
        kv_transfer_params=output.kv_transfer_params,
    )
    if request.prompt_logprobs is not None and output.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs_json(output.prompt_logprobs)
    return msgspec.structs.replace(response, **_prompt_fields(job))


def _speaker(job: ChatGeneration) -> tuple[str, str]:
    """Who speaks, and the text that `echo` puts before the answer."""
    request, last = job.request, job.request.messages[-1]
    adds_prompt = request.add_generation_prompt
    if adds_prompt is None:
        adds_prompt = not request.continue_final_message
    continues = not adds_prompt and last["role"] == "assistant"
    role = "assistant" if continues else job.state.settings.response_role
    return role, content_text(last) if request.echo and last["role"] == role else ""


def _prompt_fields(job: ChatGeneration) -> dict[str, Any]:
    """What the request wants to see of its prompt."""
    fields: dict[str, Any] = {}
    if job.request.return_token_ids:
        fields["prompt_token_ids"] = job.prompt.token_ids
    if job.request.return_prompt_text:
        fields["prompt_text"] = job.prompt.text
    return fields


def _choice(job: ChatGeneration, choice: CompletionOutput, role: str, echoed: str) -> ChatChoice:
    reader = job.reader
    answer = PieceReader(reader).read_whole(choice)
    message = ChatMessage(role, echoed + answer.content)
    if not reader.is_plain:
        message.content = message.content or None
    if answer.reasoning:
        message.reasoning = answer.reasoning
    if answer.calls:
        message.tool_calls = reader.tool_calls(answer)
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=_logprobs(job, choice),
        finish_reason=reader.finish_reason(choice.finish_reason, len(answer.calls)),
        stop_reason=choice.stop_reason,
        token_ids=list(choice.token_ids) if job.request.return_token_ids else None,
        **_weight_fields(job, choice),
    )


def _weight_fields(job: ChatGeneration, choice: CompletionOutput) -> dict[str, Any]:
    """Which weights made the answer, where the request asks for that."""
    asks = job.request.return_weight_versions and choice.weight_versions is not None
    return {"weight_versions": choice.weight_versions} if asks else {}


def _logprobs(job: ChatGeneration, choice: CompletionOutput) -> ChatLogprobs | None:
    if choice.logprobs is None:
        return None
    request, as_ids = job.request, job.request.return_tokens_as_token_ids
    if as_ids is None:
        as_ids = job.state.settings.return_tokens_as_token_ids
    top = None if request.logprob_token_ids else request.top_logprobs or 0
    return chat_logprobs(choice.token_ids, choice.logprobs, top, as_ids, job.reader.tokenizer)


class ChatStream(ChunkStream):
    """Writes the chunks of a streamed answer. See `push.AnswerStream`."""

    def __init__(self, job: ChatGeneration) -> None:
        request = job.request
        options = stream_options(job.state.settings, request)
        super().__init__([job], chunk_fields(job, "chat.completion.chunk"), CHAT_TEXT, options, request.return_timing)
        self._job = job
        self._readers = [PieceReader(job.reader) for _ in range(job.num_choices)]
        self._opened = False
        self._tells_tokens = bool(request.logprobs or request.logprob_token_ids or request.return_token_ids)
        self.takes_text = not (self._continuous or self._tells_tokens)

    def write(self, output: RequestOutput) -> bytes:
        """An output as chunks; before the first, who speaks."""
        self._job.note(output)
        pieces: list[bytes] = []
        if not self._opened:
            self._opened = True
            pieces += self._opening()
        for choice in output.outputs:
            self._job.count.add_choice(choice)
            if self.takes_text and choice.finish_reason is None:
                pieces.append(self._text(choice.index, choice.text))
            else:
                pieces += self._rich_chunks(choice)
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
                chunks += self._writer.choice(_delta(index, self._job.reader.delta(piece)))
        return chunks

    def _usage(self) -> Usage | None:
        return self._job.count.usage() if self._continuous else None

    def _opening(self) -> list[bytes]:
        """The first chunk of every choice: who speaks; and the text that `echo` asks for."""
        job, chunks = self._job, list[bytes]()
        role, echoed = _speaker(job)
        for index in range(job.num_choices):
            opening = _delta(index, {"role": role, "content": ""})
            chunks.append(self._writer.choice(opening, self._usage(), _prompt_fields(job)))
            if echoed:
                chunks.append(self._writer.text(index, echoed))
        return chunks

    def _rich_chunks(self, choice: CompletionOutput) -> list[bytes]:
        """The message's parts, the first with logprobs and token ids; then the finish reason in a chunk of its own."""
        job, reader, usage = self._job, self._readers[choice.index], self._usage()
        deltas = [job.reader.delta(piece) for piece in reader.read(choice)]
        if not deltas and choice.token_ids and self._tells_tokens:
            deltas = [{"content": ""}]
        chunks: list[bytes] = []
        for number, delta in enumerate(deltas):
            chunk = _delta(choice.index, delta)
            if not number:
                chunk["logprobs"] = _logprobs(job, choice)
                if job.request.return_token_ids:
                    chunk["token_ids"] = list(choice.token_ids)
            chunks.append(self._writer.choice(chunk, usage))
        if choice.finish_reason is not None:
            reason = job.reader.finish_reason(choice.finish_reason, reader.num_calls)
            finish = _delta(choice.index, {}) | {"finish_reason": reason, "stop_reason": choice.stop_reason}
            chunks.append(self._writer.choice(finish | _weight_fields(job, choice), usage))
        return chunks


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    """A choice of a chunk that goes on."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


_OF_ONE = ("stream", "prompt_logprobs", "return_prompt_text", "return_timing")
"""What an answer tells of one conversation only."""


async def answer_chat_batch(state: ServerState, request: BatchChatRequest, public_id: str) -> ChatCompletionResponse:
    """Answer every conversation. One that cannot be answered is the request's error, and cancels the others."""
    jobs = await _prepare_batch(state, request, public_id)
    answers = await all_of([answer_chat(job) for job in jobs])
    choices = [choice for answer in answers for choice in answer.choices]
    for index, choice in enumerate(choices):
        choice.index = index
    merged, usage = answers[0], total_usage([answer.usage for answer in answers])
    return msgspec.structs.replace(
        merged, choices=choices, usage=usage, prompt_token_ids=None, prompt_text=None, metrics=None
    )


async def _prepare_batch(state: ServerState, request: BatchChatRequest, public_id: str) -> list[ChatGeneration]:
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


async def _prepare_one(state: ServerState, fields: dict[str, Any], public_id: str, path: str) -> ChatGeneration:
    try:
        return await prepare_chat(state, ChatCompletionRequest(**fields), public_id)
    except (HTTPError, RequestError) as error:
        refusal = from_exception(error, public_id)
        param = refusal.detail.param
        if param is None or not param.startswith("messages"):
            raise
        message = refusal.detail.message.replace("messages", path, 1)
        param = param.replace("messages", path, 1)
        raise HTTPError(refusal.status, message, param=param, code=refusal.code) from None
