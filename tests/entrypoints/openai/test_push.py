"""Flow control of pushed streams, and how bursts of requests are let in: without sockets, step by step."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.builders import make_config, make_record, write_model_folder

from quire.engine.input_processor import InputProcessor
from quire.engine.output_processor import OutputProcessor
from quire.engine.request_stream import RequestStream
from quire.engine.tokenizer_source import TokenizerSource
from quire.entrypoints.http.admission import AT_ONCE, INLINE_CHARACTERS, AdmissionGate, encode_text
from quire.entrypoints.http.http_protocol import DirectBody, WriteBatch
from quire.entrypoints.http.push import stream_answer
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.http.streaming import ClientGone
from quire.entrypoints.openai import chunks
from quire.entrypoints.openai.completions import CompletionStream, prepare_completion
from quire.entrypoints.openai.protocol import CompletionRequest, StreamOptions
from quire.errors import EngineDeadError
from quire.request import EngineCoreOutput, EngineCoreOutputs, FinishReason

INCLUDE_USAGE = StreamOptions(include_usage=True)


class Body:
    """A direct body whose client can be slow, or go."""

    def __init__(self):
        self.is_writable, self.is_gone = True, False
        self.on_gone = self.on_writable = None
        self.written = []

    def open(self, on_writable):
        self.on_writable = on_writable

    def close(self):
        self.on_writable = None

    def write(self, data):
        assert self.is_writable and data
        self.written.append(data)


class Connection:
    """A request, and what was sent through ASGI for it."""

    def __init__(self):
        self.body = Body()
        self.scope = {"method": "POST", "type": "http", "extensions": {"quire.body": self.body}}
        self.sent = []

    async def send(self, message):
        self.sent.append(message)

    async def receive(self):
        raise AssertionError("nobody waits for a disconnect here")

    def events(self):
        parts = [message.get("body", b"") for message in self.sent]
        whole = parts[1] + b"".join(self.body.written) + b"".join(parts[2:])
        lines = whole.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line[6:]) for line in lines[:-2]]

    def text(self):
        return "".join(choice["text"] for event in self.events() for choice in event["choices"])

    def usage(self):
        usage = self.events()[-1]["usage"]
        return usage["prompt_tokens"], usage["completion_tokens"]


class HandFedEngine:
    """An engine whose tokens the test gives."""

    def __init__(self, folder):
        self.config = make_config(folder)
        self.tokenizer_source = TokenizerSource(self.config.model)
        self.inputs = InputProcessor(self.config, self.tokenizer_source)
        self.outputs = OutputProcessor()
        self.aborted = []

    def get_tokenizer(self):
        return self.inputs.require_tokenizer()

    async def open_stream(self, prompt, params, request_id, *, priority=0):
        processed = self.inputs.process(request_id, prompt, params, priority=priority)
        self.record = make_record(processed, self.get_tokenizer())
        self.outputs.add(self.record)
        return RequestStream(self.record, self.aborted.append)

    def feed(self, *token_ids, finish=None):
        core_id = self.record.sequences[0].core_id
        for token_id in token_ids:
            news = EngineCoreOutputs(plain_ids=[core_id], plain_tokens=[token_id])
            if finish is not None and token_id == token_ids[-1]:
                news = EngineCoreOutputs(outputs=[EngineCoreOutput(core_id, [token_id], finish)])
            touched, _ = self.outputs.process(news, 1.0)
            for record in touched:
                if record.notify is not None:
                    record.notify()


@pytest.fixture
def state(tmp_path):
    return ServerState(ServerSettings(), HandFedEngine(write_model_folder(tmp_path / "hash")))


async def open_response(state):
    """A stream's response, when one token has come."""
    state.engine.outputs, connection = OutputProcessor(), Connection()
    body = CompletionRequest(prompt=[5, 6], max_tokens=200, ignore_eos=True, stream=True, stream_options=INCLUDE_USAGE)
    starting = asyncio.create_task(
        stream_answer(connection, CompletionStream(await prepare_completion(state, body, "id")))
    )
    while not len(state.engine.outputs):
        assert not starting.done(), starting.result()
        await asyncio.sleep(0)
    state.engine.feed(67)
    return connection, await starting


async def begin(state):
    """A running stream of which one token is out."""
    connection, response = await open_response(state)
    answering = asyncio.create_task(response(connection.scope, connection.receive, connection.send))
    while connection.body.on_gone is None:
        assert not answering.done(), answering.result()
        await asyncio.sleep(0)
    return connection, answering


