"""`quire completion bash|zsh|fish`: a script that completes commands, flags and values, made from the parsers themselves.

A script is a table of words and a function that looks a word up in it: pressing Tab starts no Python. Knows parsers and shells.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from quire.engine.arg_parser import only

PLAIN = re.compile(r"[\w.+:/-]+")


class Word(NamedTuple):
    """A row of the table.

    Attributes:
        after: what comes before the word: nothing, a command (`serve`, `bench latency`), or a command and a flag.
    """

    after: str
    word: str
    about: str = ""


def run(args: argparse.Namespace) -> None:
    sys.stdout.write(script(args.shell))


def collect() -> Iterator[Word]:
    """Every command, every benchmark as a command of `bench`, their flags and the flags' choices."""
    from quire.entrypoints.cli import bench
    from quire.entrypoints.cli.main import COMMANDS, build_parser

    yield Word("", "--help", "list the commands")
    yield Word("", "--version", "print the version")
    for name, about in COMMANDS.items():
        yield Word("", name, about)
        yield from _words_of(name, build_parser(name))
    for name, about in bench.BENCHMARKS.items():
        yield Word("bench", name, about)
        yield from _words_of(f"bench {name}", bench.build_parser(name))


def _words_of(command: str, parser: argparse.ArgumentParser) -> Iterator[Word]:
    from quire.engine.arg_help import visible_options

    shell_words = next((each for each in parser._actions if not each.option_strings), None)
    if shell_words is not None and command != "bench":
        yield from (Word(command, str(choice)) for choice in shell_words.choices or ())
    for action in visible_options(parser):
        about = " ".join((action.help or "").split()).partition(" (default:")[0] % {}
        choices = [str(choice) for choice in action.choices or () if PLAIN.fullmatch(str(choice))]
        for flag in action.option_strings:
            yield Word(command, flag, about)
            yield from (Word(f"{command} {flag}", choice) for choice in choices)


def script(shell: str) -> str:
    """The completion script of a shell."""
    return SCRIPTS[shell].replace("@TABLE@", "\n".join(_rows(collect())))


def _rows(words: Iterable[Word]) -> Iterator[str]:
    """Lines that can stand in single quotes, with `|` between three columns."""
    for each in words:
        about = each.about.replace("\\", "").replace("'", "’").replace("|", "/")
        yield f"{each.after}|{each.word}|{about}"


BASH = r"""# bash completion for quire; made by `quire completion bash`
_quire_table='@TABLE@'

# The words after $1 that begin with $2; flags only where $2 begins one.
_quire_words() {
    local after word about
    while IFS='|' read -r after word about; do
        if [[ $after == "$1" && $word == "$2"* && ($2 == -* || $word != -*) ]]; then
            printf '%s\n' "$word"
        fi
    done <<< "$_quire_table"
}

_quire() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" at=""
    COMPREPLY=()
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous="${COMP_WORDS[COMP_CWORD-2]}"
    fi
    if ((COMP_CWORD > 1)); then
        at="${COMP_WORDS[1]}"
    fi
    if [[ $at == bench ]] && ((COMP_CWORD > 2)); then
        at="bench ${COMP_WORDS[2]}"
    fi
    if [[ -n $(_quire_words "$at ${previous//_/-}" "") ]]; then
        COMPREPLY=($(_quire_words "$at ${previous//_/-}" "$current"))
    elif [[ $current == -* ]]; then
        COMPREPLY=($(_quire_words "$at" "${current//_/-}"))
    elif [[ -n $(_quire_words "$at" "") ]]; then
        COMPREPLY=($(_quire_words "$at" "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}
complete -o filenames -F _quire quire
"""

ZSH = r"""#compdef quire
# zsh completion for quire; made by `quire completion zsh`
_quire_table='@TABLE@'

# Fill `found` with the words after $1, each with its text; flags only if $2 is -.
_quire_words() {
    local after word about
    found=()
    while IFS='|' read -r after word about; do
        if [[ $after == "$1" && ( $2 == - || $word != -* ) ]]; then
            found+=("${word//:/\\:}:$about")
        fi
    done <<< "$_quire_table"
}

_quire() {
    local at="" dash="${PREFIX[1]}"
    local -a found
    if ((CURRENT > 2)); then
        at="${words[2]}"
    fi
    if [[ $at == bench ]] && ((CURRENT > 3)); then
        at="bench ${words[3]}"
    fi
    _quire_words "$at ${words[CURRENT-1]//_/-}" ""
    if ((! $#found)); then
        _quire_words "$at" "$dash"
    fi
    if (($#found)); then
        _describe 'word' found
    else
        _files
    fi
}
if [[ "${funcstack[1]}" == "_quire" ]]; then
    _quire "$@"
else
    compdef _quire quire
fi
"""

FISH = r"""# fish completion for quire; made by `quire completion fish`
set -g __quire_table '@TABLE@'

# The words after $argv[1], each with its text; $argv[2] is put before each.
function __quire_words
    set -l key (string escape --style=regex -- "$argv[1]")
    string split \n -- $__quire_table | string replace -rf -- "^$key\|([^|]*)\|(.*)" "$argv[2]\$1\t\$2"
end

function __quire_complete
    set -l words (commandline -opc)
    set -l token (commandline -ct)
    set -l at "$words[2]"
    if test "$at" = bench -a (count $words) -gt 2
        set at "bench $words[3]"
    end
    set -l flag (string match -r -- '^(--[^=]+)=' $token)
    if set -q flag[2]
        __quire_words "$at $flag[2]" "$flag[1]"
    else if not __quire_words "$at $words[-1]" ""
        if not __quire_words "$at" "" | string match -r -- (string match -rq -- '^-' $token; and echo '^-.*'; or echo '^[^-].*')
            __fish_complete_path $token
        end
    end
end
complete -c quire -f -a '(__quire_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}

add_arguments = only(
    ("shell", None, "bash, zsh or fish", {"choices": tuple(SCRIPTS), "metavar": "SHELL"}),
)
