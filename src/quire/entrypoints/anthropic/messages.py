"""`POST /v1/messages` and `/v1/messages/count_tokens`: from a typed request to a message or its events.

Preparation, prompts and parsers are those of chat completions; the protocol's own forms are in `conversion.py` and here:
content blocks, whole or as the events of a stream, which end where a piece of another kind begins.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from quire.engine.request_stream import OutputStream
from quire.entrypoints.anthropic import protocol
from quire.entrypoints.anthropic.conversion import to_chat_request
from quire.entrypoints.anthropic.protocol import Block, TextBlock, ThinkingBlock, ToolUseBlock, error_event
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat import ChatJob, open_chat, prepare_chat, token_count
from quire.entrypoints.openai.generation import TokenCount, check_output, last_output, start_generation
from quire.entrypoints.openai.prompts import chat_prompt
from quire.entrypoints.openai.protocol import ChatCompletionRequest
from quire.errors import RequestError
from quire.json_text import parse_json
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.pieces import Piece
from quire.parsers.thinking import check_budget
from quire.sampling_params import SamplingParams

_encode = msgspec.json.Encoder().encode
CallId = Callable[[str, int, str], str]
"""The id of a call, from its function's name and its index."""

_DELTAS = {
    "content": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "arguments": b'{"type":"input_json_delta","partial_json":',
}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def _signature(thinking: str) -> str:
    return hashlib.sha256(thinking.encode()).hexdigest()


def _begins_block(piece: Piece, kind: str | None) -> bool:
    """Whether a piece cannot go into the open block, whose pieces are of `kind`."""
    return piece.kind == "call" or piece.kind != kind


def _opened(piece: Piece, call_id: CallId) -> tuple[str, Block]:
    """The kind of the pieces that a new block takes, and the block, still empty."""
    if piece.kind == "call":
        return "arguments", ToolUseBlock(call_id(piece.text, piece.index, piece.id), piece.text)
    return piece.kind, ThinkingBlock() if piece.kind == "reasoning" else TextBlock()


def whole_blocks(pieces: Iterable[Piece], call_id: CallId) -> list[Block]:
    """The blocks of a whole answer."""
    kind: str | None = None
    blocks: list[Block] = []
    texts: list[list[str]] = []
    for piece in pieces:
        if _begins_block(piece, kind):
            kind, block = _opened(piece, call_id)
            blocks.append(block)
            texts.append([])
        if piece.kind != "call":
            texts[-1].append(piece.text)
    for block, parts in zip(blocks, texts, strict=True):
        text = "".join(parts)
        match block:
            case TextBlock():
                block.text = text
            case ThinkingBlock():
                block.thinking, block.signature = text, _signature(text)
            case ToolUseBlock():
                block.input = _input(text)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; what is no object (the answer was cut off) under a name that says so."""
    try:
        value = parse_json(arguments or "{}")
    except ValueError:
        value = None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"INVALID_JSON": arguments}


class BlockWriter:
    """Writes the events of one answer's blocks; a delta is its text between two constant strings.

    Attributes:
        kind: of the pieces that go into the open block; None where none is open.
    """

    def __init__(self, call_id: CallId) -> None:
        self._call_id = call_id
        self._index = -1
        self.kind: str | None = None
        self._head = b""
        self._thinking: list[str] = []

    def write(self, piece: Piece) -> bytes:
        """The events that a piece makes."""
        if not _begins_block(piece, self.kind):
            return self.write_delta(piece.text)
        closing = self.close()
        self.kind, block = _opened(piece, self._call_id)
        self._index += 1
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
        self._head = head % (self._index, _DELTAS[self.kind])
        opening = closing + event("content_block_start", index=self._index, content_block=block)
        return opening if piece.kind == "call" else opening + self.write_delta(piece.text)

    def write_delta(self, text: str) -> bytes:
        """More text of the open block."""
        if self.kind == "reasoning":
            self._thinking.append(text)
        return self._head + _encode(text) + b"}}\n\n"

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self.kind is None:
            return b""
        closing = event("content_block_stop", index=self._index)
        if self.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": _signature("".join(self._thinking))}
            self._thinking.clear()
            closing = event("content_block_delta", index=self._index, delta=signature) + closing
        self.kind = None
        return closing


@dataclasses.dataclass(slots=True)
class MessageJob:
    """A checked request, ready to run.

    Attributes:
        fills_context: fewer tokens than were asked for fit behind the prompt.
    """

    chat: ChatJob
    public_id: str
    fills_context: bool


def _limit_thinking(state: ServerState, request: protocol.MessagesRequest, chat: ChatCompletionRequest) -> None:
    """Have `thinking.budget_tokens` kept, by models whose reasoning can be limited; to others it is a hint, and passed over."""
    thinking = request.thinking or {}
    budget = thinking.get("budget_tokens")
    if budget is None or thinking.get("type") != "enabled":
        return
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise bad_field("thinking.budget_tokens", f"{budget!r:.60} is not a whole number from 0.")
    with contextlib.suppress(RequestError):
        check_budget(state.formats, state.engine.get_tokenizer())
        chat.thinking_token_budget = budget


async def prepare_message(state: ServerState, request: protocol.MessagesRequest, public_id: str) -> MessageJob:
    """Check a request and tokenize its prompt. Raises what the client must be told."""
    if request.max_tokens < 1:
        raise bad_field("max_tokens", f"{request.max_tokens} is out of range; at least 1.")
    chat = to_chat_request(request)
    _limit_thinking(state, request, chat)
    job = await prepare_chat(state, chat, public_id)
    assert isinstance(job.params, SamplingParams)
    room = state.engine.config.model.max_model_len - len(job.prompt.token_ids)
    job.params.max_tokens = min(request.max_tokens, room)
    return MessageJob(job, f"msg_{public_id}", fills_context=room < request.max_tokens)


async def count_tokens(
    state: ServerState, request: protocol.CountTokensRequest, public_id: str
) -> protocol.CountTokensResponse:
    """How many tokens a request's prompt has."""
    del public_id
    state.resolve_model(request.model)
    limit = state.engine.config.model.max_model_len
    prompt = await chat_prompt(to_chat_request(request), state.engine.get_tokenizer(), None, limit, state.settings)
    return protocol.CountTokensResponse(len(prompt.token_ids))


