"""`quire models`: the architectures, what each can do, and whether each computes what Transformers does (`--check`)."""

import argparse
import dataclasses
import fnmatch
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.models.features import Features

COLUMNS = ("TP", "PP", "LoRA", "quantized", "pooling", "multimodal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which architectures, and what to do with them."""
    parser.add_argument("pattern", nargs="*", help="names of architectures, with shell wildcards; none: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--check", action="store_true",
        help="make a tiny random checkpoint of each with Transformers and compare tokens and logprobs in float32",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """List, or check."""
    from quire.models.registry import ModelRegistry
    from quire.plugins import load_general_plugins

    load_general_plugins("inspector")
    known = ModelRegistry.get_supported_archs()
    patterns = args.pattern or ["*"]
    chosen = [name for name in known if any(fnmatch.fnmatch(name.lower(), each.lower()) for each in patterns)]
    if not chosen:
        ModelRegistry.resolve(args.pattern)  # refuses, with the nearest names
    return _check(chosen, args.json) if args.check else _list(chosen, args.json)


def _list(names: list[str], as_json: bool) -> int:
    from quire.benchmarks.model_check import features
    from quire.models.registry import ModelRegistry

    rows = {name: features(name) for name in names}
    if as_json:
        values = {name: row if isinstance(row, str) else dataclasses.asdict(row) for name, row in rows.items()}
        json.dump(values, sys.stdout, indent=2)
        print()
        return 0
    width = max(map(len, names))
    print(f"{'architecture':<{width}}  {'  '.join(COLUMNS)}  layers")
    for name, row in rows.items():
        owner = ModelRegistry.resolve(name).owner
        suffix = "" if owner == "quire" else f"  (by {owner})"
        print(f"{name:<{width}}  {_cells(row)}{suffix}")
    print(
        f"\n{len(names)} architectures. What else Transformers knows runs with its own modules (--model-impl transformers)."
    )
    return 0


def _cells(row: "Features | str") -> str:
    if isinstance(row, str):
        return row
    answers = (
        row.tensor_parallel, row.pipeline_parallel, row.lora, row.quantization,
        "only" if not row.generates else row.pooling, row.multimodal,
    )  # fmt: skip
    words = [answer if isinstance(answer, str) else "yes" if answer else "-" for answer in answers]
    cells = "  ".join(f"{word:<{len(column)}}" for word, column in zip(words, COLUMNS, strict=True))
    return f"{cells}  {', '.join(row.mixers)}{' + experts' if row.experts else ''}"


def _check(names: list[str], as_json: bool) -> int:
    from quire.benchmarks.model_check import check

    results: list[dict[str, Any]] = []
    width = max(map(len, names))
    for name in names:
        result = check(name)
        results.append(dataclasses.asdict(result))
        if not as_json:
            print(f"{name:<{width}}  {result.verdict:<7}  {result.detail}", flush=True)
    if as_json:
        json.dump(results, sys.stdout, indent=2)
        print()
    failed = [result["architecture"] for result in results if result["verdict"] == "FAILED"]
    equal = sum(result["verdict"] == "equal" for result in results)
    print(f"{equal} of {len(results)} equal to Transformers, {len(failed)} failed", file=sys.stderr)
    return 1 if failed else 0
