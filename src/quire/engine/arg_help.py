"""What `--help` prints: a small command's flags, or a large one's groups; `--help=WHAT` a group, flags by keyword, or all.

Knows a parser's groups and texts. Knows nothing of what the flags mean.
"""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from quire.errors import ConfigError, nearest

SMALL = 30
"""A command with at most this many flags shows all of them."""
WIDTH = 110
_VLLM_TOPICS = {"listgroup": "", "page": "all"}
_FRONTEND = ("Network", "Access", "Chat", "Answers and log")
"""The groups of what vLLM calls `Frontend`."""


class HelpAction(argparse.Action):
    """`-h`, `--help` and `--help=WHAT`: print and leave."""

    def __init__(self, option_strings: list[str], dest: str = argparse.SUPPRESS, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs="?", const="", default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        print(help_text(parser, str(values or "")), end="")
        parser.exit()


def help_text(parser: argparse.ArgumentParser, topic: str = "") -> str:
    """The help on `topic`: nothing, a group's title (or one of its words), part of a flag's name or text, or `all`.
    Raises ConfigError if nothing has such a name or text."""
    topic = _VLLM_TOPICS.get(topic, topic)
    groups = _groups(parser)
    options = [action for actions in groups.values() for action in actions if action.option_strings]
    if topic == "all" or (not topic and len(options) <= SMALL):
        return _page(parser, groups)
    if not topic:
        return _overview(parser, groups)
    word = re.sub("(?<=[a-z])(?=[A-Z])", "-", topic).casefold().replace("_", "-").strip("-")
    wanted = _FRONTEND if word == "frontend" else [title for title in groups if _is_called(title, word)]
    found = {title: groups[title] for title in wanted if title in groups}
    if not found:
        matches = [(title, [each for each in actions if _speaks_of(each, word)]) for title, actions in groups.items()]
        found = {title: actions for title, actions in matches if actions}
    if not found:
        elsewhere = [name.replace("_", "-") for name in getattr(parser, "foreign_settings", ())]
        if elsewhere := [f"--{name}" for name in elsewhere if word in name]:
            absent = f"of vLLM's flags, not available yet in Quire: {', '.join(elsewhere)}"
            raise ConfigError.of("help", f"nothing here speaks of {topic!r}; {absent}")
        near = nearest(f"--{word}", [name for each in options for name in each.option_strings])
        hint = f"did you mean {near}?" if near else f"the groups are {', '.join(filter(None, groups))}"
        raise ConfigError.of("help", f"nothing here speaks of {topic!r}; {hint}")
    return _page(parser, found, with_description=False)


def visible_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The flags that help shows."""
    return [each for actions in _groups(parser).values() for each in actions if each.option_strings]


def _groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """Title to actions, in order; what belongs to no group has the empty title. Hidden actions are left out."""
    groups: dict[str, list[argparse.Action]] = {"": []}
    for group in parser._action_groups:
        own = "" if group.title in ("positional arguments", "options") else str(group.title)
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        if shown:
            groups.setdefault(own, []).extend(shown)
    return groups


def _is_called(title: str, word: str) -> bool:
    """`KV cache` answers to `kv cache`, `cache` and vLLM's `CacheConfig`."""
    name = title.casefold()
    word = word.removesuffix("config").strip("-") or word
    return bool(word) and (word == name or word.replace("-", " ") == name or word in name.split())


def _speaks_of(action: argparse.Action, word: str) -> bool:
    names = [name.strip("-") for name in action.option_strings] or [action.dest.replace("_", "-")]
    return any(word in name for name in names) or word in (action.help or "").casefold()


def _formatter(parser: argparse.ArgumentParser) -> argparse.HelpFormatter:
    make: Any = parser.formatter_class
    return make(prog=parser.prog, max_help_position=36, width=WIDTH)


def _usage(parser: argparse.ArgumentParser) -> str:
    if parser.usage:
        return f"usage: {parser.usage % {'prog': parser.prog}}\n"
    names: list[str] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
        if action.option_strings and action.required:
            names.append(f"{action.option_strings[0]} {shown}")
        elif not action.option_strings:
            names.append({"?": f"[{shown}]", "*": f"[{shown} …]", "+": f"{shown} …"}.get(str(action.nargs), shown))
    return " ".join(("usage:", parser.prog, *names, "[options]")) + "\n"


def _page(
    parser: argparse.ArgumentParser, groups: dict[str, list[argparse.Action]], *, with_description: bool = True
) -> str:
    formatter = _formatter(parser)
    if with_description:
        formatter.add_text(parser.description)
    titles = {str(group.title): group.description for group in parser._action_groups}
    for title, actions in groups.items():
        positional = [action for action in actions if not action.option_strings]
        flags = [action for action in actions if action.option_strings]
        _section(formatter, title or "arguments", titles.get(title), positional)
        _section(formatter, title or "options", titles.get(title), flags)
    return f"{_usage(parser)}\n{formatter.format_help()}"


def _section(
    formatter: argparse.HelpFormatter, title: str, text: str | None, actions: Iterable[argparse.Action]
) -> None:
    if actions := list(actions):
        formatter.start_section(title)
        formatter.add_text(text)
        formatter.add_arguments(actions)
        formatter.end_section()


def _overview(parser: argparse.ArgumentParser, groups: dict[str, list[argparse.Action]]) -> str:
    """The ungrouped flags whole, of the others the names."""
    lines = [_page(parser, {"": groups[""]}), "groups of options:"]
    for title, actions in groups.items():
        if title:
            names = ", ".join(_main_name(action) for action in actions)
            lines.append(f"  {title}")
            lines += textwrap.wrap(
                names, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
    example = next((title.split()[-1].lower() for title in groups if title), "all")
    lines += [
        "",
        f"  {parser.prog} --help={example}  one group; --help=max-len  flags and texts with these words; --help=all  everything",
    ]
    return "\n".join(lines) + "\n"


def _main_name(action: argparse.Action) -> str:
    return next((name for name in action.option_strings if name.startswith("--")), action.option_strings[0]).strip("-")
