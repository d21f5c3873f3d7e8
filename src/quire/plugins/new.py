"""Writes the package of a new plugin, from the templates in `assets/plugins`: one folder for each kind.

In a template `@name@` is the plugin's name, `@Name@` the same as a class has it, `@NAME@` as an environment variable has it.
"""

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, did_you_mean
from quire.plugins.kinds import KINDS, Kind

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SUFFIX = ".in"


def write_plugin(kind_name: str, name: str, folder: str | None = None) -> dict[str, Any]:
    """Write a package; returns its folder and its files.

    Raises:
        ConfigError: there is no such kind, the name is none, or the folder is not empty.
    """
    if kind_name not in KINDS:
        hint = did_you_mean(kind_name, KINDS)
        raise ConfigError.of("kind", f"{kind_name!r} is not known{hint}; allowed: {', '.join(KINDS)}.")
    name = name.replace("-", "_")
    if not _NAME.fullmatch(name):
        raise ConfigError.of(
            "name", f"{name!r} is not a name: small letters, digits and single '_' or '-' are allowed."
        )
    root = Path(folder or f"quire-{name.replace('_', '-')}")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError.of("output", f"{str(root)!r} is there already, and not empty: name another folder.")
    written = render(KINDS[kind_name], name)
    for path, text in written.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return {"folder": str(root), "files": list(written)}


def render(kind: Kind, name: str) -> dict[str, str]:
    """The files of a package of a kind: path within it to text."""
    words = {
        "@name@": name,
        "@Name@": "".join(part.capitalize() for part in name.split("_")),
        "@NAME@": name.upper(),
        "@dash@": name.replace("_", "-"),
        "@kind@": kind.name,
        "@group@": kind.group,
        "@target@": kind.target,
        "@adds@": kind.adds,
        "@process@": kind.process,
        "@door@": kind.door,
    }
    texts: dict[str, str] = {}
    templates = files("quire") / "assets" / "plugins"
    for folder in (templates / "common", templates / kind.name):
        for template in sorted(folder.iterdir(), key=lambda each: each.name):
            text = template.read_text(encoding="utf-8")
            for mark, word in words.items():
                text = text.replace(mark, word)
            texts[_path_of(template.name.removesuffix(_SUFFIX), name)] = text
    return texts


def _path_of(template: str, name: str) -> str:
    if template == "plugin.py":
        return f"src/quire_{name}/__init__.py"
    if template == "test.py":
        return f"tests/test_{name}.py"
    return f"src/quire_{name}/{template}" if template.endswith(".py") else template
