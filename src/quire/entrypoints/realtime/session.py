"""One realtime session: its client's events, the sound that is gathered, the conversation, and the work that runs beside.

What is wrong with one event is answered with an error event; the session goes on.
"""

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import msgspec
from starlette.websockets import WebSocketDisconnect

from quire import envs
from quire.entrypoints.audio.hearing import NewText, prepare_hearing
from quire.entrypoints.audio.transcripts import TranscriptionRequest
from quire.entrypoints.http.errors import Fields, bad_field, bad_request
from quire.entrypoints.http.state import ServerState
from quire.entrypoints.http.streaming import cancel, failure_of
from quire.entrypoints.openai.prompts import input_processor, run_sized
from quire.entrypoints.realtime.answer import Answer, Tell, event
from quire.entrypoints.realtime.items import Conversation, Item, new_item
from quire.entrypoints.realtime.session_settings import (
    VLLM_FORMAT,
    InputTranscription,
    new_session,
    response_settings,
    updated_session,
)
from quire.entrypoints.realtime.sounds import SoundFormat, decode_sound
from quire.entrypoints.responses.protocol import new_id
from quire.media import AUDIO
from quire.multimodal.audio import read_audio

MAX_AT_ONCE = 16
"""Responses and transcriptions of one session that run side by side."""
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class ClientEvent(msgspec.Struct):
    """Any event of a client; each reads its own fields."""

    type: str
    event_id: str | None = None
    session: Fields | None = None
    model: str | None = None
    audio: str = ""
    final: bool = False
    item: Fields | None = None
    item_id: str | None = None
    previous_item_id: str | None = None
    response: Fields | None = None
    response_id: str | None = None


