"""`quire translate 'vllm serve …'`: the same command for Quire, and what became of every flag. Starts nothing and reads no model.

A flag is *taken*, taken *as* something else, has *no meaning* here, is *not needed* (it asks for what is so anyway), or is
*absent*.
"""

import argparse
import dataclasses
import itertools
import logging
import re
import shlex
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from quire import envs
from quire.config.checks import read_object
from quire.config.kv_transfer import extracted_layers, read_kv_transfer_config
from quire.config.observability import LoggingConfig, read_structured_outputs_config, resolve_profiler
from quire.config.speculative import read_speculative_config
from quire.engine.arg_help import HelpAction
from quire.engine.arg_parser import ArgumentParser, ForeignFlag, only
from quire.engine.arg_resolve import attention_backend
from quire.engine.arg_utils import AsyncEngineArgs
from quire.engine.arg_words import Option, split
from quire.engine.settings import OTHER_FORMATS, SAME_FORMATS, SAME_HASHES
from quire.engine.vllm_settings import NO_EFFECT
from quire.entrypoints import exit_codes
from quire.entrypoints.cli.terminal import show
from quire.errors import ConfigError, check_all, refusing
from quire.parsers.choice import AUTO, choose_formats

TAKEN, AS, NO_MEANING, NOT_NEEDED, ABSENT = "taken", "as", "no meaning", "not needed", "absent"
PROGRAMS = {"vllm.entrypoints.openai.api_server": ["serve"], "vllm.entrypoints.openai.run_batch": ["run-batch"]}
_PLUGINS = {"reasoning_parser_plugin": "reasoning_parser", "tool_parser_plugin": "tool_call_parser"}
_PLACEHOLDER = re.compile(r"\$|^<|<[^>]*>|\{\{|^\.\.\.$")
"""In values that a reader is to fill in; they are not checked."""
_IMAGE = re.compile(r"(^|/)vllm-(openai|cpu)[\w-]*(:|@|$)")
"""Of containers that run `vllm serve`."""
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OF_CONTAINER = re.compile(r"^(?:-e|--env)[=\n]?([A-Za-z_]\w*=.*)$", re.MULTILINE)
"""A variable that a container is given, in words of which each has a line."""


class Fate(NamedTuple):
    """What became of a flag, with its words as they were given and as Quire's command has them."""

    flag: str
    fate: str
    why: str = ""
    words: Sequence[str] = ()


@dataclasses.dataclass
class Translation:
    """A command for Quire: variables, the words, and the fate of each flag."""

    variables: list[str]
    command: list[str]
    fates: list[Fate]

    @property
    def text(self) -> str:
        """The command, for a shell."""
        words = [word for fate in self.fates for word in fate.words]
        shown = [word if _PLACEHOLDER.search(word) else shlex.quote(word) for word in (*self.command, *words)]
        return " ".join([*self.variables, *shown])

    @property
    def absent(self) -> list[Fate]:
        """What Quire does not have."""
        return [fate for fate in self.fates if fate.fate == ABSENT]


