"""A command line, option by option: which words belong to which flag, and all that is wrong with it at once.

Knows argparse's rules of how many words follow a flag. Knows nothing of what the flags mean.
"""

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.arg_help import HelpAction
from quire.errors import ConfigError

_FLAG = re.compile(r"--?[A-Za-z]")


class Option(NamedTuple):
    """A flag with its values, or a word that belongs to no flag.

    Attributes:
        action: of the flag; None for a word alone and for a flag that is not known.
    """

    words: list[str]
    action: argparse.Action | None

    @property
    def is_flag(self) -> bool:
        """Whether it begins with a flag."""
        return bool(_FLAG.match(self.words[0]))


def split(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[Option]:
    """The options of a line in which flags have their normal spelling."""
    found: list[Option] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, _ = word.partition("=")
        actions = parser._option_string_actions
        action = actions.get(word) or actions.get(name) or actions.get(word[:2])
        is_flag = bool(_FLAG.match(word))
        joined = bool(has_value) or (action is not None and name not in actions)
        count = 0 if joined or not is_flag else _count(action, rest)
        found.append(Option([word, *rest[:count]], action if is_flag else None))
        del rest[:count]
    return found


def _count(action: argparse.Action | None, rest: Sequence[str]) -> int:
    """How many of the next words are the flag's values."""
    most = next((index for index, word in enumerate(rest) if _FLAG.match(word)), len(rest))
    if action is None or action.nargs in ("+", "*", argparse.REMAINDER):
        return most
    if action.nargs == "?":
        return min(most, 1)
    return min(1 if action.nargs is None else int(action.nargs), len(rest))


def all_problems(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[ConfigError]:
    """What is wrong with each option by itself."""
    found: list[ConfigError] = []
    options = split(parser, words)
    alone = [option.words[0] for option in options if not option.is_flag]  # a parser may require some
    for option in options:
        if not option.is_flag or isinstance(option.action, HelpAction):
            continue
        try:
            if option.action is None:
                parser.error(f"unrecognized arguments: {' '.join(option.words)}")
            argparse.ArgumentParser.parse_known_args(parser, [*alone, *option.words], argparse.Namespace())
        except ConfigError as error:
            found.append(error)
    return found
