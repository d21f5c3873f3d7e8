"""`quire complete`: let a running server continue text, in the terminal."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.entrypoints.cli.chat import add_client_arguments

    add_client_arguments(parser)
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete one prompt, print the text, leave")


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints.cli.chat import connect
    from quire.entrypoints.cli.terminal import LineReader, StreamedAnswer, talk, tell

    client, fields = connect(args)
    if args.stats:
        fields["stream_options"] = {"include_usage": True}

    def complete(prompt: str) -> bool:
        answer = StreamedAnswer()
        answer.show(client.stream("/completions", {**fields, "prompt": prompt}))
        answer.tell_statistics()
        return True

    if args.quick is not None:
        complete(args.quick)
        return 0
    tell(f'{fields["model"]} at {client.url}. One prompt a line (or """ … """); Ctrl-C stops an answer, Ctrl-D leaves.')
    talk(LineReader("complete"), complete)
    return 0