class RealtimeSession:
    """One client's session.

    Args:
        model: the name that the client calls it by.
        transcribes: it only writes what it hears.
        tell: sends an event.
    """

    def __init__(self, state: ServerState, model: str, transcribes: bool, tell: Tell) -> None:
        processor = input_processor(state)
        halves = None if processor is None else processor.halves
        self._hears_alone = halves is not None and halves.half.modality == AUDIO
        self._state, self._tell = state, tell
        fields = new_session(model, transcribes=transcribes or self._hears_alone)
        self._fields, self._settings = updated_session(fields, {})
        self._is_vllms = False
        self._buffer = bytearray()
        self._conversation, self._conversation_id = Conversation(state.settings.max_body_bytes), new_id("conv")
        self._last_heard: str | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._answers: dict[str, Answer] = {}
        self._active: str | None = None
        self._handlers = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "response.create": self._respond,
            "response.cancel": self._cancel,
        }

    async def open(self) -> None:
        """Tell the client what it has."""
        await self._tell(event("session.created", session=self._fields))

    async def take(self, message: bytes) -> None:
        """Do what an event of the client asks for. Raises WebSocketDisconnect: it has gone."""
        event_id = None
        try:
            given = self._state.decoder.decode(message, ClientEvent)
            event_id = given.event_id
            if given.type not in self._handlers:
                raise bad_field("type", f"{given.type[:100]!r} is not known; known: {', '.join(self._handlers)}.")
            await self._handlers[given.type](given)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            await self._refuse(error, event_id)

    async def close(self) -> None:
        """End what runs."""
        for task in tuple(self._tasks.values()):
            await cancel(task)

    async def _refuse(self, error: Exception, event_id: str | None) -> None:
        detail = failure_of(error, self._fields["id"]).detail
        if self._is_vllms:
            await self._tell(event("error", error=detail.message, code=detail.code))
            return
        await self._tell(event("error", error={**msgspec.to_builtins(detail), "event_id": event_id}))

    def _begin(self, name: str, work: Coroutine[Any, Any, None], event_id: str | None) -> None:
        async def run() -> None:
            self._state.begin_request()
            try:
                await work
            except WebSocketDisconnect:
                pass
            except Exception as error:
                await self._refuse(error, event_id)
            finally:
                self._state.end_request()
                self._tasks.pop(name, None)
                self._answers.pop(name, None)
                self._active = None if self._active == name else self._active

        self._tasks[name] = asyncio.ensure_future(run())

    async def _accept(self) -> None:
        """Raise what keeps new work from beginning."""
        if len(self._tasks) >= MAX_AT_ONCE:
            raise bad_request(f"{MAX_AT_ONCE} responses and transcriptions run already.", code="too_many_at_once")
        await self._state.gate.enter()
        self._state.accept_work()

    # --- the session ---

    async def _update(self, given: ClientEvent) -> None:
        changes = given.session
        if changes is None:
            if given.model is None:
                raise bad_field("session", "this field is required.", "missing_field")
            self._is_vllms = True
            heard = {"format": VLLM_FORMAT, "transcription": {"model": given.model}}
            changes = {"type": "transcription", "model": given.model, "audio": {"input": heard}}
        fields, settings = updated_session(self._fields, changes)
        await self._state.look_for_model(settings.model)
        self._state.resolve_model(settings.model)
        wanted = settings.audio.input.transcription
        if wanted is not None and not self._hears_alone:
            message = "the served model does not transcribe; give null, and sounds are heard by the model that answers."
            raise bad_field("session.audio.input.transcription", message, "not_supported")
        self._fields, self._settings = fields, settings
        await self._tell(event("session.updated", session=fields))

    # --- sounds ---

    async def _append(self, given: ClientEvent) -> None:
        limit = envs.QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB << 20
        if len(self._buffer) + len(given.audio) * 3 // 4 > limit:
            message = f"the buffer would have more than {limit} bytes (QUIRE_MAX_AUDIO_CLIP_FILESIZE_MB)."
            raise bad_field("audio", message, "input_audio_buffer_full")
        self._buffer += await run_sized(len(given.audio), decode_sound, given.audio, "audio")

    async def _clear(self, given: ClientEvent) -> None:
        self._buffer.clear()
        await self._tell(event("input_audio_buffer.cleared"))

    async def _commit(self, given: ClientEvent) -> None:
        if self._is_vllms and not given.final:  # its sound comes behind it
            return
        if not self._buffer:
            raise bad_request("The buffer is empty.", code="input_audio_buffer_commit_empty")
        heard = self._settings.audio.input
        wanted = heard.transcription or (InputTranscription() if self._settings.type == "transcription" else None)
        if wanted is not None:
            await self._accept()
        data = bytes(self._buffer)
        text = (await run_sized(len(data), base64.b64encode, data)).decode()
        part: Fields = {"type": "input_audio", "transcript": None, "audio": text}
        item = Item({"type": "message", "id": new_id("item"), "role": "user", "content": [part]}, heard.format)
        previous = self._last_heard
        if self._settings.type == "realtime":
            previous = self._conversation.insert(item)
        self._buffer.clear()
        self._last_heard = item.id
        await self._tell(event("input_audio_buffer.committed", previous_item_id=previous, item_id=item.id))
        await self._tell_item(item, previous)
        if wanted is not None:
            self._begin(item.id, self._transcribe(item, data, heard.format, wanted), given.event_id)

    async def _transcribe(self, item: Item, data: bytes, sound: SoundFormat, wanted: InputTranscription) -> None:
        place = {"item_id": item.id, "content_index": 0}
        try:
            request = TranscriptionRequest(model=wanted.model, language=wanted.language, prompt=wanted.prompt)

            def read(rate: int) -> Any:
                return read_audio(sound.read(data), rate, "audio")

            with self._state.preparing():
                hearing = await prepare_hearing(self._state, read, request, "transcribe", item.id)
            await hearing.listen()
            texts, text = NewText(hearing.tokens), ""
            async for index, output in hearing.stream():
                if new := texts.take(index, output.outputs[0]):
                    text += new
                    await self._tell(
                        event(
                            "transcription.delta" if self._is_vllms else f"{_TRANSCRIPTION}.delta", **place, delta=new
                        )
                    )
            usage = {"type": "duration", "seconds": hearing.duration}
        except WebSocketDisconnect:
            raise
        except Exception as error:
            if self._is_vllms:
                raise
            detail = failure_of(error, item.id).detail
            await self._tell(event(f"{_TRANSCRIPTION}.failed", **place, error=detail))
            return
        if self._is_vllms:
            await self._tell(event("transcription.done", text=text, usage=usage))
            return
        item.fields["content"][0]["transcript"] = text
        await self._tell(event(f"{_TRANSCRIPTION}.completed", **place, transcript=text, usage=usage))

    # --- the conversation ---

    async def _tell_item(self, item: Item, previous: str | None) -> None:
        for happened in ("added", "done"):
            told = event(f"conversation.item.{happened}", previous_item_id=previous, item=item.shown())
            await self._tell(told)

    async def _create_item(self, given: ClientEvent) -> None:
        size = len(msgspec.json.encode(given.item))
        item = await run_sized(size, new_item, given.item, self._settings.audio.input.format)
        await self._tell_item(item, self._conversation.insert(item, given.previous_item_id))

    async def _retrieve_item(self, given: ClientEvent) -> None:
        item = self._conversation.items[self._conversation.find(given.item_id)]
        await self._tell(event("conversation.item.retrieved", item=item.shown() | item.fields))

    async def _delete_item(self, given: ClientEvent) -> None:
        self._conversation.delete(given.item_id)
        await self._tell(event("conversation.item.deleted", item_id=given.item_id))

    # --- responses ---

    async def _respond(self, given: ClientEvent) -> None:
        changes = given.response or {}
        settings = response_settings(self._fields, changes)
        if settings.type == "transcription":
            raise bad_request("A session of type 'transcription' has no responses.", param="type", code="not_supported")
        shares = settings.conversation == "auto"
        if shares and self._active is not None:
            message = f"The response {self._active!r} is not over."
            raise bad_request(message, code="conversation_already_has_active_response")
        await self._accept()
        items = list(self._conversation.items)
        if settings.input is not None:
            sound = settings.audio.input.format
            given_items = [new_item(each, sound, f"response.input[{i}]") for i, each in enumerate(settings.input)]
            items = self._conversation.resolve(given_items)
        settings.model = self._state.resolve_model(settings.model)
        answer = Answer(
            self._state, settings, items, self._conversation if shares else None, self._conversation_id, self._tell
        )
        name = answer.response.id
        self._answers[name] = answer
        self._active = name if shares else self._active
        self._begin(name, answer.run(), given.event_id)

    async def _cancel(self, given: ClientEvent) -> None:
        name = given.response_id or self._active
        if name is None or name not in self._answers:
            raise bad_field("response_id", "there is no such response in progress.", "response_cancel_not_active")
        self._answers[name].cancel(self._tasks[name])
