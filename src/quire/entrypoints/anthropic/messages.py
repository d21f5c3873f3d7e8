"""`POST /v1/messages` and `/v1/messages/count_tokens`: from a typed request to a message or its events.

Preparation, prompts and parsers are those of chat completions; the protocol's own shapes are in `conversion.py` and here:
content blocks, whole or as the events of a stream, which end where a piece of another kind begins.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from quire.engine.request_stream import OutputStream
from quire.entrypoints.anthropic import protocol
from quire.entrypoints.anthropic.conversion import to_chat_request
from quire.entrypoints.anthropic.protocol import Block, TextBlock, ThinkingBlock, ToolUseBlock, error_event
from quire.entrypoints.http.errors import bad_field
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat_generation import ChatGeneration, prepare_generation
from quire.entrypoints.openai.generation import TokenCount
from quire.entrypoints.openai.prompts import count_prompt_tokens
from quire.entrypoints.openai.protocol import ChatCompletionRequest, GenerateRequest
from quire.entrypoints.openai.token_generation import rendered
from quire.errors import RequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.parsers.pieces import Piece, read_arguments
from quire.parsers.thinking import check_budget
from quire.sampling_params import SamplingParams

_DELTAS = {
    "content": b'{"type":"text_delta","text":',
    "reasoning": b'{"type":"thinking_delta","thinking":',
    "arguments": b'{"type":"input_json_delta","partial_json":',
}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


class BlockWriter:
    """Puts an answer's blocks together, and writes their events. A delta is its text between two constant strings.

    Args:
        call_id: the id of a call, from its function's name, its index, and the id that the model wrote, if any.

    Attributes:
        kind: of the pieces that go into the open block; None where none is open.
        blocks: those that have begun; the open one has no content yet.
    """

    def __init__(self, call_id: Callable[[str, int, str], str]) -> None:
        self._call_id = call_id
        self.kind: str | None = None
        self.blocks: list[Block] = []
        self._head = b""
        self._texts: list[str] = []

    def write(self, piece: Piece) -> bytes:
        """The events that a piece makes. A call, or a piece of another kind than those before, begins a block."""
        if piece.kind == self.kind:
            return self.write_delta(piece.text)
        closing = self.close()
        if piece.kind == "call":
            self.kind = "arguments"
            block: Block = ToolUseBlock(self._call_id(piece.text, piece.index, piece.id), piece.text)
        else:
            self.kind, block = piece.kind, ThinkingBlock() if piece.kind == "reasoning" else TextBlock()
        index = len(self.blocks)
        self.blocks.append(block)
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
        self._head = head % (index, _DELTAS[self.kind])
        opening = closing + event("content_block_start", index=index, content_block=block)
        return opening if piece.kind == "call" else opening + self.write_delta(piece.text)

    def write_delta(self, text: str) -> bytes:
        """More text of the open block."""
        self._texts.append(text)
        return self._head + encode(text) + b"}}\n\n"

    def close(self) -> bytes:
        """End the open block, if there is one."""
        if self.kind is None:
            return b""
        index, text = len(self.blocks) - 1, "".join(self._texts)
        self.kind = None
        self._texts.clear()
        closing = event("content_block_stop", index=index)
        match self.blocks[-1]:
            case TextBlock() as block:
                block.text = text
            case ToolUseBlock() as block:
                block.input = read_arguments(text)
            case ThinkingBlock() as block:
                block.thinking, block.signature = text, hashlib.sha256(text.encode()).hexdigest()
                signature = {"type": "signature_delta", "signature": block.signature}
                closing = event("content_block_delta", index=index, delta=signature) + closing
        return closing


@dataclasses.dataclass(slots=True)
class MessageJob:
    """A checked request, ready to run.

    Attributes:
        fills_context: fewer tokens than were asked for fit behind the prompt.
    """

    chat: ChatGeneration
    fills_context: bool


def _limit_thinking(state: ServerState, request: protocol.MessagesRequest, chat: ChatCompletionRequest) -> None:
    """Have `thinking.budget_tokens` kept, by models whose reasoning can be limited; to others it is a hint, and ignored."""
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
    job = await prepare_generation(
        state, chat, f"msg_{public_id}", "messages", request.max_tokens, "output_config.format.schema"
    )
    assert isinstance(job.params, SamplingParams)
    return MessageJob(job, fills_context=job.params.max_tokens != request.max_tokens)


async def render_message(state: ServerState, request: protocol.MessagesRequest, public_id: str) -> GenerateRequest:
    """A request as tokens, which other servers take. Raises what the client must be told."""
    return rendered((await prepare_message(state, request, public_id)).chat)


async def count_tokens(
    state: ServerState, request: protocol.CountTokensRequest, public_id: str
) -> protocol.CountTokensResponse:
    """How many tokens a request's prompt has."""
    state.resolve_model(request.model)
    return protocol.CountTokensResponse(await count_prompt_tokens(state, to_chat_request(request)))


async def answer_message(job: MessageJob) -> protocol.MessageResponse:
    """The whole answer of a request that is not streamed."""
    chat = job.chat
    choice = (await chat.finish()).outputs[0]
    chat.count.add_choice(choice)
    reader, writer = PieceReader(chat.reader), BlockWriter(chat.reader.call_id)
    for piece in reader.read(choice):
        writer.write(piece)
    writer.close()
    reason, sequence = _stop(job, reader, choice)
    return protocol.MessageResponse(
        id=chat.public_id,
        model=chat.model,
        content=writer.blocks,
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(chat.count),
    )


class MessageStream:
    """Writes the events of a streamed answer. See `push.AnswerStream`."""

    takes_text = True

    def __init__(self, job: MessageJob) -> None:
        self._job = job
        self._reader = PieceReader(job.chat.reader)
        self._writer = BlockWriter(job.chat.reader.call_id)
        self._opened = False

    async def open(self) -> OutputStream:
        return await self._job.chat.open()

    def write(self, output: RequestOutput) -> bytes:
        """An output's events; before the first, the message without content."""
        chat = self._job.chat
        chat.note(output)
        events: list[bytes] = []
        if not self._opened:
            self._opened = True
            usage = _usage(chat.count)
            message = protocol.MessageResponse(id=chat.public_id, model=chat.model, content=[], usage=usage)
            events += [event("message_start", message=message), event("ping")]
        for choice in output.outputs:
            chat.count.add_choice(choice)
            events += map(self._writer.write, self._reader.read(choice))
            if choice.finish_reason is not None:
                reason, sequence = _stop(self._job, self._reader, choice)
                delta = {"stop_reason": reason, "stop_sequence": sequence}
                end = event("message_delta", delta=delta, usage=_usage(chat.count))
                events += [self._writer.close(), end, event("message_stop")]
        return b"".join(events)

    def write_text(self, text: str) -> bytes:
        if (kind := self._reader.plain_kind(text)) is not None and kind == self._writer.kind:
            return self._writer.write_delta(text)
        return b"".join(map(self._writer.write, self._reader.read_text(text) if kind is None else [Piece(kind, text)]))

    async def end(self, error: Exception | None) -> bytes:
        return b"" if error is None else error_event(failure_of(error, self._job.chat.public_id))


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
