"""`quire plugins`: which plugins are installed, and what became of each; `quire plugins new` writes a package of one."""

import argparse
import dataclasses
from typing import Any

from quire import plugins
from quire.engine.arg_parser import Flags, add_flags
from quire.entrypoints import exit_codes
from quire.entrypoints.cli.terminal import show
from quire.errors import ConfigError
from quire.plugins.kinds import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags: Flags = (
        ("action", "list", "what to show or do", {"nargs": "?", "choices": ("list", "new", "kinds")}),
        ("kind", None, f"of a new plugin: {', '.join(KINDS)}", {"nargs": "?", "metavar": "KIND"}),
        ("name", None, "of a new plugin, for example acorn", {"nargs": "?", "metavar": "NAME"}),
        ("--output", None, "where the new package is written (quire-NAME)", {"metavar": "FOLDER"}),
        ("--json", False, "print JSON"),
    )
    add_flags(parser, {"": flags})


def run(args: argparse.Namespace) -> int | None:
    if args.action == "new":
        return _new(args)
    if args.kind is not None:
        raise ConfigError.of("action", f"{args.action!r} takes no further word; `quire plugins new KIND NAME` does.")
    if args.action == "kinds":
        return _kinds(args)
    plugins, added = load_all()
    show({"plugins": plugins, "added": added}, args.json, lambda: as_text(plugins, added))
    return exit_codes.FAILED if any(plugin["state"] == "failed" for plugin in plugins) else exit_codes.OK


def load_all() -> tuple[list[dict[str, str]], dict[str, dict[str, list[str]]]]:
    """Load every plugin that may load, as a command that only looks. Each one as plain values; and what others than Quire have
    registered: kind, owner, names."""
    from quire.platforms import ask_all

    plugins.load_general_plugins("inspector")
    ask_all()
    for group in (
        plugins.STAT_LOGGERS_GROUP,
        plugins.LOGITS_PROCESSORS_GROUP,
        plugins.ENDPOINTS_GROUP,
        plugins.IO_PROCESSORS_GROUP,
        plugins.PATCHES_GROUP,
    ):
        plugins.load_plugins(group)
    found = [plugin.as_plain() for group in plugins.GROUPS for plugin in plugins.discover(group)]
    return found, {each.kind: owned for each in plugins.registries() if (owned := each.owned())}


def as_text(plugins: list[dict[str, str]], added: dict[str, dict[str, list[str]]]) -> str:
    """The list for a terminal."""
    if not plugins:
        return (
            "No plugin is installed. `quire plugins new KIND NAME` writes one; `quire plugins kinds` lists the kinds."
        )
    lines: list[str] = []
    for plugin in plugins:
        why = f": {plugin['why']}" if plugin["why"] else ""
        package = plugin["package"] or "no package"
        lines.append(f"{plugin['name']:<16} {plugin['state']:<8} {plugin['group']}  {package}  {plugin['target']}{why}")
    if added:
        lines += ["", "added:"]
        lines += [
            f"  {kind:<24} {', '.join(names)}  by {owner}"
            for kind, owners in sorted(added.items())
            for owner, names in owners.items()
        ]
    return "\n".join(lines)


def _kinds(args: argparse.Namespace) -> None:
    width = max(map(len, KINDS))
    lines = (f"{kind.name:<{width}}  {kind.adds}  ({kind.group}, {kind.process})" for kind in KINDS.values())
    show([dataclasses.asdict(kind) for kind in KINDS.values()], args.json, lambda: "\n".join(lines))


def _new(args: argparse.Namespace) -> None:
    from quire.plugins.new import write_plugin

    if args.kind is None or args.name is None:
        raise ConfigError.of("kind", "`quire plugins new KIND NAME` needs both; `quire plugins kinds` lists the kinds.")
    written: dict[str, Any] = write_plugin(args.kind, args.name, args.output)
    print(f"{written['folder']} has a plugin that works:")
    print("\n".join(f"  {path}" for path in written["files"]))
    print(f"Install it with `pip install --no-deps {written['folder']}`, and see it with `quire plugins`.")