def text_of_tokens(state, *token_ids):
    return state.engine.get_tokenizer().decode(list(token_ids))


def test_a_token_is_written_where_it_is_fed(state):
    async def main():
        connection, answering = await begin(state)
        for number, token_id in enumerate((68, 69, 70), 1):
            state.engine.feed(token_id)
            assert len(connection.body.written) == number
        state.engine.feed(71, finish=FinishReason.LENGTH)
        await answering
        assert connection.text() == text_of_tokens(state, 67, 68, 69, 70, 71)
        assert connection.usage() == (2, 5) and not state.engine.aborted

    asyncio.run(main())


def test_what_a_slow_client_does_not_read_is_kept_and_comes_at_once(state):
    async def main():
        connection, answering = await begin(state)
        connection.body.is_writable = False
        state.engine.feed(68, 69, 70)
        connection.body.is_writable = True
        connection.body.on_writable()
        assert len(connection.body.written) == 1
        connection.body.is_writable = False
        state.engine.feed(71, 72, finish=FinishReason.LENGTH)
        await asyncio.sleep(0)
        assert not answering.done()
        connection.body.is_writable = True
        connection.body.on_writable()
        await answering
        assert connection.text() == text_of_tokens(state, 67, 68, 69, 70, 71, 72)
        assert connection.usage() == (2, 6) and len(connection.body.written) == 1

    asyncio.run(main())


def test_a_client_that_goes_ends_its_request(state):
    async def main():
        connection, answering = await begin(state)
        connection.body.is_gone = True
        connection.body.on_gone()
        with pytest.raises(ClientGone):
            await answering
        assert state.engine.aborted == [[state.engine.record.request_id]]
        state.engine.feed(68)
        assert not connection.body.written

    asyncio.run(main())


def test_a_dead_engine_is_told_of_after_what_came_before(state):
    async def main():
        connection, answering = await begin(state)
        connection.body.is_writable = False
        state.engine.feed(68)
        state.engine.record.fail(EngineDeadError("gone"))
        state.engine.record.notify()
        connection.body.is_writable = True
        connection.body.on_writable()
        await answering
        *events, error = connection.events()
        assert "".join(event["choices"][0]["text"] for event in events) == text_of_tokens(state, 67, 68)
        assert error["error"]["message"] == "The engine is not running."

    asyncio.run(main())


def test_a_failure_of_the_parser_or_of_the_writer_ends_the_stream_with_an_error(state, monkeypatch):
    async def main(breaks):
        connection, answering = await begin(state)
        with monkeypatch.context() as patch:
            breaks(patch, connection)
            state.engine.feed(68)
        await answering
        assert connection.events()[-1]["error"]["code"] == "internal_error"
        assert state.engine.aborted[-1] == [state.engine.record.request_id]

    def fail(*args):
        raise ValueError("broken")

    asyncio.run(main(lambda patch, connection: patch.setattr(chunks, "encode", fail)))
    asyncio.run(main(lambda patch, connection: patch.setattr(connection.body, "write", fail)))


ACTIONS = ("token", "token", "slow", "fast", "begin", "tick", "finish", "die", "go")


@given(st.lists(st.sampled_from(ACTIONS), max_size=14))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_in_whatever_order_a_stream_ends(state, actions):
    """Before the response begins, between its beginning and its first look, while the client is slow: no wake-up is lost."""

    async def main():
        engine, fed, answering, death = state.engine, [67], None, False
        connection, response = await open_response(state)
        body, record = connection.body, engine.record

        def is_over():
            return record.is_finished or death or body.is_gone

        for action in (*actions, "begin", "finish", "fast"):
            if action == "token" and not is_over():
                fed.append(68 + len(fed))
                engine.feed(fed[-1])
            elif action == "finish" and not is_over():
                fed.append(68 + len(fed))
                engine.feed(fed[-1], finish=FinishReason.LENGTH)
            elif action == "die" and not is_over():
                death = True
                record.fail(EngineDeadError("gone"))
                if record.notify is not None:
                    record.notify()
            elif action == "go" and not body.is_gone:
                body.is_gone, body.is_writable = True, False
                if body.on_gone is not None:
                    body.on_gone()
            elif action == "begin" and answering is None:
                answering = asyncio.create_task(response(connection.scope, connection.receive, connection.send))
            elif action in ("slow", "fast") and not body.is_gone:
                body.is_writable = action == "fast"
                if body.is_writable and body.on_writable is not None:
                    body.on_writable()
            elif action == "tick":
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert answering.done()
        if isinstance(answering.exception(), ClientGone):
            assert body.is_gone
            return
        answering.result()
        events = connection.events()
        if death:
            assert events.pop()["error"]["message"] == "The engine is not running."
        else:
            assert connection.usage() == (2, len(fed))
        texts = [choice["text"] for event in events for choice in event["choices"]]
        assert "".join(texts) == text_of_tokens(state, *fed)

    asyncio.run(main())


