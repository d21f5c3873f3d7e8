"""`/v1/realtime` as OpenAI's own client uses it: conversations with a tiny model that hears, and what becomes of wrong events."""

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import openai
import pytest
from tests.oracles.server_process import SERVE, ServerProcess
from tests.oracles.tiny_encoder_decoder import draw_sound
from tests.oracles.tiny_listeners import make_tiny_listener
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

RATE = 24000
SOUND = (draw_sound(5, 9000) * 32767).astype(np.int16)
KEY = "sesame"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_output_tokens": 8}
AT_ONCE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hear"}]}
SECONDS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_listener("Qwen2AudioForConditionalGeneration", tmp_path_factory.mktemp("hearing"))
    flags = ["--model", str(folder), "--port", "0", "--max-model-len", "256", "--cpu-threads", "1", "--api-key", KEY]
    flags += ["--kv-cache-memory-bytes", "16M", "--served-model-name", "hears", "--max-num-seqs", "4"]
    process = ServerProcess(*SERVE, *flags)
    yield process
    process.kill()


class Client:
    """OpenAI's client, which keeps every event that has come."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.seen: list[Any] = []

    async def send(self, **event: Any) -> None:
        await self.connection.send(event)

    async def until(self, kind: str) -> Any:
        """The next event of a kind."""
        while True:
            event = await asyncio.wait_for(self.connection.recv(), SECONDS)
            self.seen.append(event)
            if event.type == kind:
                return event
            assert event.type != "error", event

    async def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        await self.send(type="conversation.item.create", item={"type": "message", "role": "user", "content": content})

    async def hear(self, samples: np.ndarray, size: int = 3000) -> None:
        data = samples.astype("<i2").tobytes()
        for start in range(0, len(data), size):
            piece = base64.b64encode(data[start : start + size]).decode()
            await self.send(type="input_audio_buffer.append", audio=piece)
        await self.send(type="input_audio_buffer.commit")

    async def answer(self, **response: Any) -> Any:
        await self.send(type="response.create", response=response)
        return (await self.until("response.done")).response


@asynccontextmanager
async def session(server: ServerProcess, **options: Any) -> AsyncIterator[Client]:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    async with client.realtime.connect(model="hears", **options) as connection:
        opened = Client(connection)
        await opened.until("session.created")
        yield opened


def talk(server: ServerProcess, conversation: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with session(server, **options) as client:
            await conversation(client)

    asyncio.run(run())


def chat(server: ServerProcess, *messages: Any) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
    answer = client.chat.completions.create(
        model="hears", messages=list(messages), max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].message.content or ""


def test_a_conversation_is_answered_as_chat_completions_answer_it(server: ServerProcess) -> None:
    first = chat(server, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hear me"})

    async def conversation(client: Client) -> None:
        await client.send(type="session.update", session={"type": "realtime", "instructions": "Be brief.", **GREEDY})
        updated = await client.until("session.updated")
        assert updated.session.instructions == "Be brief." and updated.session.audio.input.format.rate == RATE
        await client.say("Hear me")
        done = await client.answer(metadata={"turn": "1"})
        (item,) = done.output
        assert (done.status, item.role, item.content[0].text) == ("incomplete", "assistant", first)
        assert done.usage.output_tokens == 8 and done.metadata == {"turn": "1"}
        assert done.status_details.reason == "max_output_tokens"
        deltas = [event.delta for event in client.seen if event.type == "response.output_text.delta"]
        assert "".join(deltas) == first
        kinds = [event.type for event in client.seen]
        order = [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
        ]
        order += ["response.output_text.delta", "response.output_text.done", "response.content_part.done"]
        order += ["response.output_item.done", "response.done"]
        places = [kinds.index(kind, kinds.index("response.created")) for kind in order]
        assert places == sorted(places)
        assert len({event.event_id for event in client.seen}) == len(client.seen)
        await client.say("and again")  # the answer before it is part of the conversation
        again = (await client.answer()).output[0].content[0].text
        spoken = [{"role": "assistant", "content": first}, {"role": "user", "content": "and again"}]
        assert again == chat(
            server, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hear me"}, *spoken
        )

    talk(server, conversation)


def test_a_sound_that_is_sent_in_pieces_is_heard_as_a_file_is(server: ServerProcess) -> None:
    import io

    import soundfile

    file = io.BytesIO()
    soundfile.write(file, SOUND, RATE, format="WAV", subtype="PCM_16")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}
    expected = chat(server, {"role": "user", "content": [part]})

    async def conversation(client: Client) -> None:
        await client.hear(SOUND)
        committed = await client.until("input_audio_buffer.committed")
        item = (await client.until("conversation.item.done")).item
        assert item.id == committed.item_id and item.content[0].audio is None
        done = await client.answer(**GREEDY)
        assert done.output[0].content[0].text == expected
        await client.send(type="conversation.item.retrieve", item_id=item.id)
        kept = (await client.until("conversation.item.retrieved")).item.content[0].audio
        assert base64.b64decode(kept) == SOUND.astype("<i2").tobytes()
        data = base64.b64encode(SOUND.astype("<i2").tobytes()).decode()
        beside = [{"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": data}]}]
        done = await client.answer(conversation="none", input=beside, **GREEDY)
        assert done.output[0].content[0].text == expected and done.conversation_id is None
        done = await client.answer(conversation="none", input=[{"type": "item_reference", "id": item.id}], **GREEDY)
        assert done.output[0].content[0].text == expected

    talk(server, conversation)


def test_each_wrong_event_is_answered_with_an_error_and_the_session_goes_on(server: ServerProcess) -> None:
    audio = {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
    wrong: dict[str, tuple[Any, str | None]] = {
        "no JSON": ("hello", None),
        "no object": ([1], None),
        "an unknown type": ({"type": "fly"}, "type"),
        "a wrong field": ({"type": "conversation.item.delete", "item_id": 7}, "item_id"),
        "an empty buffer": ({"type": "input_audio_buffer.commit"}, None),
        "no base64": ({"type": "input_audio_buffer.append", "audio": "\u00e4"}, "audio"),
        "an item of no kind": ({"type": "conversation.item.create", "item": {"type": "song"}}, "item.type"),
        "a result of no call": (
            {
                "type": "conversation.item.create",
                "item": {"type": "function_call_output", "call_id": "c", "output": ""},
            },
            "item.call_id",
        ),
        "an item behind none": (
            {"type": "conversation.item.create", "previous_item_id": "x", "item": AT_ONCE},
            "previous_item_id",
        ),
        "turns": (
            {"type": "session.update", "session": {"type": "realtime", **audio}},
            "session.audio.input.turn_detection",
        ),
        "speech": (
            {"type": "response.create", "response": {"output_modalities": ["audio"]}},
            "response.output_modalities",
        ),
        "a number": (
            {"type": "session.update", "session": {"type": "realtime", "instructions": 7}},
            "session.instructions",
        ),
        "a model": ({"type": "session.update", "session": {"type": "realtime", "model": "other"}}, "model"),
        "nothing to answer": ({"type": "response.create"}, "input"),
        "nothing to cancel": ({"type": "response.cancel"}, "response_id"),
    }

    async def conversation(client: Client) -> None:
        for name, (event, param) in wrong.items():
            if isinstance(event, dict):
                event = {**event, "event_id": name}
            await client.connection.send_raw(event if isinstance(event, str) else json.dumps(event))
            told = await asyncio.wait_for(client.connection.recv(), SECONDS)
            assert told.type == "error", (name, told)
            assert told.error.param == param, (name, told.error)
            assert told.error.type in ("invalid_request_error", "not_found_error"), told.error
            assert told.error.event_id in (name, None)
        await client.say("Hear me")
        assert (await client.answer(**GREEDY)).status == "incomplete"

    talk(server, conversation)


def test_a_response_is_cancelled_and_others_run_beside_the_one_of_the_conversation(server: ServerProcess) -> None:
    async def conversation(client: Client) -> None:
        await client.say("Hear me")
        await client.until("conversation.item.done")
        long = GREEDY | {"max_output_tokens": 200}
        await client.send(type="response.create", response=long)
        created = (await client.until("response.created")).response
        await client.send(type="response.create", event_id="second")
        while (event := await asyncio.wait_for(client.connection.recv(), SECONDS)).type != "error":
            pass
        assert event.error.code == "conversation_already_has_active_response" and event.error.event_id == "second"
        beside = {"conversation": "none", "input": [AT_ONCE]} | GREEDY | {"max_output_tokens": 2}
        await client.send(type="response.create", response=beside)
        await client.send(type="response.cancel", response_id=created.id)
        ended = {}
        while len(ended) < 2:
            done = (await client.until("response.done")).response
            ended[done.id] = done
        cancelled = ended.pop(created.id)
        assert (cancelled.status, cancelled.status_details.reason) == ("cancelled", "client_cancelled")
        assert [done.usage.output_tokens for done in ended.values()] == [2]
        await client.say("and again")
        assert (await client.answer(**GREEDY)).status == "incomplete"

    talk(server, conversation)


def test_a_client_without_a_key_or_with_a_wrong_model_is_refused_before_it_is_connected(server: ServerProcess) -> None:
    url = f"{server.url}/v1/realtime".replace("http", "ws")

    async def refused(url: str, **options: Any) -> tuple[int, Any]:
        with pytest.raises(InvalidStatus) as caught:
            async with connect(url, **options):
                pass
        return caught.value.response.status_code, json.loads(caught.value.response.body)["error"]

    async def run() -> None:
        status, error = await refused(url)
        assert (status, error["code"]) == (401, "invalid_api_key")
        key = {"additional_headers": {"authorization": f"Bearer {KEY}"}}
        status, error = await refused(f"{url}?model=other", **key)
        assert (status, error["param"]) == (404, "model")
        status, error = await refused(url, origin="https://elsewhere.example", **key)
        assert (status, error["code"]) == (403, "origin_refused")
        async with connect(url, subprotocols=["realtime", f"openai-insecure-api-key.{KEY}"]) as browser:
            assert browser.subprotocol == "realtime" and json.loads(await browser.recv())["type"] == "session.created"
            with pytest.raises(ConnectionClosed) as caught:
                await browser.send("x" * (33 << 20))
                await browser.recv()
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009

    asyncio.run(run())
    plain = server.client.get("/v1/realtime", headers={"authorization": f"Bearer {KEY}"})
    assert plain.status_code == 426 and plain.headers["upgrade"] == "websocket"


def test_what_runs_ends_with_its_client(server: ServerProcess) -> None:
    async def run() -> None:
        async with session(server) as client:
            await client.say("Hear me")
            await client.send(type="response.create", response=GREEDY | {"max_output_tokens": 200})
            await client.until("response.output_text.delta")
        for _ in range(600):
            answer = await asyncio.to_thread(server.client.get, "/load", headers={"authorization": f"Bearer {KEY}"})
            if not any(answer.json().values()):
                return
            await asyncio.sleep(0.05)
        pytest.fail(f"still running: {answer.text}")

    asyncio.run(run())


def test_a_draining_server_ends_what_runs_and_then_its_sessions() -> None:
    process = ServerProcess("-m", "tests.oracles.fake_server", "3")

    async def run() -> None:
        client = openai.AsyncOpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
        async with client.realtime.connect() as connection, client.realtime.connect() as idle:
            busy = Client(connection)
            await busy.say("Hear me")
            await busy.send(type="response.create", response={"max_output_tokens": 20})
            await busy.until("response.output_text.delta")  # the engine gives three tokens, and waits
            process.popen.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.line_with, "Draining: 1 request")
            await busy.send(type="response.create", response={"conversation": "none"}, event_id="late")
            while (event := await asyncio.wait_for(connection.recv(), SECONDS)).type != "error":
                pass
            assert event.error.code == "unavailable" and event.error.event_id == "late"
            process.popen.send_signal(signal.SIGUSR1)
            done = (await busy.until("response.done")).response
            assert (done.status, done.usage.output_tokens) == ("incomplete", 20)
            for each in (connection, idle):
                with pytest.raises(ConnectionClosed) as caught:
                    while True:
                        await asyncio.wait_for(each.recv(), SECONDS)
                assert caught.value.rcvd is not None and caught.value.rcvd.code == 1012

    try:
        asyncio.run(run())
        assert process.popen.wait(SECONDS) == 0
    finally:
        process.kill()
