"""`quire models`: the architectures, and what each can do."""

import argparse
import fnmatch
from typing import Any

from quire.engine.arg_parser import only
from quire.entrypoints.cli.terminal import show

COLUMNS = ("TP", "PP", "LoRA", "quantized", "pooling", "multimodal")


add_arguments = only(
    ("pattern", None, "names of architectures, with shell wildcards; none: all", {"nargs": "*"}),
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> None:
    from quire.models.registry import ModelRegistry, packaged_features
    from quire.plugins import load_general_plugins

    load_general_plugins("inspector")
    known = ModelRegistry.get_supported_archs()
    patterns = args.pattern or ["*"]
    chosen = [name for name in known if any(fnmatch.fnmatch(name.lower(), each.lower()) for each in patterns)]
    if not chosen:
        ModelRegistry.resolve(args.pattern)  # refuses, with the nearest names
    packaged = packaged_features()
    rows = {name: packaged.get(name, f"by {ModelRegistry.resolve(name).owner}") for name in chosen}
    show(rows, args.json, lambda: _as_text(rows))


def _as_text(rows: dict[str, Any]) -> str:
    """Rows as `packaged_features` has them, or who else has registered the architecture."""
    width = max(map(len, rows))
    lines = (f"{name:<{width}}  {row if isinstance(row, str) else _cells(row)}" for name, row in rows.items())
    more = "What else Transformers knows runs with its own modules (--model-impl transformers)."
    head = f"{'architecture':<{width}}  {'  '.join(COLUMNS)}  layers"
    return "\n".join((head, *lines, "", f"{len(rows)} architectures. {more}"))


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
