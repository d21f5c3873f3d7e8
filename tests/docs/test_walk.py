"""Links to lines of the source name a symbol, and lead to it. `python -m tests.docs.test_walk` writes the line numbers anew."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[`(?P<symbol>[\w.]+)`\]\((?P<target>[^)#]+\.py)#L(?P<line>\d+)\)")
MOST_FILES = 9
MOST_WORDS_OF_THE_WALK = 1600
"""Seven minutes; the drawing and the table take the rest of ten."""
TOLERANCE = 40
"""How far a number may lag behind the code: a link that lands on the same screen still helps."""


def line_of(source: str, symbol: str) -> int | None:
    """Where `Class.method`, a class or a function is defined."""
    nodes: list[ast.stmt] = ast.parse(source).body
    line = None
    for name in symbol.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = next((node for node in nodes if isinstance(node, kinds) and node.name == name), None)
        if found is None:
            return None
        nodes, line = found.body, found.lineno
    return line


def links() -> list[tuple[Path, str, Path, int]]:
    """The page, the symbol, the file and the line of every such link."""
    return [
        (page, match["symbol"], (page.parent / match["target"]).resolve(), int(match["line"]))
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for match in _LINK.finditer(page.read_text(encoding="utf-8"))
    ]


def walk() -> str:
    """The text of the walk through one decode step."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return text.partition("## The way of one decode step")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("symbol", "file", "line"), [pytest.param(*link[1:], id=f"{link[0].stem} {link[1]}") for link in links()]
)
def test_a_linked_symbol_is_where_the_link_leads(symbol: str, file: Path, line: int) -> None:
    defined = line_of(file.read_text(encoding="utf-8"), symbol)
    assert defined is not None, f"{file} has no {symbol}"
    assert abs(defined - line) <= TOLERANCE, "run: python -m tests.docs.test_walk"


def test_the_walk_opens_few_files_and_is_short() -> None:
    text = walk()
    assert 1 < len({match["target"] for match in _LINK.finditer(text)}) <= MOST_FILES
    assert len(text.split()) <= MOST_WORDS_OF_THE_WALK


def main() -> None:
    """Write every line number anew."""
    for page in {link[0] for link in links()}:

        def renumber(match: re.Match[str], page: Path = page) -> str:
            file = (page.parent / match["target"]).resolve()
            line = line_of(file.read_text(encoding="utf-8"), match["symbol"])
            return f"[`{match['symbol']}`]({match['target']}#L{line or match['line']})"

        text = page.read_text(encoding="utf-8")
        page.write_text(_LINK.sub(renumber, text), encoding="utf-8")


if __name__ == "__main__":
    main()
