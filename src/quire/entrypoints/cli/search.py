"""`quire search [WORDS]`: models of the hub that generate text, the most used first."""

import argparse
from typing import Any

from quire.config.hub.huggingface import TIMEOUT_S
from quire.engine.arg_parser import only
from quire.entrypoints.cli.terminal import show, table
from quire.errors import ConfigError

add_arguments = only(
    ("words", None, "words of the model's name (any)", {"nargs": "*", "metavar": "WORD"}),
    ("--limit", 20, "most models to show", {"type": int, "metavar": "N"}),
    ("--any-task", False, "also models that do not generate text"),
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> None:
    models = find_models(" ".join(args.words), args.limit, None if args.any_task else "text-generation")
    rows = [(name, f"{got:,}", f"{liked:,}") for name, got, liked in models]
    text = "\n".join(table(("MODEL", "DOWNLOADS", "LIKES"), rows))
    none = f"The hub has no model with {' '.join(args.words)!r} in its name."
    show(models, args.json, lambda: text if models else none)


def find_models(words: str, limit: int, task: str | None) -> list[tuple[str, int, int]]:
    """Name, downloads and likes. Raises ConfigError: the hub does not answer."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    asked: dict[str, Any] = {"search": words, "sort": "downloads", "direction": -1, "limit": limit}
    asked |= {"pipeline_tag": task} if task else {}
    try:  # not `HfApi.list_models`, which asks again for half a minute where there is no network
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/models", params=asked, headers=build_hf_headers(), timeout=TIMEOUT_S
        )
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()
    except Exception as error:  # the client's, of whatever library it uses
        why = str(error).splitlines()[0]
        raise ConfigError.of(
            "hub", f"{constants.ENDPOINT} does not answer a search: {why}. Is there a network?"
        ) from error
    return [(each["id"], each.get("downloads") or 0, each.get("likes") or 0) for each in found]
