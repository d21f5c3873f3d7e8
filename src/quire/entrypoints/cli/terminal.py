"""The terminal as chat and complete use it: lines with editing and history, styles, an answer as it streams.

Knows ANSI, readline and the deltas of OpenAI's streams. Knows nothing of conversations or servers.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

DIM, BOLD, CYAN, RESET = "\x1b[2m", "\x1b[1m", "\x1b[36m", "\x1b[0m"
HISTORY_LINES = 2000
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
QUOTES = '"""'


def is_styled(stream: TextIO) -> bool:
    """Whether a stream is a terminal that takes colours (https://no-color.org)."""
    from quire import envs

    return stream.isatty() and not envs.is_set("NO_COLOR")


def printable(text: str) -> str:
    """A text of others without what would move a terminal's cursor, or do worse."""
    return _CONTROLS.sub("", text)


class LineReader:
    """Lines of a user: edited and remembered where standard input is a terminal.

    Args:
        name: of the history file under `QUIRE_CACHE_ROOT`.
        commands: words that Tab completes at the start of a line.
    """

    def __init__(self, name: str, commands: Sequence[str] = ()) -> None:
        self._is_terminal = sys.stdin.isatty()
        self._readline: Any = None
        self._path = ""
        self.multiline = False
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                self._set_up(name, list(commands))

    def _set_up(self, name: str, commands: list[str]) -> None:
        import readline

        from quire import envs

        self._readline = readline
        self._path = os.path.join(envs.QUIRE_CACHE_ROOT, "history", name)
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._path)
        readline.set_completer_delims(" ")
        readline.set_completer(lambda text, state: _nth([word for word in commands if word.startswith(text)], state))
        readline.parse_and_bind("tab: complete")

    def close(self) -> None:
        """Keep the history, for its owner only."""
        if self._readline is None:
            return
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))
            self._readline.write_history_file(self._path)

    def read(self, prompt: str = "> ") -> str | None:
        """A message: one line; what stands between two `\"\"\"`; or, in multiline mode, lines up to an empty one.

        None when there are no more. Raises KeyboardInterrupt: Ctrl-C."""
        line = self.line(prompt)
        if line is None or (not self.multiline and not line.startswith(QUOTES)) or line.startswith("/"):
            return line
        if line.startswith(QUOTES):
            return self._quoted(line[len(QUOTES) :])
        lines = [line]
        while lines[-1] and (more := self.line(". ")) is not None:
            lines.append(more)
        return "\n".join(lines).rstrip("\n")

    def _quoted(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES) and (more := self.line(". ")) is not None:
            lines.append(more)
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")

    def line(self, prompt: str) -> str | None:
        """One line; None at the end."""
        try:
            return input(prompt if self._is_terminal else "")
        except EOFError:
            return None


def _nth(words: list[str], index: int) -> str | None:
    return words[index] if index < len(words) else None


class StreamedAnswer:
    """A streamed answer: what it says, thinks and calls, printed while it comes.

    Args:
        out: where it is printed; thoughts are shown, dimmed, on a terminal only.
        styled: whether to use colours; None asks the stream.
    """

    def __init__(self, out: TextIO | None = None, *, styled: bool | None = None) -> None:
        self._out = out or sys.stdout
        self._styled = is_styled(self._out) if styled is None else styled
        self._is_terminal = self._styled or self._out.isatty()
        self._mode = ""
        self._began = time.perf_counter()
        self._first: float | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.tool_calls: list[dict[str, Any]] = []
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def show(self, events: Iterator[dict[str, Any]]) -> None:
        """Print a stream to its end; what came before an interruption stays in this object."""
        is_whole = False
        try:
            for event in events:
                self._take(event)
            is_whole = True
        finally:
            said = bool(self._mode)
            self._switch("")
            if said or (is_whole and not self.tool_calls):
                self._print("\n")
            for call in self.tool_calls:
                text = f"{call['function']['name']}({call['function']['arguments']})"
                self._print(self._style(CYAN, self._shown(text)) + "\n")

    def _take(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            delta: dict[str, Any] = choice.get("delta") or {}
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                self._say("thoughts", thought, self._reasoning)
            if text := choice.get("text") or delta.get("content"):
                self._say("content", text, self._content)
            for part in delta.get("tool_calls") or ():
                self._add_call(part)

    def _say(self, mode: str, text: str, kept: list[str]) -> None:
        self._first = self._first or time.perf_counter()
        kept.append(text)
        if mode == "content" or self._is_terminal:
            self._switch(mode)
            self._print(self._shown(text))

    def _switch(self, mode: str) -> None:
        """Between thoughts and what is said stands a line break."""
        if mode == self._mode:
            return
        if self._mode == "thoughts":
            self._print((RESET if self._styled else "") + ("\n\n" if mode else ""))
        if mode == "thoughts" and self._styled:
            self._print(DIM)
        self._mode = mode

    def _add_call(self, part: dict[str, Any]) -> None:
        self._first = self._first or time.perf_counter()
        index = part.get("index", 0)
        while len(self.tool_calls) <= index:
            self.tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = self.tool_calls[index]
        call["id"] = part.get("id") or call["id"]
        for name in ("name", "arguments"):
            call["function"][name] += (part.get("function") or {}).get(name) or ""

    def _print(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def _shown(self, text: str) -> str:
        return printable(text) if self._is_terminal else text

    def _style(self, style: str, text: str) -> str:
        return f"{style}{text}{RESET}" if self._styled else text

    def statistics(self) -> str | None:
        """Tokens and seconds in words, where the server told the tokens."""
        if self.usage is None:
            return None
        seconds = time.perf_counter() - self._began
        wait = (self._first or self._began) - self._began
        tokens = self.usage["completion_tokens"]
        return (
            f"{self.usage['prompt_tokens']} in, {tokens} out; first after {wait:.3f} s, {tokens / seconds:.1f} tokens/s"
        )


def tell(*words: Any) -> None:
    """A word of the program's own: on standard error, dimmed on a terminal."""
    text = " ".join(map(str, words))
    print(f"{DIM}{text}{RESET}" if is_styled(sys.stderr) else text, file=sys.stderr)


def columns(rows: Iterable[tuple[str, str]]) -> str:
    """Pairs in two columns."""
    pairs = list(rows)
    width = max((len(left) for left, _ in pairs), default=0)
    return "\n".join(f"  {left:<{width}}  {right}" for left, right in pairs)
