"""The public names of Quire (docs/stability.md) with their signatures, compared with those that were written down.

    python tools/public_api.py            tell what has changed; exit code 1 if something has
    python tools/public_api.py --write    write them down again, after a change that is meant

Reads the sources with griffe, and imports nothing of them.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import griffe

from quire.deprecation import removed_in

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "tests" / "public_api.txt"
STABILITY = ROOT / "docs" / "stability.md"
_KINDS = {
    griffe.ParameterKind.var_positional: "*",
    griffe.ParameterKind.var_keyword: "**",
    griffe.ParameterKind.keyword_only: "--",
}

_BY_NAME = ("quire.AsyncEngineArgs", "quire.EngineArgs")
"""Settings are given by name: their order is no promise."""


def public_modules(page: str) -> list[str]:
    """The modules that a page lists in its table of public names."""
    return re.findall(r"^\| `(quire[\w.]*)` \|", page, re.MULTILINE)


# --- reading ---


def read_api(sources: Path, modules: Iterable[str]) -> dict[str, str]:
    """Every public name of these modules: `module.name` to its signature, or to what else it is."""
    package = griffe.load("quire", search_paths=[sources], allow_inspection=False, resolve_aliases=False)
    api: dict[str, str] = {}
    for module in modules:
        found = package if module == "quire" else package[module.removeprefix("quire.")]
        for name in _exports(found):
            target = _final(found.members[name])
            if target is not None:
                api.update(_describe(f"{module}.{name}", target))
    return api


def _exports(module: griffe.Module) -> list[str]:
    """`__all__`, or the names without an underscore that the module defines itself."""
    if module.exports is not None:
        return sorted(str(name) for name in module.exports if str(name) in module.members)
    return sorted(name for name, each in module.members.items() if not name.startswith("_") and not each.is_alias)


def _final(member: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """What a name stands for; None for a name of another package."""
    try:
        return member.final_target if isinstance(member, griffe.Alias) else member
    except griffe.AliasResolutionError:
        return None


def _describe(path: str, target: griffe.Object) -> Iterator[tuple[str, str]]:
    if isinstance(target, griffe.Function):
        yield path, f"function {_parameters(target)}"
    elif isinstance(target, griffe.Class):
        yield path, f"class {_parameters(target, by_name=path in _BY_NAME)}"
        for name, member in sorted(target.all_members.items()):
            found = _final(member)
            if not name.startswith("_") and found is not None and not isinstance(found, griffe.Module):
                yield from _describe(f"{path}.{name}", found)
    elif isinstance(target, griffe.Attribute):
        yield path, "attribute"


def _parameters(target: griffe.Function | griffe.Class, *, by_name: bool = False) -> str:
    texts: list[str] = []
    for each in target.parameters:
        if each.name not in ("self", "cls"):
            mark = _KINDS.get(each.kind, "") if each.kind is not None else ""
            mark = mark or ("--" if by_name else "")
            default = "" if each.default is None or mark in ("*", "**") else f"={_default(str(each.default))}"
            texts.append(f"{mark}{each.name}{default}")
    return f"({', '.join(texts)})"


def _default(text: str) -> str:
    """A default's text; of a field that is declared as `setting(default, kind, help)` the default."""
    if text.startswith("setting("):
        return ast.unparse(ast.parse(text, mode="eval").body.args[0])  # pyright: ignore[reportAttributeAccessIssue]
    return " ".join(text.split())


# --- comparing ---


class Change(NamedTuple):
    """A difference between two APIs."""

    path: str
    what: str
    is_breaking: bool

    def __str__(self) -> str:
        return f"{'breaks' if self.is_breaking else 'new   '}  {self.path}: {self.what}"


def compare(old: dict[str, str], new: dict[str, str]) -> list[Change]:
    """What is different; breaking: a program that used the old names by their signatures may fail."""
    changes = [Change(path, "removed", True) for path in old if path not in new]
    changes += [Change(path, "added", False) for path in new if path not in old]
    for path in old.keys() & new.keys():
        if old[path] != new[path]:
            changes += [Change(path, what, is_breaking) for what, is_breaking in _differences(old[path], new[path])]
    return sorted(changes)


def _differences(old: str, new: str) -> Iterator[tuple[str, bool]]:
    (old_kind, before), (new_kind, now) = _read(old), _read(new)
    if old_kind != new_kind:
        yield f"was a {old_kind}, and is a {new_kind}", True
    for name, (place, default) in before.items():
        if name not in now:
            yield f"the parameter {name} is gone", True
            continue
        place_now, default_now = now[name]
        if place != place_now and not (place == "--" and place_now.isdigit()):
            yield f"the parameter {name} has moved", True
        if default != default_now:
            yield f"the parameter {name} {_default_change(default, default_now)}", default is not None
    for name, (place, default) in now.items():
        if name not in before:
            is_needed = default is None and not place.startswith("*")
            yield f"the parameter {name} is new{' and has no default' if is_needed else ''}", is_needed


def _default_change(old: str | None, new: str | None) -> str:
    if new is None:
        return "has no default any more"
    return f"has a default now ({new})" if old is None else f"had the default {old}, and has {new}"


def _read(text: str) -> tuple[str, dict[str, tuple[str, str | None]]]:
    """A description's kind, and each parameter's place (its number, or its kind's mark) and default."""
    kind, _, rest = text.partition(" ")
    parameters: dict[str, tuple[str, str | None]] = {}
    for number, part in enumerate(_split(rest[1:-1])):
        marked, has_default, default = part.partition("=")
        name = marked.lstrip("*-")
        mark = marked[: len(marked) - len(name)]
        parameters[name] = (mark or str(number), default if has_default else None)
    return kind, parameters


def _split(text: str) -> list[str]:
    """At commas that are in no bracket and no string."""
    parts, depth, quote, begin = [], 0, "", 0
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    return [part.strip() for part in [*parts, text[begin:]] if part.strip()]


# --- what has outlived its time ---


def overdue(sources: Path, version: str) -> list[str]:
    """Deprecated names of these sources that should be gone in this version, as `file:line since`."""
    found: list[str] = []
    now = tuple(map(int, version.split(".")[:2]))
    for path in sorted(sources.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "deprecated(" in text else ():
            since = _since(node)
            if since is not None and tuple(map(int, removed_in(since).split("."))) <= now:
                found.append(f"{path.relative_to(sources)}:{node.lineno} deprecated since {since}")
    return found


def _since(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    values = [each.value for each in node.keywords if each.arg == "since"]
    is_mark = node.func.id in ("deprecated", "warn_deprecated")
    return str(values[0].value) if is_mark and values and isinstance(values[0], ast.Constant) else None


# --- the snapshot ---


def as_text(api: dict[str, str]) -> str:
    """One line for each name."""
    return "".join(f"{path}: {what}\n" for path, what in sorted(api.items()))


def from_text(text: str) -> dict[str, str]:
    """What `as_text` wrote."""
    return dict(line.split(": ", 1) for line in text.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the public names with those that were written down.")
    parser.add_argument("--write", action="store_true", help="write them down again")
    args = parser.parse_args()
    api = read_api(ROOT / "src", public_modules(STABILITY.read_text(encoding="utf-8")))
    changes = compare(from_text(SNAPSHOT.read_text(encoding="utf-8")) if SNAPSHOT.exists() else {}, api)
    print("\n".join(map(str, changes)) or "nothing has changed")
    if args.write:
        SNAPSHOT.write_text(as_text(api), encoding="utf-8")
    return 0 if args.write else int(bool(changes))


if __name__ == "__main__":
    sys.exit(main())