class Transport:
    """A connection that breaks where it is told to."""

    def __init__(self, fails=False, is_closing=False):
        self.fails, self.closing, self.written, self.aborted = fails, is_closing, [], False

    def write(self, data):
        if self.fails:
            raise RuntimeError("the handle is closed")
        self.written.append(data)

    def is_closing(self):
        return self.closing

    def abort(self):
        self.aborted = True


class Cycle:
    """What uvicorn knows of an answer."""

    def __init__(self, transport):
        self.transport, self.flow, self.chunked_encoding = transport, SimpleNamespace(write_paused=False), True


def test_a_connection_that_breaks_while_a_batch_is_sent_is_cut_and_the_others_get_theirs(caplog):
    async def main():
        batch, good, broken, gone = WriteBatch(), Transport(), Transport(fails=True), Transport(True, True)
        bodies = [DirectBody(Cycle(transport), batch) for transport in (broken, gone, good)]
        for number in range(3):
            for body in bodies:
                body.write(b"x" * (1 << 4 * number))
        await asyncio.sleep(0)
        assert good.written == [b"1\r\nx\r\n", b"10\r\n" + b"x" * 16 + b"\r\n", b"100\r\n" + b"x" * 256 + b"\r\n"]
        assert broken.aborted and not gone.aborted and not good.aborted
        bodies[-1].write(b"y" * 5000)
        bodies[0].close()
        assert good.written[-1] == b"1388\r\n" + b"y" * 5000 + b"\r\n"

    asyncio.run(main())


def test_the_gate_lets_a_few_in_between_two_looks_of_the_loop_in_their_order():
    async def main():
        gate, entered, turns = AdmissionGate(), [], []

        async def request(number):
            await gate.enter()
            entered.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(5 * AT_ONCE)]
        tasks[AT_ONCE + 1].cancel()
        while not all(task.done() for task in tasks):
            before = len(entered)
            await asyncio.sleep(0)
            turns.append(len(entered) - before)
        assert entered == [number for number in range(5 * AT_ONCE) if number != AT_ONCE + 1]
        assert max(turns) <= AT_ONCE
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.wait_for(gate.enter(), 1)

    asyncio.run(main())


class Words:
    """Numbers the words of a text; counts its calls."""

    def __init__(self):
        self.batches = []

    def encode(self, text, add_special_tokens=True):
        if "bad" in text:
            raise ValueError("bad")
        return [add_special_tokens] + [len(word) for word in text.split()]

    def encode_batch(self, texts, add_special_tokens=True):
        self.batches.append(len(texts))
        return [self.encode(text, add_special_tokens) for text in texts]


def test_long_texts_are_tokenized_together_and_a_bad_one_harms_no_other():
    words = Words()
    texts = ["ab " * INLINE_CHARACTERS + "x" * index for index in range(1, 9)]

    async def main():
        results = await asyncio.gather(*(encode_text(words, text, index % 2 == 0) for index, text in enumerate(texts)))
        assert results == [words.encode(text, index % 2 == 0) for index, text in enumerate(texts)]
        assert sum(words.batches) == len(texts) and len(words.batches) < len(texts)
        mixed = [texts[0], "bad " * INLINE_CHARACTERS, texts[1]]
        first, bad, last = await asyncio.gather(
            *(encode_text(words, text, True) for text in mixed), return_exceptions=True
        )
        assert isinstance(bad, ValueError) and first == words.encode(texts[0]) and last == words.encode(texts[1])
        assert await encode_text(words, "a bc", False) == [False, 1, 2]

    asyncio.run(main())
    asyncio.run(main_again(words, texts))


async def main_again(words, texts):
    """Another event loop, the same tokenizer."""
    assert await encode_text(words, texts[0], True) == words.encode(texts[0])
