"""`quire chat`: a conversation in the terminal with a running server."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.entrypoints.cli.http_client import OpenAIClient

HELP = "Commands: /reset forgets the conversation, /system TEXT sets the system prompt, /exit (or Ctrl-D) leaves."


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """What `chat` and `complete` share."""
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (http://127.0.0.1:8000/v1)")
    parser.add_argument("--model-name", help="the model; none means the first that the server lists")
    parser.add_argument("--api-key", help="the server's key (or QUIRE_API_KEY)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="sampling temperature; 0 is greedy")
    parser.add_argument("--stats", action="store_true", help="tell tokens and seconds after each answer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_client_arguments(parser)
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, leave")
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told before the conversation")


def connect(args: argparse.Namespace) -> "tuple[OpenAIClient, dict[str, Any]]":
    """A client, and the body's fields that stay the same."""
    from quire import envs
    from quire.entrypoints.cli.http_client import OpenAIClient

    client = OpenAIClient(args.url, args.api_key or envs.QUIRE_API_KEY)
    fields: dict[str, Any] = {"model": args.model_name or client.first_model()}
    for name in ("max_tokens", "temperature"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    if args.stats:
        fields["stream_options"] = {"include_usage": True}
    return client, fields


def run(args: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    client, fields = connect(args)
    conversation = Conversation(client, fields, args.system_prompt)
    if args.quick is not None:
        conversation.ask(args.quick)
        return 0
    print(f"{fields['model']} at {client.url}. {HELP}", file=sys.stderr)
    while True:
        line = read_line()
        if line is None or line.strip() in ("/exit", "/quit"):
            return 0
        conversation.handle(line)


def read_line() -> str | None:
    """One line from the user; None when there are no more."""
    if sys.stdin.isatty():
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # line editing and history
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


class Conversation:
    """The messages so far; an answer that failed leaves no trace in them."""

    def __init__(self, client: "OpenAIClient", fields: dict[str, Any], system_prompt: str | None) -> None:
        self._client = client
        self._fields = fields
        self._system = system_prompt
        self._messages: list[dict[str, str]] = []

    def handle(self, line: str) -> None:
        """A line of the user's: a command, or a message."""
        from quire.errors import EngineError, RequestError

        word, _, rest = line.strip().partition(" ")
        if not word:
            return
        if word == "/reset":
            self._messages = []
        elif word == "/system":
            self._system = rest or None
        elif word.startswith("/"):
            print(HELP, file=sys.stderr)
        else:
            try:
                self.ask(line)
            except (RequestError, EngineError) as error:
                print(f"error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                print("\n(stopped)", file=sys.stderr)

    def ask(self, text: str) -> None:
        """Send a message, print the answer as it comes, keep both."""
        question = {"role": "user", "content": text}
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {**self._fields, "messages": [*system, *self._messages, question]}
        answer = print_stream(self._client, "/chat/completions", body)
        self._messages += [question, {"role": "assistant", "content": answer}]


def print_stream(client: "OpenAIClient", path: str, body: dict[str, Any]) -> str:
    """Print a stream's text as it comes; gives the whole of it."""
    import time

    pieces: list[str] = []
    began = time.perf_counter()
    first: float | None = None
    usage: dict[str, Any] | None = None
    for event in client.stream(path, body):
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            if text:
                first = first or time.perf_counter()
                pieces.append(text)
                print(text, end="", flush=True)
    print(flush=True)
    if usage is not None:
        seconds = time.perf_counter() - began
        wait = (first or began) - began
        tokens = usage["completion_tokens"]
        told = f"{usage['prompt_tokens']} in, {tokens} out; first after {wait:.3f} s, {tokens / seconds:.1f} tokens/s"
        print(f"({told})", file=sys.stderr)
    return "".join(pieces)
