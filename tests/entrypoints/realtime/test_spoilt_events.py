"""Events that are spoilt in every way: a session answers each of them, harms nothing, and goes on."""

import asyncio
import json
import random
from typing import Any

import pytest
from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.realtime.session import MAX_AT_ONCE, RealtimeSession

SECONDS = 60
ODD: list[Any] = [
    None,
    True,
    -1,
    1e400,
    7.5,
    "",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    {"type": 3},
    [{"type": "message"}],
    "auto",
]
MESSAGE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
SOUND = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "4"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
FORMAT = {"format": {"type": "audio/pcm", "rate": 24000}, "transcription": {"language": "de"}, "turn_detection": None}
EVENTS: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"type": "realtime", "tools": [TOOL], "audio": {"input": FORMAT}, "seed": 3}},
    {"type": "input_audio_buffer.append", "audio": "AAAA"},
    {"type": "input_audio_buffer.commit", "final": True},
    {"type": "input_audio_buffer.clear"},
    *({"type": "conversation.item.create", "item": item} for item in (MESSAGE, SOUND, CALL, RESULT)),
    {"type": "conversation.item.retrieve", "item_id": "x"},
    {"type": "conversation.item.delete", "item_id": "x"},
    {"type": "response.create", "response": {"input": [MESSAGE], "conversation": "none", "max_output_tokens": 2}},
    {"type": "response.cancel", "response_id": "x"},
]


def spoil(value: Any, draw: random.Random) -> Any:
    """The value with one odd thing somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(sorted(value))
        kept = {key: each for key, each in value.items() if key != name}
        return kept if draw.random() < 0.2 else kept | {name: spoil(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        return [spoil(value[0], draw), *value[1:]]
    return draw.choice(ODD)


class Line:
    """What a session tells."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.news = asyncio.Event()

    async def tell(self, event: bytes) -> None:
        self.told.append(json.loads(event))
        self.news.set()

    async def until(self, kind: str, start: int = 0) -> dict[str, Any]:
        while True:
            self.news.clear()
            found = [event for event in self.told[start:] if event["type"] == kind]
            if found:
                return found[0]
            await asyncio.wait_for(self.news.wait(), SECONDS)


def test_a_session_outlives_whatever_it_is_told() -> None:
    async def run() -> None:
        state, line, draw = ServerState(ServerSettings(), FakeAsyncLLM()), Line(), random.Random(5)  # type: ignore[arg-type]
        session = RealtimeSession(state, "fake", False, line.tell)
        for number in range(600):
            event = draw.choice(EVENTS)
            spoilt = event if draw.random() < 0.2 else spoil(event, draw)
            text = json.dumps(spoilt).encode("utf-8", "surrogatepass")
            await session.take(text[: draw.randrange(len(text))] if number % 20 == 0 else text)
            await asyncio.sleep(0)
        errors = [event for event in line.told if event["type"] == "error"]
        assert len(errors) > 200 and {event["error"]["type"] for event in errors} <= {
            "invalid_request_error", "not_found_error",
        }  # fmt: skip
        start = len(line.told)
        settled: Any = {"type": "response.create", "response": {"tools": [], "tool_choice": "auto", "instructions": ""}}
        settled["response"] |= {"input": [MESSAGE], "conversation": "none", "max_output_tokens": 4}
        fresh = RealtimeSession(state, "fake", False, line.tell)
        await fresh.take(json.dumps(settled).encode())
        done = await line.until("response.done", start)
        assert done["response"]["usage"]["output_tokens"] == 4
        await session.close()
        await fresh.close()
        assert state.in_flight == 0 and state.num_preparing == 0

    asyncio.run(run())


@pytest.mark.parametrize("shares", [True, False])
def test_responses_side_by_side_are_bounded_and_end_with_their_session(shares: bool) -> None:
    async def run() -> None:
        engine = FakeAsyncLLM()
        engine.gate = asyncio.Semaphore(0)
        state, line = ServerState(ServerSettings(), engine), Line()  # type: ignore[arg-type]
        session = RealtimeSession(state, "fake", False, line.tell)
        response = {"input": [MESSAGE], "max_output_tokens": 2, "conversation": "auto" if shares else "none"}
        for _ in range(MAX_AT_ONCE + 1):
            await session.take(json.dumps({"type": "response.create", "response": response}).encode())
        refused = [event["error"]["code"] for event in line.told if event["type"] == "error"]
        busy = ["conversation_already_has_active_response"] * MAX_AT_ONCE
        assert refused == (busy if shares else ["too_many_at_once"])
        await line.until("response.created")
        await session.close()
        assert state.in_flight == 0 and len(engine.aborted) == len(engine.started) > 0

    asyncio.run(run())
