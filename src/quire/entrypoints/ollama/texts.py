"""`/api/chat` and `/api/generate`: from a typed request to an answer, whole or as a stream of lines of JSON.

Preparation, prompts and parsers are those of chat completions; here is the shape of the answers.
"""

import dataclasses
import time
from typing import Any

from quire.engine.request_stream import OutputStream
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.ollama import conversion
from quire.entrypoints.ollama.conversion import served_name
from quire.entrypoints.ollama.protocol import (
    UNSET,
    AnswerHead,
    Function,
    GenerationOptions,
    OllamaCall,
    OllamaChat,
    OllamaChatAnswer,
    OllamaGenerate,
    OllamaMessage,
    OllamaText,
    nanoseconds,
    now,
    ollama_error,
)
from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat_generation import ChatGeneration, prepare_generation
from quire.entrypoints.openai.generation import Generation, new_count
from quire.entrypoints.openai.logprobs import chat_logprobs
from quire.entrypoints.openai.prompts import completion_prompts
from quire.entrypoints.openai.protocol import CompletionRequest
from quire.entrypoints.openai.sampling import build_sampling_params, naming_form, resolve_max_tokens
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.pieces import Answer, Call, Piece, read_arguments


@dataclasses.dataclass(slots=True)
class OllamaJob:
    """A checked request, ready to run.

    Attributes:
        generation: of a conversation, or of a raw prompt; None where nothing is asked but that the model is there.
        model: as the client named it.
        is_chat: the answer is a message, not a text.
        began: on the clock of `time.perf_counter`.
    """

    generation: ChatGeneration | Generation[CompletionRequest] | None
    model: str
    is_chat: bool
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def line(self, said: Answer, *, done: bool = False, **fields: Any) -> AnswerHead:
        """What was said, in the shape of the route."""
        fields |= {"model": self.model, "created_at": now(), "done": done}
        thinking = said.reasoning or UNSET
        if not self.is_chat:
            return OllamaText(response=said.content, thinking=thinking, **fields)
        calls = [OllamaCall(Function(call.name, read_arguments(call.arguments))) for call in said.calls] or UNSET
        return OllamaChatAnswer(
            message=OllamaMessage(content=said.content, thinking=thinking, tool_calls=calls), **fields
        )

    def ending(self, reason: str | None) -> dict[str, Any]:
        """The fields of the last line."""
        ending: dict[str, Any] = {"done_reason": "length" if reason == "length" else "stop"}
        ending |= {"total_duration": int((time.perf_counter() - self.began) * 1e9), "load_duration": 0}
        if self.generation is not None:
            count = self.generation.count
            times = count.timing()
            prompt, answer = (times.time_to_first_token_ms, times.generation_time_ms) if times else (None, None)
            ending |= {"prompt_eval_count": count.prompt, "prompt_eval_duration": nanoseconds(prompt)}
            ending |= {"eval_count": count.completion, "eval_duration": nanoseconds(answer)}
        return ending


async def prepare_ollama_chat(state: ServerState, request: OllamaChat, public_id: str) -> OllamaJob:
    """Check a conversation and tokenize it. Raises what the client must be told."""
    name = request.model = served_name(state, request)
    if not request.messages:
        return _loaded(request, name, is_chat=True)
    chat, at_most = conversion.to_chat_request(request), conversion.most_tokens(request)
    return OllamaJob(
        await prepare_generation(state, chat, public_id, "messages", at_most, "format"), name, is_chat=True
    )


async def prepare_ollama_text(state: ServerState, request: OllamaGenerate, public_id: str) -> OllamaJob:
    """Check a prompt and tokenize it: as a conversation of one message, unless it is raw or the model has no chat template."""
    name = request.model = served_name(state, request)
    at_most = conversion.most_tokens(request)
    conversion.check_supported(request)
    if not request.prompt:
        return _loaded(request, name, is_chat=False)
    tokenizer = state.engine.get_tokenizer()
    if request.raw or getattr(tokenizer, "chat_template", "") is None:
        job = await _prepare_raw(state, conversion.to_completion_request(request), public_id, at_most)
    else:
        chat = conversion.prompt_to_chat_request(request)
        job = await prepare_generation(state, chat, public_id, "prompt", at_most, "format")
    return OllamaJob(job, name, is_chat=False)


def _loaded(request: GenerationOptions, name: str, is_chat: bool) -> OllamaJob:
    """The answer to who wants the model loaded, as it is."""
    if conversion.is_unload(request):
        raise bad_field(
            "keep_alive", "the model stays loaded as long as its server runs; `quire stop` ends it.", "not_supported"
        )
    return OllamaJob(None, name, is_chat)