async def answer_message(state: ServerState, job: MessageJob) -> protocol.MessageResponse:
    """The whole answer of a request that is not streamed."""
    chat = job.chat
    outputs = start_generation(state, chat.request, chat.prompt, chat.params, job.public_id)
    output = await last_output(outputs, job.public_id)
    count = token_count(state, chat)
    count.add_cached(output)
    choice = output.outputs[0]
    count.add_choice(choice)
    reader = PieceReader(chat.reader)
    pieces = reader.read(choice)
    reason, sequence = _stop(job, reader, choice)
    return protocol.MessageResponse(
        id=job.public_id,
        model=chat.model,
        content=whole_blocks(pieces, reader.call_id),
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(count),
    )


class MessageStream:
    """Writes the events of a streamed answer. See `push.AnswerStream`."""

    takes_text = True

    def __init__(self, state: ServerState, job: MessageJob) -> None:
        self._state = state
        self._job = job
        self._count = token_count(state, job.chat)
        self._reader = PieceReader(job.chat.reader)
        self._writer = BlockWriter(self._reader.call_id)
        self._opened = False

    async def open(self) -> OutputStream:
        return await open_chat(self._state, self._job.chat, self._job.public_id)

    def write(self, output: RequestOutput) -> bytes:
        """An output's events; before the first, the message without content."""
        job, count = self._job, self._count
        check_output(output, job.public_id)
        events: list[bytes] = []
        if not self._opened:
            self._opened = True
            count.add_cached(output)
            message = protocol.MessageResponse(id=job.public_id, model=job.chat.model, content=[], usage=_usage(count))
            events += [event("message_start", message=message), event("ping")]
        for choice in output.outputs:
            count.add_choice(choice)
            events += map(self._writer.write, self._reader.read(choice))
            if choice.finish_reason is not None:
                reason, sequence = _stop(job, self._reader, choice)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                end = event("message_delta", delta=delta, usage=_usage(count))
                events += [self._writer.close(), end, event("message_stop")]
        return b"".join(events)

    def write_text(self, text: str) -> bytes:
        if (kind := self._reader.plain_kind(text)) is not None and kind == self._writer.kind:
            return self._writer.write_delta(text)
        return b"".join(map(self._writer.write, self._reader.read_text(text) if kind is None else [Piece(kind, text)]))

    async def end(self, error: Exception | None) -> bytes:
        return b"" if error is None else error_event(failure_of(error, self._job.public_id))


def _stop(job: MessageJob, reader: PieceReader, choice: CompletionOutput) -> tuple[str | None, str | None]:
    """Why the answer ended, in the protocol's words; and the stop sequence that ended it."""
    if choice.finish_reason == "length":
        return "model_context_window_exceeded" if job.fills_context else "max_tokens", None
    if choice.finish_reason == "stop" and isinstance(choice.stop_reason, str):
        return "stop_sequence", choice.stop_reason
    return "tool_use" if reader.num_calls else "end_turn", None


def _usage(count: TokenCount) -> protocol.MessageUsage:
    usage = protocol.MessageUsage(count.prompt, count.completion)
    if count.details:
        usage.cache_read_input_tokens, usage.cache_creation_input_tokens = count.cached or 0, count.created
        usage.input_tokens -= usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    if count.thoughts is not None:
        usage.output_tokens_details = protocol.OutputTokensDetails(count.thoughts.total)
    return usage
