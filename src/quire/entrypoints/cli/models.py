"""`quire models`: the architectures, what each can do, and whether each computes what Transformers does (`--check`); the
table of both in a document (`--write`)."""

import argparse
import dataclasses
import fnmatch
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.arg_parser import switch

if TYPE_CHECKING:
    from quire.benchmarks.model_table import Result
    from quire.models.features import Features


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="*", help="names of architectures, with shell wildcards; none: all")
    switch(parser, "--json", "print JSON")
    switch(
        parser,
        "--check",
        "make a tiny random checkpoint of each with Transformers and compare tokens and logprobs in float32",
    )
    parser.add_argument(
        "--write", metavar="FILE", type=Path,
        help="put the table of all architectures between the two markers of this document, or into a new one: features from the "
        "specs, and what --check found (rows that are not checked now keep what they have)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from quire.models.registry import ModelRegistry
    from quire.plugins import load_general_plugins

    load_general_plugins("inspector")
    known = ModelRegistry.get_supported_archs()
    patterns = args.pattern or ["*"]
    chosen = [name for name in known if any(fnmatch.fnmatch(name.lower(), each.lower()) for each in patterns)]
    if not chosen:
        ModelRegistry.resolve(args.pattern)  # refuses, with the nearest names
    if args.write is not None:
        from quire.benchmarks.model_table import read_document

        read_document(args.write)  # refused before the checks, which take minutes
    results = _check(chosen, args.json) if args.check else []
    if not args.check and args.write is None:
        _list(chosen, args.json)
    if args.write is not None:
        from quire.benchmarks.model_table import write_table

        write_table(args.write, results)
    return 1 if any(result.verdict == "FAILED" for result in results) else 0


def _list(names: list[str], as_json: bool) -> None:
    from quire.benchmarks.model_table import COLUMNS, known_features
    from quire.models.registry import ModelRegistry

    rows = known_features(names)
    if as_json:
        values = {name: row if isinstance(row, str) else dataclasses.asdict(row) for name, row in rows.items()}
        json.dump(values, sys.stdout, indent=2)
        print()
        return
    width = max(map(len, names))
    print(f"{'architecture':<{width}}  {'  '.join(COLUMNS)}  layers")
    for name, row in rows.items():
        owner = ModelRegistry.resolve(name).owner
        suffix = "" if owner == "quire" else f"  (by {owner})"
        print(f"{name:<{width}}  {_cells(row)}{suffix}")
    print(
        f"\n{len(names)} architectures. What else Transformers knows runs with its own modules (--model-impl transformers)."
    )


def _cells(row: "Features | str") -> str:
    from quire.benchmarks.model_table import COLUMNS, feature_words, layer_words

    if isinstance(row, str):
        return row
    cells = "  ".join(f"{word:<{len(column)}}" for word, column in zip(feature_words(row), COLUMNS, strict=True))
    return f"{cells}  {layer_words(row)}"


def _check(names: list[str], as_json: bool) -> "list[Result]":
    from quire.benchmarks.model_table import check

    results: list[Result] = []
    width = max(map(len, names))
    for name in names:
        result = check(name)
        results.append(result)
        if not as_json:
            print(f"{name:<{width}}  {result.verdict:<7}  {result.detail}", flush=True)
    if as_json:
        json.dump([dataclasses.asdict(result) for result in results], sys.stdout, indent=2)
        print()
    verdicts = [result.verdict for result in results]
    print(
        f"{verdicts.count('equal')} of {len(results)} equal to Transformers, {verdicts.count('FAILED')} failed",
        file=sys.stderr,
    )
    return results
