"""`quire models`: the architectures, and what each can do."""

import argparse
import fnmatch
import json
import sys
from typing import Any

from quire.engine.arg_parser import only

COLUMNS = ("TP", "PP", "LoRA", "quantized", "pooling", "multimodal")


add_arguments = only(
    ("pattern", None, "names of architectures, with shell wildcards; none: all", {"nargs": "*"}),
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> int:
    from quire.models.registry import ModelRegistry, packaged_features
    from quire.plugins import load_general_plugins

    load_general_plugins("inspector")
    known = ModelRegistry.get_supported_archs()
    patterns = args.pattern or ["*"]
    chosen = [name for name in known if any(fnmatch.fnmatch(name.lower(), each.lower()) for each in patterns)]
    if not chosen:
        ModelRegistry.resolve(args.pattern)  # refuses, with the nearest names
    packaged = packaged_features()
    if args.json:
        rows = {name: packaged.get(name, f"by {ModelRegistry.resolve(name).owner}") for name in chosen}
        json.dump(rows, sys.stdout, indent=2)
        print()
        return 0
    width = max(map(len, chosen))
    print(f"{'architecture':<{width}}  {'  '.join(COLUMNS)}  layers")
    for name in chosen:
        row = packaged.get(name)
        print(f"{name:<{width}}  {f'by {ModelRegistry.resolve(name).owner}' if row is None else _cells(row)}")
    print(
        f"\n{len(chosen)} architectures. What else Transformers knows runs with its own modules (--model-impl transformers)."
    )
    return 0


def feature_words(row: dict[str, Any]) -> tuple[str, ...]:
    """One word for each of `COLUMNS`."""
    pooling = row["pooling"] if row["generates"] else "only"
    values = (
        row["tensor_parallel"],
        row["pipeline_parallel"],
        row["lora"],
        row["quantization"],
        pooling,
        row["multimodal"],
    )
    return tuple(value if isinstance(value, str) else "yes" if value else "-" for value in values)


def layer_words(row: dict[str, Any]) -> str:
    """Kinds of mixers, and whether there are experts."""
    return f"{', '.join(row['mixers'])}{' + experts' if row['experts'] else ''}"


def _cells(row: dict[str, Any]) -> str:
    cells = "  ".join(f"{word:<{len(column)}}" for word, column in zip(feature_words(row), COLUMNS, strict=True))
    return f"{cells}  {layer_words(row)}"