PASSES_WORDS_ON = True
add_arguments = only(
    (
        "words",
        None,
        "vLLM's command: vllm serve MODEL --flag …, within quotes if it has signs that a shell reads",
        {"metavar": "COMMAND", "nargs": argparse.REMAINDER},
    ),
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> int:
    words = [word for word in args.words if word not in ("--", "--json")]
    line = words[0] if len(words) == 1 else shlex.join(words)
    logging.disable(logging.INFO)  # the table tells what has no effect
    try:
        translation = translate(line)
    finally:
        logging.disable(logging.NOTSET)
    fates = [{"flag": each.flag, "fate": each.fate, "why": each.why} for each in translation.fates]
    show(
        {"command": translation.text, "flags": fates}, args.json or "--json" in args.words, lambda: as_text(translation)
    )
    return exit_codes.FAILED if translation.absent else exit_codes.OK


def as_text(translation: Translation) -> str:
    """The command, and a table of its flags."""
    lines = [translation.text]
    if translation.fates:
        width = max(len(fate.flag) for fate in translation.fates)
        lines += ["", *(f"{each.flag:<{width}}  {each.fate:<10}  {each.why}".rstrip() for each in translation.fates)]
    if translation.absent:
        lines += ["", f"{len(translation.absent)} of {len(translation.fates)} absent: the command leaves them out."]
    return "\n".join(lines)


def translate(line: str) -> Translation:
    """Translate a command of vLLM's.

    Raises:
        ConfigError: it is none.
    """
    words = command_words(line)
    inner = next((word for flag, word in itertools.pairwise(words) if flag in ("-c", "-lc") and "vllm " in word), None)
    if inner is not None:  # what a shell runs
        words = [*words[: words.index(inner) - 1], *command_words(inner)]
    variables, words, container = _unpacked(words)
    name, rest = _command(words, line)
    parser = _parser_of(name)
    for action in parser._actions:  # each flag is read alone
        action.required = False
    with refusing(ConfigError, setting="command", what=f"command: {line!r} cannot be read"):
        options = split(parser, parser.normal_words(rest))
    alone = [word for option in options if not option.is_flag for word in option.words]
    own, told = _variables(variables)
    flags = [option for option in options if option.is_flag]
    plugged = {_PLUGINS[option.action.dest] for option in flags if option.action and option.action.dest in _PLUGINS}
    told += [fate_of(parser, option, plugged) for option in flags]
    return Translation(own, ["quire", *name.split(), *alone], container + told)


def command_words(line: str) -> list[str]:
    """The words of one command: what comes after it in a shell's line is left out."""
    # What a reader is to fill in is no redirection.
    text = re.sub(r"<([^<>\s|&;]+)>", "\ue000\\1\ue001", line.replace("\\\n", " "))
    text = re.sub(r"(?<=\s)[012](?=>)", "", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    with refusing(ValueError, setting="command", what=f"command: {line!r} is not a shell's command"):
        for word in lexer:
            if word and set(word) <= set("|&;>"):
                break
            words.append(word.replace("\ue000", "<").replace("\ue001", ">"))
    return words


def _unpacked(words: list[str]) -> tuple[list[str], list[str], list[Fate]]:
    """The variables of a command, the command itself, and what becomes of a container around it."""
    image = next((at for at, word in enumerate(words) if _IMAGE.search(word)), None)
    if image is None:
        variables = list(itertools.takewhile(_ASSIGNMENT.match, words))
        return variables, words[len(variables) :], []
    around, inside = words[:image], words[image + 1 :]
    variables = _OF_CONTAINER.findall("\n".join(around))
    inside = list(
        itertools.dropwhile(("vllm", "serve").__contains__, inside)
    )  # where it says again what the image runs
    fate = Fate(" ".join((*around[:2], "…", words[image])), AS, "files that run it in a container: quire deploy docker")
    return variables, ["vllm", "serve", *inside], [fate]


def _command(words: Sequence[str], line: str) -> tuple[str, list[str]]:
    """Quire's subcommand, and the words behind it."""
    from quire.entrypoints.cli.main import COMMANDS

    given = list(words)
    while given and not given[0].endswith("vllm") and given[0] != "-m":
        given.pop(0)  # `uv run`, `numactl …`, `python`
    if given[:1] == ["-m"] and len(given) > 1 and given[1] in PROGRAMS:
        given = ["vllm", *PROGRAMS[given[1]], *given[2:]]
    if len(given) < 2 or given[1] not in COMMANDS:
        raise ConfigError.of("command", f"{line!r} is not a command of vLLM's: give 'vllm serve MODEL --flag …'")
    size = 3 if given[1] == "bench" and len(given) > 2 else 2
    return " ".join(given[1:size]), given[size:]


def _parser_of(name: str) -> ArgumentParser:
    from quire.entrypoints.cli import bench, main

    _, *rest = name.split()
    return bench.build_parser(rest[0]) if rest else main.build_parser(name)


def _variables(given: Sequence[str]) -> tuple[list[str], list[Fate]]:
    """Variables in front of the command, under Quire's names."""
    own: list[str] = []
    told: list[Fate] = []
    for each in given:
        name, _, value = each.partition("=")
        if not name.startswith("VLLM_"):
            own.append(f"{name}={shlex.quote(value)}")
        elif (renamed := envs.own_name(name)) in envs.VARIABLES:
            own.append(f"{renamed}={shlex.quote(value)}")
            told.append(Fate(name, AS, renamed))
        else:
            told.append(Fate(name, NO_MEANING, "Quire has no such variable (docs/migrating-from-vllm.md)"))
    return own, told


def fate_of(parser: ArgumentParser, option: Option, plugged: Container[str] = ()) -> Fate:
    """What becomes of one flag. `plugged`: settings whose values a file of the same command brings."""
    shown = " ".join(option.words)
    has_placeholder = any(_PLACEHOLDER.search(word) for word in option.words)
    action = option.action
    try:
        if action is None:
            parser.error(f"unrecognized arguments: {shown}")
        if isinstance(action, ForeignFlag) and has_placeholder and action.name in NO_EFFECT:
            return Fate(shown, NO_MEANING, NO_EFFECT[action.name])
        if isinstance(action, HelpAction) or (has_placeholder and not isinstance(action, ForeignFlag)):
            return Fate(shown, TAKEN, "", option.words)
        parsed, _ = argparse.ArgumentParser.parse_known_args(parser, option.words, argparse.Namespace())
        if isinstance(action, ForeignFlag):
            if getattr(parsed, "enforce_eager", False):
                return Fate(shown, AS, "--enforce-eager", ["--enforce-eager"])
            reason = NO_EFFECT.get(action.name)
            return Fate(shown, NO_MEANING, reason) if reason else Fate(shown, NOT_NEEDED, "it is so in any case")
        if action.dest in plugged:
            return Fate(shown, TAKEN, "its plugin is not read here", option.words)
        return _taken(option, shown, getattr(parsed, action.dest, None))
    except ConfigError as error:
        return Fate(shown, ABSENT, re.sub(r" \(see `.*`\)$", "", str(error)))


def _taken(option: Option, shown: str, value: Any) -> Fate:
    """A flag that Quire has: its value is checked, as far as that needs no model."""
    assert option.action is not None
    name = option.action.dest
    flag = option.words[0].partition("=")[0]
    fields = {field.name: field for field in dataclasses.fields(AsyncEngineArgs)}
    if name in fields:
        check_all([lambda: fields[name].metadata["check"](name, value)])
    if name in _READERS and value is not None:
        _READERS[name](value)
    if name == "attention_config" and value and set(value) == {"backend"}:
        return Fate(shown, AS, "--attention-backend", ["--attention-backend", str(value["backend"])])
    if flag in ("-O", "--optimization-level") or option.words[0].startswith("-O"):
        if option.words[-1].endswith("0"):
            return Fate(shown, AS, "--enforce-eager", ["--enforce-eager"])
        return Fate(shown, NO_MEANING, "nothing is compiled at the start")
    if name in ("model_impl", "generation_config") and value == "vllm":
        return Fate(shown, AS, f"{flag} quire", [flag, "quire"])
    same = {"load_format": SAME_FORMATS, "prefix_caching_hash_algo": SAME_HASHES}.get(name, {})
    why = f"means {same[value]}" if isinstance(value, str) and value in same else NO_EFFECT.get(name, "")
    return Fate(shown, TAKEN, why, option.words)


def _refuse_format(value: str) -> None:
    if value in OTHER_FORMATS:
        raise ConfigError.of("load_format", f"{value!r} is not read by Quire; it needs {OTHER_FORMATS[value]}")


def _read_formats(value: str) -> None:
    choose_formats(value, AUTO, None)


def _read_tools(value: str) -> None:
    choose_formats(AUTO, value, None)


def _read_logging(value: dict[str, Any]) -> None:
    level = value.get("log_level")
    read_object(LoggingConfig, "logging_config", {**value, "log_level": level and str(level).upper()})


def _read_profiler(value: dict[str, Any]) -> None:
    resolve_profiler(value)


def _read_structured(value: dict[str, Any]) -> None:
    read_structured_outputs_config(value, None)


_READERS: dict[str, Callable[[Any], object]] = {
    "attention_config": lambda value: attention_backend(None, value),
    "kv_transfer_config": read_kv_transfer_config,
    "load_format": _refuse_format,
    "logging_config": _read_logging,
    "profiler_config": _read_profiler,
    "reasoning_parser": _read_formats,
    "speculative_config": lambda value: extracted_layers(value) is None and read_speculative_config(value),
    "structured_outputs_config": _read_structured,
    "tool_call_parser": _read_tools,
}
"""What reads the value of a setting, and refuses it in words."""
