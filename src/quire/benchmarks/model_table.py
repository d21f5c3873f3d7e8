"""The table of architectures in docs/models.md: what each can do, from its spec, and how its check ended.

Knows markdown and the two markers that the table stands between. What a check found is kept for rows that were not checked
now; features are always made anew.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from quire.benchmarks.model_check import Result, features
from quire.errors import ConfigError
from quire.models.features import Features
from quire.models.registry import ModelRegistry

COLUMNS = ("TP", "PP", "LoRA", "quantized", "pooling", "multimodal")
BEGIN, END = "<!-- quire models: begin -->", "<!-- quire models: end -->"
_HEADER = ("architecture", "layers", *COLUMNS, "check", "largest difference", "compared with")
NOT_CHECKED = ("not checked", "", "")
_VERSIONS = re.compile(r"^Checked with (.*)\.$", re.MULTILINE)

Cells = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """The document's table.

    Attributes:
        features: cells of each architecture: its layers, then `COLUMNS`.
        checks: of each: the verdict, the largest difference, whose answers it was compared with.
        versions: of what the checks ran with.
    """

    features: Mapping[str, Cells]
    checks: Mapping[str, Cells]
    versions: str

    def as_markdown(self) -> str:
        """Versions, then a row an architecture."""
        rows = [(name, *cells, *self.checks.get(name, NOT_CHECKED)) for name, cells in self.features.items()]
        lines = [_row(_HEADER), _row(("---",) * len(_HEADER)), *map(_row, rows)]
        return f"Checked with {self.versions}.\n\n" + "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def feature_words(answer: Features) -> Cells:
    """One word for each of `COLUMNS`."""
    values = (
        answer.tensor_parallel, answer.pipeline_parallel, answer.lora, answer.quantization,
        answer.pooling if answer.generates else "only", answer.multimodal,
    )  # fmt: skip
    return tuple(value if isinstance(value, str) else "yes" if value else "-" for value in values)


def layer_words(answer: Features) -> str:
    """Kinds of mixers, and whether there are experts."""
    return f"{', '.join(answer.mixers)}{' + experts' if answer.experts else ''}"


def feature_cells() -> dict[str, Cells]:
    """Of every architecture of Quire's own."""
    names = [name for name in ModelRegistry.get_supported_archs() if ModelRegistry.resolve(name).owner == "quire"]
    answers = {name: features(name) for name in names}
    return {
        name: (answer, *("?",) * len(COLUMNS))
        if isinstance(answer, str)
        else (layer_words(answer), *feature_words(answer))
        for name, answer in answers.items()
    }


def _check_cells(result: Result) -> Cells:
    if result.verdict == "skipped":
        return "-", "-", result.compared_with
    difference = "-" if result.difference is None else f"{result.difference:.1e}"
    return result.verdict, difference, result.compared_with


def _installed_versions() -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("quire", "transformers", "torch"))


def read_table(text: str) -> Table:
    """The table of a document. Raises ConfigError: not both markers stand in it, in order."""
    inside = _split(text)[1]
    versions = _VERSIONS.search(inside)
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in inside.splitlines() if line[:1] == "|"]
    rows = [row for row in rows[2:] if len(row) == len(_HEADER)]
    checked = 2 + len(COLUMNS)
    return Table(
        {row[0]: row[1:checked] for row in rows},
        {row[0]: row[checked:] for row in rows},
        versions.group(1) if versions else "",
    )


def _split(text: str) -> tuple[str, str, str]:
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no table: it needs the lines {BEGIN} and {END}", setting="write")
    return before, inside, after


def write_table(path: Path, results: Iterable[Result]) -> None:
    """Put the table between the markers of a document.

    Args:
        results: of the checks that ran; other rows keep what they had.

    Raises:
        ConfigError: the file lacks a marker, or rows that keep their result were checked with other versions.
    """
    text = path.read_text(encoding="utf-8")
    old, cells = read_table(text), feature_cells()
    new = {result.architecture: _check_cells(result) for result in results}
    kept = {name: found for name, found in old.checks.items() if name in cells and name not in new}
    if new and kept and old.versions != _installed_versions():
        raise ConfigError(
            f"{path} was checked with {old.versions}, and this is {_installed_versions()}: check every architecture "
            "(no pattern)", setting="write",
        )  # fmt: skip
    table = Table(cells, kept | new, _installed_versions() if new else old.versions)
    before, _, after = _split(text)
    path.write_text(f"{before}{BEGIN}\n{table.as_markdown()}\n{END}{after}", encoding="utf-8")
