"""The terminal as chat and complete use it: lines with editing and history, styles, an answer as it streams.

Knows ANSI, readline and the deltas of OpenAI's streams. Knows nothing of conversations or servers.
"""

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from quire import envs

DIM, BOLD, CYAN, RESET = "\x1b[2m", "\x1b[1m", "\x1b[36m", "\x1b[0m"
HISTORY_LINES = 2000
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
QUOTES = '"""'


def is_styled(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours (https://no-color.org)."""
    return stream.isatty() and not envs.is_set("NO_COLOR")


def printable(text: str) -> str:
    """A text without the control characters that would move the cursor, or do worse."""
    return _CONTROLS.sub("", text)


class LineReader:
    """Lines of a user: edited and remembered where standard input is a terminal.

    Args:
        name: of the history file under `QUIRE_CACHE_ROOT`.
        commands: words that Tab completes at the start of a line.
    """

    def __init__(self, name: str, commands: Iterable[str] = ()) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._readline: Any = None
        self._path = ""
        self.multiline = False
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                self._set_up(name, tuple(commands))

    def _set_up(self, name: str, commands: Sequence[str]) -> None:
        import readline

        def complete(text: str, state: int) -> str | None:
            return [*(word for word in commands if word.startswith(text)), None][state]

        self._readline = readline
        self._path = os.path.join(envs.QUIRE_CACHE_ROOT, "history", name)
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._path)
        readline.set_completer_delims(" ")
        readline.set_completer(complete)
        readline.parse_and_bind("tab: complete")

    def close(self) -> None:
        """Keep the history, for its owner only."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))
            self._readline.write_history_file(self._path)

    def read(self) -> str | None:
        """A message: one line; the lines between two `\"\"\"`; or, in multiline mode, lines up to an empty one.

        None when there are no more. Raises KeyboardInterrupt: Ctrl-C."""
        line = self.line("> ")
        if line is None or line.startswith("/"):
            return line
        if line.startswith(QUOTES):
            quoted = self._lines_until(line.removeprefix(QUOTES), lambda last: last.rstrip().endswith(QUOTES))
            return quoted.rstrip().removesuffix(QUOTES).strip("\n")
        if self.multiline:
            return self._lines_until(line, lambda last: not last).rstrip("\n")
        return line

    def _lines_until(self, first: str, is_last: Callable[[str], bool]) -> str:
        lines = [first]
        while not is_last(lines[-1]) and (more := self.line(". ")) is not None:
            lines.append(more)
        return "\n".join(lines)

    def line(self, prompt: str) -> str | None:
        """One line; None at the end."""
        try:
            return input(prompt if self._is_terminal else "")
        except EOFError:
            return None


def talk(reader: LineReader, answer: Callable[[str], bool]) -> None:
    """Answer one message after another until there are no more, or `answer` returns False.

    An error is told and the talk goes on; Ctrl-C stops an answer, and drops what was typed at the prompt.
    """
    from quire.errors import QuireError

    with contextlib.closing(reader):
        while True:
            message = ""
            try:
                message = reader.read()
                if message is None or (message.strip() and not answer(message)):
                    return
            except (QuireError, OSError) as error:
                tell(f"error: {error}")
            except KeyboardInterrupt:
                tell("\n(stopped)" if message else "\n(Ctrl-D leaves)")


class StreamedAnswer:
    """A streamed answer: its content, reasoning and tool calls, printed while it comes.

    Args:
        out: where it is printed; reasoning is shown, dimmed, on a terminal only.
        styled: whether to use colours; None asks the stream.
    """

    def __init__(self, out: TextIO | None = None, *, styled: bool | None = None) -> None:
        self._out = out or sys.stdout
        self._styled = is_styled(self._out) if styled is None else styled
        self._is_terminal = self._styled or self._out.isatty()
        self._printing = ""
        self._began = time.perf_counter()
        self._first: float | None = None
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None

    def show(self, events: Iterator[dict[str, Any]]) -> None:
        """Print a stream to its end; what came before an interruption stays in this object."""
        needs_line_end = False
        try:
            for event in events:
                self._take(event)
            needs_line_end = not self.tool_calls
        finally:
            needs_line_end |= bool(self._printing)
            self._switch("")
            if needs_line_end:
                self._print("\n")
            for call in self.tool_calls:
                text = f"{call['function']['name']}({call['function']['arguments']})"
                self._print(self._shown(text), CYAN)
                self._print("\n")

    def _take(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            delta: dict[str, Any] = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            content = choice.get("text") or delta.get("content") or ""
            calls = delta.get("tool_calls") or ()
            if self._first is None and (reasoning or content or calls):
                self._first = time.perf_counter()
            self.reasoning += reasoning
            self.content += content
            if reasoning and self._is_terminal:
                self._switch("reasoning")
                self._print(self._shown(reasoning))
            if content:
                self._switch("content")
                self._print(self._shown(content))
            for call in calls:
                self._add_call(call)

    def _switch(self, printing: str) -> None:
        """Begin to print reasoning or content, or end; a line break separates them."""
        if printing == self._printing:
            return
        if self._printing == "reasoning":
            self._print((RESET if self._styled else "") + ("\n\n" if printing else ""))
        if printing == "reasoning" and self._styled:
            self._print(DIM)
        self._printing = printing

    def _add_call(self, part: dict[str, Any]) -> None:
        index = part.get("index", 0)
        while len(self.tool_calls) <= index:
            self.tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = self.tool_calls[index]
        call["id"] = part.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += (part.get("function") or {}).get(name) or ""

    def _print(self, text: str, style: str = "") -> None:
        self._out.write(f"{style}{text}{RESET}" if style and self._styled else text)
        self._out.flush()

    def _shown(self, text: str) -> str:
        return printable(text) if self._is_terminal else text

    def tell_statistics(self) -> None:
        """Tell tokens and seconds, where the server told the tokens."""
        if self.usage is None:
            return
        seconds = time.perf_counter() - self._began
        wait = (self._first or self._began) - self._began
        tokens = self.usage["completion_tokens"]
        rate = f"{tokens / seconds:.1f} tokens/s"
        tell(f"({self.usage['prompt_tokens']} in, {tokens} out; first after {wait:.3f} s, {rate})")


def tell(text: str) -> None:
    """Print a word of the program's own: on standard error, dimmed on a terminal."""
    print(f"{DIM}{text}{RESET}" if is_styled(sys.stderr) else text, file=sys.stderr)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a head."""
    widths = [max(len(row[index]) for row in (head, *rows)) for index in range(len(head))]
    return [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def show(report: Any, as_json: bool, as_text: Callable[[], str]) -> None:
    """Print a report: as JSON for programs, or else as a text."""
    print(json.dumps(report, indent=2, default=str) if as_json else as_text())


def columns(rows: Mapping[str, Any]) -> list[str]:
    """Lines of names and values, in two columns."""
    width = max(map(len, rows), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in rows.items()]
