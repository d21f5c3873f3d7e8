"""`quire complete`: let a running server continue text, in the terminal."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.entrypoints.cli.http_client import OpenAIClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.entrypoints.cli.chat import add_client_arguments

    add_client_arguments(parser)
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete one prompt, print the text, leave")


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints.cli.chat import connect, next_message
    from quire.entrypoints.cli.terminal import LineReader, tell
    from quire.errors import EngineError, RequestError

    client, fields = connect(args)
    if args.stats:
        fields["stream_options"] = {"include_usage": True}
    if args.quick is not None:
        _complete(client, {**fields, "prompt": args.quick})
        return 0
    reader = LineReader("complete")
    tell(f'{fields["model"]} at {client.url}. One prompt a line (or """ … """); Ctrl-C stops an answer, Ctrl-D leaves.')
    try:
        while (prompt := next_message(reader)) is not None:
            if not prompt:
                continue
            try:
                _complete(client, {**fields, "prompt": prompt})
            except (RequestError, EngineError) as error:
                tell(f"error: {error}")
            except KeyboardInterrupt:
                tell("\n(stopped)")
    finally:
        reader.close()
    return 0


def _complete(client: "OpenAIClient", body: dict[str, Any]) -> None:
    from quire.entrypoints.cli.terminal import StreamedAnswer, tell

    answer = StreamedAnswer()
    answer.show(client.stream("/completions", body))
    if told := answer.statistics():
        tell(f"({told})")
