"""What the site needs beyond Markdown: tables made from the code, and links to files outside of docs/.

A page has a marker, `<!-- made from the code: NAME -->`; the build puts the table there. A link to a file of the project
(`../src/quire/core/scheduler.py#L10`) leads to a copy of the file in the site. Knows hooks of MkDocs, and the parser, the
metrics and the environment variables of Quire.
"""

import argparse
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?:#L(?P<line>\d+))?(?P<anchor>#[^)\s]*)?\)")
_MARKER = re.compile(r"<!-- made from the code: (\w+) -->")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".cpp": "cpp", ".h": "cpp"}


def on_files(files: Files, config: Any) -> Files:
    """Add a copy of each file outside of docs/ that a page links to, and of what these pages link to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    texts = {uri: (ROOT / "docs" / uri).read_text(encoding="utf-8") for uri in waiting}
    known = set(waiting)
    while waiting:
        uri = waiting.pop()
        for match in _LINK.finditer(texts[uri]):
            path = _outside(uri, match["target"])
            if path is None or _copy_of(path) in known:
                continue
            copy = _copy_of(path)
            known.add(copy)
            if copy.endswith(".md"):
                texts[copy] = _page_of(path)
                files.append(File.generated(config, copy, content=texts[copy]))
                if path.endswith(".md"):
                    waiting.append(copy)
            else:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put in the tables, and lead links out of docs/ to the copies."""
    uri = page.file.src_uri

    def lead(match: "re.Match[str]") -> str:
        path = _outside(uri, match["target"])
        if path is None:
            return match[0]
        relative = posixpath.relpath(_copy_of(path), posixpath.dirname(uri) or ".")
        anchor = f"#__codelineno-0-{match['line']}" if match["line"] else match["anchor"] or ""
        return f"]({relative}{anchor})"

    markdown = _MARKER.sub(lambda match: _TABLES[match[1]](), markdown)
    if uri.startswith("source/") and not _original(uri).endswith(".md"):
        return markdown
    return _LINK.sub(lead, markdown)


def _original(uri: str) -> str:
    """The path in the project of the page at this place."""
    return uri.removeprefix("source/").removesuffix(".page.md") if uri.startswith("source/") else f"docs/{uri}"


def _outside(uri: str, target: str) -> str | None:
    """The path in the project of a link's target; None for a page of docs/, and for what is no file of the project."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(_original(uri)), target))
    if path.startswith("docs/"):
        return None if not uri.startswith("source/") else path
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return path if (ROOT / path).is_file() else None


def _copy_of(path: str) -> str:
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith((".json", ".png", ".svg")) else f"source/{path}.page.md"


def _page_of(path: str) -> str:
    """A page of the site with the text of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)  # the header of a model card
    language = _LANGUAGES.get(os.path.splitext(path)[1], "text")
    return f'# {path}\n\n~~~~~~{language} linenums="1"\n{text}~~~~~~\n'


# --- tables ---


def _cell(text: object) -> str:
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|").replace("<", "&lt;").strip()


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _flags() -> str:
    from quire.entrypoints.cli.main import build_parser

    parts: list[str] = []
    for group in build_parser("serve")._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if not actions:
            continue
        parts += [f"## {group.title}", group.description or ""]
        parts.append(_table(("flag", "default", "meaning"), [_flag_row(action) for action in actions]))
    return "\n\n".join(parts)


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    choices = " One of: " + ", ".join(f"`{choice}`" for choice in action.choices) + "." if action.choices else ""
    default = "" if action.default in (None, argparse.SUPPRESS) else f"`{action.default}`"
    return names, default, (action.help or "").replace("%%", "%") + choices


def _environment() -> str:
    from quire.envs import VARIABLES

    rows: list[tuple[object, ...]] = []
    for name, variable in VARIABLES.items():
        has_default = variable.default is not None and not callable(variable.default)
        rows.append((f"`{name}`", f"`{variable.default}`" if has_default else "", variable.doc))
    return _table(("variable", "default", "meaning"), rows)


def _metrics() -> str:
    from quire.metrics.engine_metrics import EngineMetrics
    from quire.metrics.prometheus import EngineCollector

    families = EngineCollector(EngineMetrics("model", 4096), {}).collect()
    rows = [
        (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
        for family in families
    ]
    return _table(("name", "type", "meaning"), rows)


def _api() -> str:
    """A directive for each public name, with the module that defines it."""
    import quire

    named = {quire._WHERE[name]: name for name in quire.__all__ if name in quire._WHERE}
    return "\n\n".join(
        f"::: {path.replace(':', '.')}\n    options:\n      heading: quire.{name}" for path, name in named.items()
    )


_TABLES = {"flags": _flags, "environment": _environment, "metrics": _metrics, "api": _api}
