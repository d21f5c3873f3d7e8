"""`quire search WORDS`: models of the hub that generate text, the most used first."""

import argparse
import json
from typing import Any

from quire.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="+", metavar="WORD", help="words of the model's name")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="most models to show (20)")
    parser.add_argument("--any-task", action="store_true", help="also models that do not generate text")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints.cli.terminal import table

    models = find_models(" ".join(args.words), args.limit, None if args.any_task else "text-generation")
    if args.json:
        print(json.dumps(models, indent=2))
    elif not models:
        print(f"The hub has no model with {' '.join(args.words)!r} in its name.")
    else:
        print(
            "\n".join(
                table(
                    ("MODEL", "DOWNLOADS", "LIKES"), [(name, f"{got:,}", f"{liked:,}") for name, got, liked in models]
                )
            )
        )
    return 0


def find_models(words: str, limit: int, task: str | None) -> list[tuple[str, int, int]]:
    """Name, downloads and likes. Raises ConfigError: the hub does not answer."""
    from huggingface_hub import HfApi, constants

    filters: dict[str, Any] = {"pipeline_tag": task} if task else {}
    try:
        found = list(HfApi().list_models(search=words, sort="downloads", limit=limit, **filters))
    except Exception as error:  # the client's, of whatever library it uses
        why = str(error).splitlines()[0]
        raise ConfigError.of(
            "hub", f"{constants.ENDPOINT} does not answer a search: {why}. Is there a network?"
        ) from error
    return [(each.id, each.downloads or 0, each.likes or 0) for each in found]
