"""`quire chat`: a conversation in the terminal with a running server."""

import argparse
from typing import Any

from quire import envs
from quire.engine.arg_parser import Flags, only
from quire.entrypoints.cli.running import latest_url
from quire.entrypoints.http_client import OpenAIClient

CLIENT: Flags = (
    ("--url", None, "the server (the latest of `quire ps`, or else http://127.0.0.1:8000/v1)"),
    ("--model-name", None, "the model; none means the first that the server lists", {"metavar": "NAME"}),
    ("--api-key", None, "the server's key (or QUIRE_API_KEY)", {"metavar": "KEY"}),
    ("--max-tokens", None, "most tokens of an answer", {"type": int, "metavar": "N"}),
    ("--temperature", None, "sampling temperature; 0 is greedy", {"type": float, "metavar": "X"}),
    ("--stats", False, "tell tokens and seconds after each answer"),
)
"""What `chat` and `complete` share."""


add_arguments = only(
    *CLIENT,
    ("-q --quick", None, "send one message, print the answer, leave", {"metavar": "MESSAGE"}),
    ("--system-prompt", None, "what the model is told before the conversation", {"metavar": "TEXT"}),
    ("--tools", None, "JSON list of functions that the model may call; you give results", {"metavar": "FILE"}),
)


def connect(args: argparse.Namespace) -> "tuple[OpenAIClient, dict[str, Any]]":
    """A client, and the body's fields that stay the same."""
    client = OpenAIClient(args.url or latest_url(), args.api_key or envs.QUIRE_API_KEY)
    fields: dict[str, Any] = {"model": args.model_name or client.first_model()}
    for name in ("max_tokens", "temperature"):
        if getattr(args, name) is not None:
            fields[name] = getattr(args, name)
    return client, fields


def run(args: argparse.Namespace) -> None:
    from quire.entrypoints.cli.conversation import COMMANDS, Commands, Conversation, read_tools
    from quire.entrypoints.cli.terminal import LineReader, talk, tell

    tools = read_tools(args.tools) if args.tools else []
    client, fields = connect(args)
    reader = LineReader("chat", COMMANDS)
    conversation = Conversation(client, fields, lambda name, arguments: reader.line(f"result of {name}> "))
    conversation.system = args.system_prompt
    conversation.tools = tools
    conversation.shows_statistics = args.stats
    commands = Commands(conversation, reader)

    def answer(message: str) -> bool:
        if message.startswith("/"):
            return commands.run(message)
        conversation.ask(message)
        return True

    if args.quick is not None:
        conversation.ask(args.quick)
        return
    tell(f"{fields['model']} at {client.url}. /help lists commands, Ctrl-D leaves.")
    talk(reader, answer)
