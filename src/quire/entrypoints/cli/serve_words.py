"""The words of a command line that `quire serve` gets, for commands that take its flags beside their own."""

import argparse
from collections.abc import Callable, Sequence


def serve_words(words: Sequence[str], add_own: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """A command's words without its own options, which `add_own` declares. The parser itself says which words belong to them."""
    from quire.engine.arg_parser import ArgumentParser

    own = ArgumentParser(add_help=False)
    add_own(own)
    return own.parse_known_args(list(words))[1]