async def _prepare_raw(
    state: ServerState, request: CompletionRequest, public_id: str, at_most: int | None
) -> Generation[CompletionRequest]:
    model, config = state.resolve_model(request.model), state.engine.config.model
    limit = config.max_model_len
    (prompt,) = await completion_prompts(state, request, limit)
    max_tokens = resolve_max_tokens(None, len(prompt.token_ids), limit, at_most, "options.num_predict", "prompt")
    with naming_form("format"):
        params = build_sampling_params(request, max_tokens=max_tokens, logprobs=None, defaults=config.default_sampling)
    return Generation(
        state=state,
        request=request,
        prompt=prompt,
        params=params,
        public_id=public_id,
        model=model,
        count=new_count(state, request.return_timing),
        form="format",
    )


class _Reader:
    """Reads an answer as pieces; one of a raw prompt is all content. Calls are told whole."""

    def __init__(self, generation: ChatGeneration | Generation[CompletionRequest]) -> None:
        self._generation = generation
        is_chat = isinstance(generation, ChatGeneration)
        self._reader = PieceReader(generation.reader) if is_chat else None
        self._open: Answer | None = None

    def text(self, text: str) -> Answer:
        pieces = [Piece("content", text)] if self._reader is None else self._reader.read_text(text)
        return self._whole(pieces, is_last=False)

    def choice(self, choice: CompletionOutput) -> Answer:
        self._generation.count.add_choice(choice)
        pieces = [Piece("content", choice.text)] if self._reader is None else self._reader.read(choice)
        return self._whole(pieces, is_last=choice.finish_reason is not None)

    def logprobs(self, choice: CompletionOutput) -> dict[str, Any]:
        """What is told of the tokens, where the request asks for that."""
        generation = self._generation
        if choice.logprobs is None or not isinstance(generation, ChatGeneration):
            return {}
        top, tokenizer = generation.request.top_logprobs or 0, generation.reader.tokenizer
        return {"logprobs": list(chat_logprobs(choice.token_ids, choice.logprobs, top, False, tokenizer).content or ())}

    def _whole(self, pieces: list[Piece], is_last: bool) -> Answer:
        """What the pieces add: a call once the next begins, or the answer ends."""
        said = Answer()
        for piece in pieces:
            if piece.kind == "call":
                self._close(said)
                self._open = Answer(calls=[Call(piece.text)])
            elif piece.kind == "arguments":
                assert self._open is not None
                self._open.calls[0].arguments += piece.text
            else:
                said.add(piece)
        if is_last:
            self._close(said)
        return said

    def _close(self, said: Answer) -> None:
        if self._open is not None:
            said.calls += self._open.calls
            self._open = None


async def answer_ollama(job: OllamaJob) -> AnswerHead:
    """The whole answer of a request that is not streamed."""
    if job.generation is None:
        return job.line(Answer(), done=True, **job.ending(None) | {"done_reason": "load"})
    output = await job.generation.finish()
    (choice,) = output.outputs
    reader = _Reader(job.generation)
    said = reader.choice(choice)
    return job.line(said, done=True, **job.ending(choice.finish_reason), **reader.logprobs(choice))


class OllamaStream:
    """Writes the lines of a streamed answer. See `push.AnswerStream`."""

    takes_text = True

    def __init__(self, job: OllamaJob) -> None:
        assert job.generation is not None
        self._job = job
        self._generation = job.generation
        self._reader = _Reader(job.generation)

    async def open(self) -> OutputStream:
        return await self._generation.open()

    def write(self, output: RequestOutput) -> bytes:
        """An output's lines; the last one says why the answer has ended, and counts."""
        self._generation.note(output)
        lines = b""
        for choice in output.outputs:
            said, told = self._reader.choice(choice), self._reader.logprobs(choice)
            lines += self._line(said, told)
            if choice.finish_reason is not None:
                lines += _as_line(self._job.line(Answer(), done=True, **self._job.ending(choice.finish_reason)))
        return lines

    def write_text(self, text: str) -> bytes:
        return self._line(self._reader.text(text), {})

    def _line(self, said: Answer, told: dict[str, Any]) -> bytes:
        return _as_line(self._job.line(said, **told)) if said != Answer() or told else b""

    async def end(self, error: Exception | None) -> bytes:
        return b"" if error is None else ollama_error(failure_of(error, self._generation.public_id)) + b"\n"


def _as_line(answer: AnswerHead) -> bytes:
    return encode(answer) + b"\n"
