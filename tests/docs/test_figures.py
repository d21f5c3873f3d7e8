"""The tables of docs/performance.md say what was measured: each of Quire's figures in them is in the JSON beside it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
TABLES: dict[str, tuple[str, slice]] = {
    "## One H200": ("h200-offline.jsonl h200-first-use.json", slice(2, 3)),
    "### A server on one H200": ("h200-server-text.json", slice(2, 4)),
    "### A JSON schema on one H200": ("h200-forms.json", slice(1, 3)),
    "### Weights of 4 bits on one H200": ("h200-packed.json", slice(1, 8)),
    "## The scheduler": ("scheduler.json", slice(1, 3)),
    "## Where a step's time goes": ("step-llama-a-bf16.json", slice(1, 4)),
}
"""By heading: the results of the first table, and the columns that they have."""


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, int | float):
        yield float(value)


def results_of(name: str) -> Any:
    text = (ROOT / "bench/results" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def cells(heading: str, columns: slice) -> Iterator[str]:
    lines = iter(PAGE.split(f"\n{heading}\n", 1)[1].splitlines())
    for line in lines:
        if line.startswith("| "):
            break
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield from line.strip("|").split("|")[columns]


@pytest.mark.parametrize("heading", TABLES)
def test_every_figure_of_ours_was_measured(heading):
    names, columns = TABLES[heading]
    measured = {*numbers_in([results_of(name) for name in names.split()])}
    found = [text for cell in cells(heading, columns) for text in NUMBER.findall(cell)]
    assert len(found) > 5

    def is_there(text: str) -> bool:
        digits, value = len(text.partition(".")[2]), float(text.replace(",", ""))
        return any(abs(each * scale - value) <= 0.51 * 10**-digits for each in measured for scale in (1, 100))

    assert not [text for text in found if not is_there(text)]
