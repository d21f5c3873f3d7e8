"""`quire complete`: let a running server continue text, in the terminal."""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    from quire.entrypoints.cli.chat import add_client_arguments

    add_client_arguments(parser)
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete one prompt, print the text, leave")


def run(args: argparse.Namespace) -> int:
    """Complete prompts until the user leaves."""
    from quire.entrypoints.cli.chat import connect, print_stream, read_line
    from quire.errors import EngineError, RequestError

    client, fields = connect(args)
    if args.quick is not None:
        print_stream(client, "/completions", {**fields, "prompt": args.quick})
        return 0
    print(f"{fields['model']} at {client.url}. One prompt a line; Ctrl-D leaves.", file=sys.stderr)
    while (line := read_line()) is not None:
        if not line:
            continue
        try:
            print_stream(client, "/completions", {**fields, "prompt": line})
        except (RequestError, EngineError) as error:
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)
    return 0
