"""`quire completion bash|zsh|fish`: a script that completes commands, flags and values, made from the parsers themselves.

Pressing Tab starts no Python. Knows what parsers take; how each shell says it stands in `completion_scripts`.
"""

import argparse
import re
import sys
from typing import NamedTuple

PLAIN = re.compile(r"[\w.+:/-]+")
FILES = ("FILE", "PATH", "DIR")
"""Metavars of flags that take a path."""


class Flag(NamedTuple):
    """A flag as a shell sees it."""

    names: tuple[str, ...]
    about: str
    takes_value: bool
    takes_path: bool
    choices: tuple[str, ...]


class Completion(NamedTuple):
    """What may follow a command's words (`serve`; `bench latency`)."""

    words: tuple[str, ...]
    about: str
    flags: tuple[Flag, ...]
    choices: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    from quire.entrypoints.cli.completion_scripts import SCRIPTS

    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from quire.entrypoints.cli.completion_scripts import SCRIPTS

    sys.stdout.write(SCRIPTS[args.shell](collect()))
    return 0


def collect() -> list[Completion]:
    """Every command, and every benchmark as a command of `bench`."""
    from quire.entrypoints.cli import bench
    from quire.entrypoints.cli.main import COMMANDS, build_parser

    found = [_completion((name,), about, build_parser(name)) for name, (_, about) in COMMANDS.items()]
    return found + [
        _completion(("bench", name), about, bench.build_parser(name)) for name, about in bench.BENCHMARKS.items()
    ]


def _completion(words: tuple[str, ...], about: str, parser: argparse.ArgumentParser) -> Completion:
    from quire.engine.arg_help import visible_options

    first = next((action for action in parser._actions if not action.option_strings), None)
    choices = tuple(map(str, first.choices)) if first is not None and first.choices else ()
    return Completion(words, about, tuple(map(_flag, visible_options(parser))), choices)


def _flag(action: argparse.Action) -> Flag:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    choices = tuple(str(choice) for choice in action.choices or () if PLAIN.fullmatch(str(choice)))
    about = " ".join((action.help or "").split()).partition(" (default:")[0] % {}
    return Flag(
        names=tuple(action.option_strings),
        about=about,
        takes_value=action.nargs not in (0, "?"),
        takes_path=metavar in FILES,
        choices=choices,
    )
