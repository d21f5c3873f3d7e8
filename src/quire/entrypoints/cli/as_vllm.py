"""`quire as-vllm PROGRAM …`: runs a program that imports vLLM; becomes `python -m quire.as_vllm`, which does the work."""

import argparse
import os
import sys
from typing import NoReturn

from quire.errors import ConfigError

PASSES_WORDS_ON = True
"""Its words are another program's, and not read here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "a script (or -m MODULE, -c TEXT), or a program such as torchrun, with its arguments"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="PROGRAM", help=text)


def run(args: argparse.Namespace) -> NoReturn:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        raise ConfigError(f"quire as-vllm takes a script, -m MODULE, -c TEXT or a program, not the option {words[0]!r}")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "quire.as_vllm", *words])
