"""The table of `Platform`'s methods in docs/hardware-plugin.md, made from the class.

`python -m tests.docs.platform_table` writes it.
"""

import ast
import inspect
import re
import textwrap

from tests.docs.pages import ROOT

from quire.platforms.interface import Platform

PAGE = ROOT / "docs/hardware-plugin.md"
BEGIN, END = "<!-- python -m tests.docs.platform_table writes this table -->", "<!-- the end of the table -->"


def platform_table() -> str:
    """One row a method: its signature, what it returns where nobody overrides it, its docstring."""
    lines = ["| method of `Platform` | default | what it is for |", "| --- | --- | --- |"]
    body = ast.parse(textwrap.dedent(inspect.getsource(Platform))).body[0]
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.FunctionDef):
            given = ast.unparse(node.args).replace("self, ", "").removeprefix("self")
            is_abstract = node.name in Platform.__abstractmethods__
            returned = [ast.unparse(s.value) for s in node.body if isinstance(s, ast.Return) and s.value is not None]
            default = "abstract" if is_abstract else f"`{returned[0]}`" if returned else "nothing"
            about = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
            cells = (f"`{node.name}({given}) -> {ast.unparse(node.returns or ast.Constant(None))}`", default, about)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{platform_table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
