"""`quire complete`: let a running server continue text, in the terminal."""

import argparse

from quire.engine.arg_parser import only
from quire.entrypoints.cli.chat import CLIENT, connect

add_arguments = only(*CLIENT, ("-q --quick", None, "complete one prompt, print the text, leave", {"metavar": "PROMPT"}))


def run(args: argparse.Namespace) -> None:
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
        return
    tell(f'{fields["model"]} at {client.url}. One prompt a line (or """ … """); Ctrl-C stops an answer, Ctrl-D leaves.')
    talk(LineReader("complete"), complete)
