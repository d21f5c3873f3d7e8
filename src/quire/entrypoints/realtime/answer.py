"""One response of a realtime session: from its items to its events, which are those of `/v1/responses`, a little changed."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.websockets import WebSocketDisconnect

from quire.entrypoints.http.errors import Fields
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import failure_of
from quire.entrypoints.openai.answers import PieceReader
from quire.entrypoints.openai.chat_generation import ChatGeneration, prepare_generation
from quire.entrypoints.openai.prompts import run_sized
from quire.entrypoints.realtime.items import Conversation, Item
from quire.entrypoints.realtime.session_settings import RealtimeSettings
from quire.entrypoints.realtime.sounds import SoundFormat
from quire.entrypoints.responses import protocol
from quire.entrypoints.responses.events import EventWriter
from quire.entrypoints.responses.prepare import to_chat_request
from quire.outputs import RequestOutput
from quire.parsers.pieces import Piece

_STATUS = {"length": "incomplete", "abort": "cancelled"}
"""How a response ends, by its finish reason."""
Tell = Callable[[bytes], Awaitable[None]]


def event(kind: str, **fields: Any) -> bytes:
    """An event of the server."""
    return encode({"type": kind, "event_id": protocol.new_id("event"), **fields})


class RealtimeResponse(msgspec.Struct):
    """A response as its events tell it; `others`: its fields that do not change."""

    id: str
    others: Fields
    status: str = "in_progress"
    status_details: Fields | None = None
    output: list[Any] = []
    usage: Fields | None = None


class _AnswerEvents(EventWriter):
    """Writes a response's events; its items become the conversation's, where it has one."""

    def __init__(self, response: RealtimeResponse, conversation: Conversation | None, call_id: Any) -> None:
        super().__init__(response, call_id)
        self._told, self._conversation = response, conversation
        self._after = None if conversation is None else conversation.last_id

    def lifecycle(self, name: str) -> bytes:
        told = self._told
        fields = {"id": told.id, "status": told.status, "status_details": told.status_details, "usage": told.usage}
        output = [_shown(item) for item in told.output]
        return event(f"response.{name}", response={**told.others, **fields, "output": output})

    def write_delta(self, text: str, logprobs: Any = ()) -> bytes:
        self._texts.append(text)
        if self.kind == "arguments":
            return self._of_item("response.function_call_arguments.delta", delta=text)
        return self._of_part("response.output_text.delta", delta=text)

    def close(self, status: str) -> list[bytes]:
        events = super().close(status)
        if not events or self._conversation is None:
            return events
        item = Item(_shown(self._item), SoundFormat())
        added = self._in_conversation("done")
        self._conversation.answer(item, self._after)
        self._after = item.id
        return [*events, added]

    def _open(self, kind: str, piece: Piece) -> list[bytes]:
        first, *others = super()._open(kind, piece)
        return [first, *others] if self._conversation is None else [first, self._in_conversation("added"), *others]

    def _in_conversation(self, happened: str) -> bytes:
        return event(f"conversation.item.{happened}", previous_item_id=self._after, item=_shown(self._item))

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        if isinstance(self._item, protocol.FunctionCallItem):
            fields["call_id"] = self._item.call_id
        return super()._of_item(kind, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        if "item" in fields:
            fields["item"] = _shown(fields["item"])
        if "part" in fields:
            fields["part"] = {"type": "text", "text": fields["part"].text}
        fields.pop("logprobs", None)
        return event(kind, response_id=self._told.id, **fields)


def _shown(item: protocol.OutputItem) -> Fields:
    fields = msgspec.to_builtins(item) | {"object": "realtime.item"}
    if "content" in fields:
        fields["content"] = [{"type": part["type"], "text": part["text"]} for part in fields["content"]]
    return fields


class Answer:
    """A response in the making.

    Args:
        items: what it answers.
        conversation: which its items join; None for a response beside it.
        tell: sends an event.
    """

    def __init__(
        self,
        state: ServerState,
        settings: RealtimeSettings,
        items: list[Item],
        conversation: Conversation | None,
        conversation_id: str,
        tell: Tell,
    ) -> None:
        self._state, self._settings, self._items, self._tell = state, settings, items, tell
        self._conversation, self._is_open, self._is_cancelled = conversation, False, False
        asked = settings.max_output_tokens
        self._most = asked if isinstance(asked, int) else None
        others = {
            "object": "realtime.response",
            "conversation_id": None if conversation is None else conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": asked or "inf",
            "metadata": settings.metadata,
        }
        self.response = RealtimeResponse(protocol.new_id("resp"), others)

    async def run(self) -> None:
        """Answer. Raises what the client must be told where there is no response yet."""
        with self._state.preparing():
            chat = await self._prepare()
        stream, writer = await chat.open(), _AnswerEvents(self.response, self._conversation, chat.reader.call_id)
        try:
            async with aclosing(stream.outputs()) as outputs:
                await self._tell(writer.lifecycle("created"))
                self._check_wanted()
                reader = PieceReader(chat.reader)
                async for output in outputs:
                    assert isinstance(output, RequestOutput)
                    await self._tell_all(self._read(chat, reader, writer, output))
        except WebSocketDisconnect:
            raise
        except Exception as error:
            detail = failure_of(error, self.response.id).detail
            self._end("failed", error={"type": detail.type, "code": detail.code, "message": detail.message})
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            self._end("cancelled", reason="client_cancelled")
        status = "completed" if self.response.status == "completed" else "incomplete"
        events = writer.close(status)
        if status == "completed" and not self.response.output:
            events = writer.write_nothing()
        self.response.usage = _usage(chat)
        await self._tell_all([*events, writer.lifecycle("done")])

    async def _prepare(self) -> ChatGeneration:
        size = sum(len(part.get("audio") or "") for item in self._items for part in item.fields.get("content") or ())
        items = await run_sized(size, self._read_items)
        settings = msgspec.structs.replace(self._settings, conversation=None, stream=True)
        chat = to_chat_request(settings, [], items)
        return await prepare_generation(self._state, chat, self.response.id, prompt_field="input", at_most=self._most)

    def _read_items(self) -> list[Fields]:
        return [item.read(f"input[{index}]") for index, item in enumerate(self._items)]

    def _read(
        self, chat: ChatGeneration, reader: PieceReader, writer: _AnswerEvents, output: RequestOutput
    ) -> list[bytes]:
        """An output's events. Thoughts are not told."""
        chat.note(output)
        (choice,) = output.outputs
        chat.count.add_choice(choice)
        if choice.finish_reason is not None:
            status = _STATUS.get(choice.finish_reason, "completed")
            self._end(status, **({"reason": "max_output_tokens"} if status == "incomplete" else {}))
        return [each for piece in reader.read(choice) if piece.kind != "reasoning" for each in writer.write(piece)]

    def cancel(self, task: "asyncio.Task[None]") -> None:
        """The client wants no more; a response that has not begun ends when it does."""
        self._is_cancelled = True
        if self._is_open:
            task.cancel()

    def _check_wanted(self) -> None:
        self._is_open = True
        if self._is_cancelled:
            raise asyncio.CancelledError

    def _end(self, status: str, **details: Any) -> None:
        self.response.status = status
        self.response.status_details = None if status == "completed" else {"type": status, **details}

    async def _tell_all(self, events: list[bytes]) -> None:
        for each in events:
            await self._tell(each)


def _usage(chat: ChatGeneration) -> Fields:
    count = chat.count
    return {
        "total_tokens": count.prompt + count.completion,
        "input_tokens": count.prompt,
        "output_tokens": count.completion,
        "input_token_details": {"cached_tokens": count.cached or 0},
    }
