"""`quire chat`: what is printed, what is kept, what each command does; and the real program in a terminal."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.pty_terminal import Terminal
from tests.oracles.server_process import ServerProcess

from quire.entrypoints.cli.conversation import COMMANDS, MAX_TOOL_ROUNDS, Commands, Conversation, read_tools
from quire.entrypoints.cli.terminal import CYAN, DIM, RESET, LineReader, StreamedAnswer, talk
from quire.errors import EngineError, RequestError

ROOT = Path(__file__).parents[3]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def call(name: str = "", arguments: str = "", index: int = 0, **fields: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": index, "function": {"name": name, "arguments": arguments}, **fields}])


class FakeClient:
    """Gives prepared streams, and keeps what was asked. A stream that holds an exception raises it there."""

    def __init__(self, *streams: list[Any]) -> None:
        self.streams = list(streams)
        self.bodies: list[dict[str, Any]] = []

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert path == "/chat/completions"
        self.bodies.append(json.loads(json.dumps(body)))
        for event in self.streams.pop(0) if self.streams else [delta(content="fine")]:
            if isinstance(event, BaseException):
                raise event
            yield event


def conversation_of(*streams: list[Any], results: tuple[str | None, ...] = ()) -> tuple[FakeClient, Conversation]:
    client, left = FakeClient(*streams), list(results)
    return client, Conversation(client, {"model": "m"}, lambda name, arguments: left.pop(0))  # type: ignore[arg-type]


def printed(events: list[dict[str, Any]], *, styled: bool) -> str:
    out = io.StringIO()
    StreamedAnswer(out, styled=styled).show(iter(events))
    return out.getvalue()


THOUGHT = [delta(role="assistant", content=""), delta(reasoning="let me "), delta(reasoning="see"), delta(content="42")]


def test_thoughts_are_dimmed_on_a_terminal_and_left_out_of_a_file() -> None:
    assert printed(THOUGHT, styled=True) == f"{DIM}let me see{RESET}\n\n42\n"
    assert printed(THOUGHT, styled=False) == "42\n"


def test_a_model_cannot_steer_the_terminal() -> None:
    events = [delta(content="a\x1b]0;t\x07b\x9b2J\r\n"), call("f\x1b[2J", "{}")]
    assert printed(events, styled=True) == f"a]0;tb2J\n\n{CYAN}f[2J({{}}){RESET}\n"
    assert "\x1b[2J" in printed(events, styled=False)


def test_other_servers_name_for_thoughts_is_understood() -> None:
    assert printed([delta(reasoning_content="hm"), delta(content="1")], styled=True) == f"{DIM}hm{RESET}\n\n1\n"


def test_tool_calls_are_put_together_and_shown() -> None:
    events = [call("add", "", id="c1"), call(arguments='{"a"'), call(arguments=": 1}"), call("sub", "{}", 1, id="c2")]
    assert printed(events, styled=True) == f'{CYAN}add({{"a": 1}}){RESET}\n{CYAN}sub({{}}){RESET}\n'
    answer = StreamedAnswer(io.StringIO(), styled=False)
    answer.show(iter(events))
    assert [each["id"] for each in answer.tool_calls] == ["c1", "c2"]


def test_both_sides_are_kept_and_sent_again() -> None:
    client, conversation = conversation_of([delta(content="hello"), delta("stop")])
    conversation.system = "be brief"
    conversation.ask("hi")
    conversation.ask("more")
    assert [message["content"] for message in client.bodies[1]["messages"]] == ["be brief", "hi", "hello", "more"]
    assert "tools" not in client.bodies[1] and "stream_options" not in client.bodies[1]


@pytest.mark.parametrize("error", [RequestError("no"), EngineError("no")])
def test_a_turn_that_fails_leaves_no_trace(error: Exception) -> None:
    _, conversation = conversation_of([delta(content="a")], [delta(content="part"), error])
    conversation.ask("one")
    with pytest.raises(type(error)):
        conversation.ask("two")
    assert [message["content"] for message in conversation.messages] == ["one", "a"]


def test_a_stopped_answer_is_kept_as_far_as_it_came() -> None:
    _, conversation = conversation_of([delta(content="so far"), KeyboardInterrupt()], [KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("one")
    with pytest.raises(KeyboardInterrupt):
        conversation.ask("two")
    assert [message["content"] for message in conversation.messages] == ["one", "so far"]


def test_tools_results_are_asked_for_and_sent() -> None:
    client, conversation = conversation_of([call("add", "{}", id="c1")], [delta(content="3")], results=("3",))
    conversation.tools = TOOLS
    conversation.ask("1 + 2?")
    assert client.bodies[0]["tools"] == TOOLS
    called, result = client.bodies[1]["messages"][1:]
    assert called["content"] is None and called["tool_calls"][0]["id"] == "c1"
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert conversation.messages[-1]["content"] == "3"


def test_a_result_that_is_not_given_forgets_the_turn() -> None:
    _, conversation = conversation_of([call("add", "{}", id="c1")], results=(None,))
    conversation.ask("1 + 2?")
    assert conversation.messages == []


def test_a_model_that_calls_for_ever_is_stopped() -> None:
    rounds = [[call("add", "{}", id="c")]] * MAX_TOOL_ROUNDS
    _, conversation = conversation_of(*rounds, results=("x",) * MAX_TOOL_ROUNDS)
    with pytest.raises(RequestError, match="in a row"):
        conversation.ask("go")
    assert conversation.messages == []


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> tuple[Commands, Conversation, FakeClient]:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    client, conversation = conversation_of()
    return Commands(conversation, LineReader("test")), conversation, client


def test_help_lists_every_command(commands: Any, capsys: Any) -> None:
    assert commands[0].run("/help")
    told = capsys.readouterr().err
    assert all(f"  {name}" in told for name in COMMANDS)


@pytest.mark.parametrize("line", ["/exit", "/quit", " /exit "])
def test_exit_leaves(commands: Any, line: str) -> None:
    assert not commands[0].run(line)


def test_a_wrong_command_gets_a_hint(commands: Any, capsys: Any) -> None:
    assert commands[0].run("/sistem x")
    assert "did you mean /system?" in capsys.readouterr().err


def test_settings_are_sent_and_taken_back(commands: Any, capsys: Any) -> None:
    run, conversation, client = commands
    for line in ("/set temperature 0.2", "/set top-k 5", "/set stop word", '/set logit_bias {"1": 2}', "/unset top_k"):
        run.run(line)
    conversation.ask("x")
    assert client.bodies[0] | {"messages": 0} == {
        "model": "m", "temperature": 0.2, "stop": "word", "logit_bias": {"1": 2}, "messages": 0,
    }  # fmt: skip
    assert capsys.readouterr().err == ""
    run.run("/set")
    assert "temperature  0.2" in capsys.readouterr().err
    run.run("/set temprature 1")
    assert "(did you mean 'temperature'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set messages []", "type them"),
        ("/set temperature", "a value is missing"),
        ("/unset temperature", "is not set"),
        ("/retry", "nothing was asked"),
        ("/undo", "nothing was asked"),
        ("/load /nowhere", "No such file"),
        ("/load", "name is missing"),
        ("/save", "name is missing"),
        ("/tools /nowhere", "No such file"),
    ],
)
def test_what_a_command_cannot_do_is_one_line(
    commands: Any, line: str, words: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\n"))
    talk(LineReader("test"), commands[0].run)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and words in error and error.count("\n") == 1


def test_retry_asks_again_and_undo_takes_back(commands: Any, capsys: Any) -> None:
    run, conversation, client = commands
    conversation.ask("one")
    client.streams = [[delta(content="two")]]
    run.run("/retry")
    assert [message["content"] for message in conversation.messages] == ["one", "two"]
    run.run("/undo")
    assert conversation.messages == []


def test_a_conversation_is_saved_and_loaded(commands: Any, tmp_path: Path) -> None:
    run, conversation, _ = commands
    conversation.tools = TOOLS
    for line in ("/set temperature 0.5", "/system be brief"):
        run.run(line)
    conversation.ask("ä")
    before = conversation.as_json()
    run.run(f"/save {tmp_path / 'talk.json'}")
    run.run("/reset")
    run.run("/system")
    run.run("/tools off")
    assert conversation.messages == [] and conversation.system is None and conversation.tools == []
    run.run(f"/load {tmp_path / 'talk.json'}")
    assert conversation.as_json() == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"messages": [1]}', '{"messages": [{"role": 1}]}'])
def test_a_file_that_is_no_conversation_changes_nothing(text: str) -> None:
    _, conversation = conversation_of()
    conversation.ask("one")
    before = conversation.as_json()
    with pytest.raises(RequestError, match="holds no conversation"):
        conversation.restore(text)
    assert conversation.as_json() == before


@pytest.mark.parametrize(
    "content", [TOOLS, [TOOLS[0]["function"]], TOOLS[0]["function"]], ids=["openai", "bare", "one"]
)
def test_tools_are_read_in_either_form(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps(content))
    assert read_tools(str(path)) == TOOLS


@pytest.mark.parametrize("text", ["", "[1]", '[{"a": 1}]', '[{"function": {}}]'])
def test_what_is_no_tool_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(RequestError, match="tools: "):
        read_tools(str(path))


@pytest.mark.parametrize(
    ("lines", "multiline", "messages"),
    [
        ("a\nb\n", False, ["a", "b"]),
        ('"""a\n\nb"""\nc\n', False, ["a\n\nb", "c"]),
        ('"""\na\n"""\n', False, ["a"]),
        ("a\nb\n\nc\n\n", True, ["a\nb", "c"]),
        ("a\nb", True, ["a\nb"]),
        ("/x\na\n", True, ["/x", "a"]),
        ('"""a\nb', False, ["a\nb"]),
    ],
)
def test_messages_may_have_several_lines(
    lines: str, multiline: bool, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    reader = LineReader("test")
    reader.multiline = multiline
    assert list(iter(reader.read, None)) == messages


@pytest.fixture
def stuck_url() -> Iterator[str]:
    """A server that gives six tokens and then nothing."""
    server = ServerProcess("-m", "tests.oracles.fake_server", "6")
    yield server.url
    server.kill()


def test_ctrl_c_stops_the_answer_and_not_the_program(stuck_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "chat", "--url", f"{stuck_url}/v1"]
    terminal = Terminal(command, QUIRE_CACHE_ROOT=str(tmp_path))
    terminal.wait_for("> ")
    terminal.type("abcdef\n")
    terminal.wait_for("<USER>")
    terminal.interrupt("(stopped)")
    terminal.wait_for("> ")
    terminal.type("typed and dropped")
    terminal.wait_for("typed and dropped")
    terminal.interrupt("(Ctrl-D leaves)")
    terminal.wait_for("> ")
    terminal.type(f"/save {tmp_path}/talk\n")
    terminal.wait_for("saved 2 messages")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert [message["content"] for message in json.loads((tmp_path / "talk").read_text())["messages"]] == [
        "abcdef",
        "<USER>",
    ]
    history = tmp_path / "history" / "chat"
    assert "abcdef" in history.read_text() and history.stat().st_mode & 0o777 == 0o600
