"""`quire completion bash|zsh|fish`: a script that completes commands, flags and values, made from the parsers themselves.

Pressing Tab starts no Python. Knows parsers and shells.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
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
    parser.add_argument("shell", choices=tuple(SCRIPTS), metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
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


def bash(commands: "Sequence[Completion]") -> str:
    options = [f'        "{_key(each)}") options="{_words(each)}" ;;' for each in commands]
    values = [f'        "{at}") values="{words}" ;;' for at, words in _values(commands)]
    subcommands = [f'        "{_key(each)}") values="{" ".join(each.choices)}" ;;' for each in commands if each.choices]
    return f"""\
# bash completion for quire; made by `quire completion bash`
_quire() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" options="" values="" at
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W "{_tops(commands)} --help --version" -- "$current"))
        return
    fi
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    at="${{COMP_WORDS[1]}}"
    if [[ $at == bench ]] && ((COMP_CWORD > 2)); then
        at="bench ${{COMP_WORDS[2]}}"
    fi
    case "$at ${{previous//_/-}}" in
{chr(10).join(values)}
    esac
    case "$at" in
{chr(10).join(options)}
    esac
    if [[ -z $values && $current != -* ]]; then
        case "$at" in
{chr(10).join(subcommands)}
        esac
    fi
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$current"))
    elif [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$options" -- "${{current//_/-}}"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _quire quire
"""


def zsh(commands: "Sequence[Completion]") -> str:
    """For zsh; with the flags' texts."""
    tops = " ".join(_described(each.words[0], each.about) for each in commands if len(each.words) == 1)
    described = {
        _key(each): " ".join(_described(name, flag.about) for flag in each.flags for name in flag.names)
        for each in commands
    }
    options = [f'        "{key}") options=({words}) ;;' for key, words in described.items()]
    values = [f'        "{at}") compadd -- {words}; return ;;' for at, words in _values(commands)]
    subcommands = [
        f'        "{_key(each)}") compadd -- {" ".join(each.choices)}; return ;;' for each in commands if each.choices
    ]
    return f"""\
#compdef quire
# zsh completion for quire; made by `quire completion zsh`
_quire() {{
    local at="${{words[2]}}"
    local -a options
    if ((CURRENT == 2)); then
        options=({tops})
        _describe -t commands 'command' options
        return
    fi
    if [[ $at == bench ]] && ((CURRENT > 3)); then
        at="bench ${{words[3]}}"
    fi
    case "$at ${{words[CURRENT-1]//_/-}}" in
{chr(10).join(values)}
    esac
    if [[ $PREFIX == -* ]]; then
        case "$at" in
{chr(10).join(options)}
        esac
        _describe -t options 'option' options
        return
    fi
    case "$at" in
{chr(10).join(subcommands)}
    esac
    _files
}}
if [[ "${{funcstack[1]}}" == "_quire" ]]; then
    _quire "$@"
else
    compdef _quire quire
fi
"""


def fish(commands: "Sequence[Completion]") -> str:
    """For fish 3 and later; with the flags' texts."""
    lines = [
        "# fish completion for quire; made by `quire completion fish`",
        "function __quire_at",
        "    set -l words (commandline -opc)",
        "    set -l last (math 1 + (count $argv))",
        '    test "$words[2..$last]" = "$argv"',
        "    or return 1",
        '    test "$argv" != bench; or test (count $words) -eq 2',
        "end",
        "complete -c quire -n 'test (count (commandline -opc)) -eq 1' -f",
    ]
    for each in commands:
        if len(each.words) == 1:
            first = "test (count (commandline -opc)) -eq 1"
            lines.append(f"complete -c quire -n '{first}' -f -a {each.words[0]} -d {_quoted(each.about)}")
        at = f"-n '__quire_at {_key(each)}'"
        if each.choices:
            lines.append(f"complete -c quire {at} -f -a '{' '.join(each.choices)}'")
        lines += [f"complete -c quire {at} {_fish_flag(flag)}" for flag in each.flags]
    return "\n".join(lines) + "\n"


SCRIPTS: "dict[str, Callable[[Sequence[Completion]], str]]" = {"bash": bash, "zsh": zsh, "fish": fish}


def _key(each: "Completion") -> str:
    return " ".join(each.words)


def _values(commands: "Sequence[Completion]") -> list[tuple[str, str]]:
    """Each command with a flag, and the words that the flag may be given."""
    flags = [(each, flag, name) for each in commands for flag in each.flags for name in flag.names if flag.choices]
    return [(f"{_key(each)} {name}", " ".join(flag.choices)) for each, flag, name in flags]


def _tops(commands: "Sequence[Completion]") -> str:
    return " ".join(each.words[0] for each in commands if len(each.words) == 1)


def _words(each: "Completion") -> str:
    return " ".join(name for flag in each.flags for name in flag.names)


def _quoted(text: str) -> str:
    """In single quotes, which no shell looks into."""
    return "'" + text.replace("\\", "").replace("'", "’") + "'"


def _described(name: str, about: str) -> str:
    return _quoted(f"{name}:{about}")


def _fish_flag(flag: "Flag") -> str:
    words: list[str] = []
    for name in flag.names:
        kind = "-l" if name.startswith("--") else "-s" if len(name) == 2 else "-o"
        words += [kind, name.lstrip("-")]
    if flag.choices:
        words += ["-x", "-a", _quoted(" ".join(flag.choices))]
    elif flag.takes_value:
        words.append("-r" if flag.takes_path else "-x")
    return " ".join((*words, "-d", _quoted(flag.about)))
