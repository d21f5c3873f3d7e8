"""Engine settings as command-line flags: dashes or underscores, human-readable numbers, JSON and dotted keys.

Knows argparse. `settings` holds the fields.
"""

import argparse
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from quire.config.checks import default_of
from quire.engine import arg_file, arg_help
from quire.engine.arg_words import all_problems, split
from quire.engine.vllm_settings import (
    ENGINE_DEFAULTS,
    LIST,
    NO_EFFECT,
    accept_or_refuse,
    accepted_values,
    flags_of,
    records_nothing,
)
from quire.errors import ConfigError, did_you_mean, nearest

GROUPS = {
    "model": "Model",
    "load_format": "Loading",
    "block_size": "KV cache",
    "pipeline_parallel_size": "Parallel",
    "max_num_batched_tokens": "Scheduler",
    "limit_mm_per_prompt": "Media",
    "enable_lora": "Adapters",
    "speculative_config": "Speculation",
    "device": "Device",
    "disable_log_stats": "Observability",
}
"""The field that opens each group of flags, in the order of the fields."""

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_int(text: str) -> int:
    """`4096`, `4k` (4,000), `4K` (4,096), `1.5M`; a fraction of a decimal unit is dropped (`1.2345k` is
    1,234). Raises argparse.ArgumentTypeError if the text is not such a number."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgtKMGT]?)", text.strip())
    if match:
        whole, _, fraction = match[1].partition(".")
        scaled = int(whole + fraction) * _SUFFIXES[match[2]]
        value, rest = divmod(scaled, 10 ** len(fraction))
        if not rest or match[2].islower():
            return value
    message = f"{text!r} is not a whole number (4096, 4k = 4000, 4K = 4096 and 1.5M are such numbers)"
    raise argparse.ArgumentTypeError(message)


def bounded(read: Callable[[str], float], words: str, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """A number from `least` to `most`, as `read` reads it; `words` say what it has to be."""

    def convert(text: str) -> Any:
        try:
            number = read(text)
        except (ValueError, argparse.ArgumentTypeError):
            number = math.nan
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
        return number

    return convert


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; its numbers may be written as those of other options (`{"size": 80g}`).

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    try:
        value: object = json.loads(_with_plain_numbers(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return typing.cast("dict[str, Any]", value)


def _with_plain_numbers(text: str) -> str:
    """JSON text whose `80g` outside of strings are written out."""

    def plain(match: re.Match[str]) -> str:
        return match[0] if match[1] is None else str(human_int(match[1]))

    return re.sub(r'"(?:[^"\\]|\\.)*"|(?<![\w.+-])(\d+(?:\.\d+)?[kmgtKMGT])(?!\w)', plain, text)


positive = bounded(human_int, "a whole number above 0", 1)


def flag(parser: Any, names: str, default: Any, text: str, **options: Any) -> None:
    """Add a flag by its default, which decides its type (a switch for False) and ends the help.

    Args:
        parser: or a group of one.
        names: with spaces between them, where there are several.
        default: the help tells a text or a number.
        text: the help; one that ends with a bracket tells its default itself.
        options: more for `add_argument`; a whole number that has no `type` must be above 0, unless its default is 0.
    """
    if default is False:
        options["action"] = "store_true"
    elif default is not None:
        options["default"] = default
        if isinstance(default, int | float):
            options.setdefault("type", float if isinstance(default, float) else positive if default else int)
        if isinstance(default, str | int | float) and default != "" and not text.endswith(")"):
            text += f" ({default:g})" if isinstance(default, float) else f" ({default})"
    parser.add_argument(*names.split(), help=text, **options)


Flag = tuple[str, Any, str] | tuple[str, Any, str, dict[str, Any]]
"""What `flag` takes: names, default, text, and a dictionary of options where there are some."""
Flags = Sequence[Flag]


def add_flags(parser: argparse.ArgumentParser, groups: Mapping[str, Flags]) -> None:
    """Add flags by the titles of their groups; the empty title is no group."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title) if title else parser
        for names, default, text, *options in flags:
            flag(group, names, default, text, **dict(*options))


def only(*flags: Flag) -> Callable[[argparse.ArgumentParser], None]:
    """`add_arguments` of a command that has these flags and no others."""
    return lambda parser: add_flags(parser, {"": flags})


class ArgumentParser(argparse.ArgumentParser):
    """As argparse's, and: `--max_model_len` is `--max-model-len`; `--hf-overrides.rope.factor 2` sets a key of a JSON
    option; `--disable-x` is `--no-enable-x`; a wrong flag gets a hint; nothing is guessed from a flag's first letters;
    `--help=WORD` searches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        add_help = kwargs.pop("add_help", True)
        super().__init__(*args, add_help=False, **kwargs)
        self.foreign_settings: list[str] = []
        if add_help:
            text = "this text; =GROUP, =KEYWORD or =all show more"
            self.add_argument("-h", "--help", action=arg_help.HelpAction, metavar="WHAT", help=text)

    def accept_foreign(self, names: Iterable[str]) -> None:
        """Add hidden flags for settings of vLLM, which are accepted at their defaults; real flags of the same name win."""
        self.foreign_settings += names

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        import sys

        self.add_foreign()
        given = self._normalise(list(sys.argv[1:] if args is None else args))
        path = arg_file.named_file(given) if arg_file.FLAG in self._option_string_actions else None
        if path is None:
            try:
                return super().parse_known_args(given, namespace)
            except ConfigError:
                ConfigError.raise_all(all_problems(self, given))
                raise
        words = self._normalise(arg_file.words_of_file(path, self._option_string_actions))
        try:
            # The flag between them ends a list of the file's, which would go on with a positional word.
            parsed, rest = super().parse_known_args([*words, f"{arg_file.FLAG}={path}", *given], namespace)
        except ConfigError as error:
            raise ConfigError(f"{error}; options of {path} were read, too", setting=error.setting) from None
        if getattr(parsed, "model_tag", None) and not any(word.split("=")[0] == "--model" for word in given):
            parsed.model = None  # `quire serve MODEL` wins over the file's model
        return parsed, rest

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's; an error tells all that is wrong at once."""
        parsed, rest = self.parse_known_args(args, namespace)
        messages = [f"unrecognized arguments: {' '.join(option.words)}" for option in split(self, rest)]
        ConfigError.raise_all([ConfigError(message + self._hint(message)) for message in messages])
        return parsed

    def normal_words(self, words: Sequence[str]) -> list[str]:
        """A line in which flags have their normal spelling, and keys of JSON options are in their objects."""
        self.add_foreign()
        return self._normalise(list(words))

    def format_help(self) -> str:
        return arg_help.help_text(self, "all")

    def add_foreign(self) -> None:
        """Add the flags of `accept_foreign`. Parsing does it, when every real flag is known."""
        for name in self.foreign_settings:
            flag, *short = flags_of(name)
            if flag not in self._option_string_actions:
                short = [word for word in short if word not in self._option_string_actions]
                is_switch = name in NO_EFFECT or any(isinstance(value, bool) for value in accepted_values(name))
                no = [f"--no-{flag[2:]}"] if is_switch else []
                self.add_argument(flag, *short, *no, action=ForeignFlag, name=name)

    def _normalise(self, args: list[str]) -> list[str]:
        flags: set[str] = set(self._option_string_actions)
        plain: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        index = 0
        while index < len(args):
            arg = args[index]
            index += 1
            if arg == "--":
                plain += args[index - 1 :]
                break
            name, has_value, value = arg.partition("=")
            base, _, path = name.partition(".")
            if not name.startswith("--") and (not path or base not in flags):
                plain.append(arg)
                continue
            flag = _paired(base if base in flags else base.replace("_", "-"), flags)
            if path and flag in flags:
                if not has_value:
                    if index >= len(args):
                        self.error(f"argument {name}: expected one value")
                    value = args[index]
                    index += 1
                arg_file.set_path(dotted.setdefault(flag, {}), path, _read_value(value))
                continue
            plain.append(f"{flag}{'.' + path if path else ''}{'=' + value if has_value else ''}")
        try:
            return _with_dotted(plain, dotted)
        except argparse.ArgumentTypeError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Raise the error as a ConfigError with a hint."""
        raise ConfigError(message + self._hint(message))

    def _hint(self, message: str) -> str:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice and (hint := did_you_mean(choice[1], re.findall(r"'([^']*)'", choice[2]))):
            return hint
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown is None:
            return f" (see `{self.prog} --help`)"
        flag = unknown[1].split("=")[0].split(".")[0]
        names = [name for action in arg_help.visible_options(self) for name in action.option_strings]
        near = nearest(flag, names)
        return f" (did you mean {near}?)" if near else f" (see `{self.prog} --help`)"


class ForeignFlag(argparse.Action):
    """The hidden flag of a setting of vLLM that Quire does not have, or that has no effect."""

    def __init__(self, option_strings: list[str], dest: str, *, name: str, **kwargs: Any) -> None:
        del dest, kwargs  # the parser's default for the destination is not this flag's to set
        nargs, hidden = "*" if name in LIST["several_values"] else "?", argparse.SUPPRESS
        super().__init__(option_strings, hidden, nargs=nargs, const="true", default=hidden, help=hidden)
        self.name = name

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        value = _read_value(values) if isinstance(values, str) else values
        if self.name == "compilation_config" and records_nothing(value):
            namespace.enforce_eager = True
            return
        accept_or_refuse(self.name, False if str(option_string).startswith("--no-") else value)


class _OptimizationLevel(argparse.Action):
    """`-O0` is `--enforce-eager`; the levels above trade a compile phase for speed, and there is none here."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        if values == 0:
            namespace.enforce_eager = True


_PAIRS = {"--enable-": "--no-disable-", "--disable-": "--no-enable-"}
"""Beginnings of a switch's other name, and of what it means."""


def _paired(flag: str, flags: set[str]) -> str:
    """`--disable-x` where only `--enable-x` is known is its opposite, and so the other way round."""
    for start, meaning in _PAIRS.items():
        if flag.startswith(start) and flag not in flags and (same := meaning + flag.removeprefix(start)) in flags:
            return same
    return flag


def _read_value(text: str) -> Any:
    """JSON where it reads as such, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _with_dotted(args: list[str], dotted: dict[str, dict[str, Any]]) -> list[str]:
    for flag, values in dotted.items():
        for index, arg in enumerate(args):
            if arg == flag and index + 1 < len(args):
                args[index + 1] = json.dumps({**json_object(args[index + 1]), **values})
                break
            if arg.startswith(flag + "="):
                args[index] = f"{flag}={json.dumps({**json_object(arg.partition('=')[2]), **values})}"
                break
        else:
            # In front, where no positional list can swallow it.
            args = [f"{flag}={json.dumps(values)}", *args]
    return args


def add_engine_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """A flag for every field of a dataclass of settings, in groups."""
    hints = typing.get_type_hints(cls)
    if isinstance(parser, ArgumentParser) and arg_file.FLAG not in parser._option_string_actions:
        arg_file.add_config_flag(parser)
    group: Any = parser
    taken: set[str] = {action.dest for action in parser._actions}
    for field in dataclasses.fields(cls):
        if field.name in GROUPS:
            group = parser.add_argument_group(GROUPS[field.name])
        if field.name in taken:
            continue  # the caller has its own (a positional model, for example)
        flags = flags_of(field.name, *field.metadata["aliases"])
        group.add_argument(*flags, **_flag_options(field, hints[field.name]))
        if field.name == "enforce_eager":
            text = "0 is --enforce-eager; 1, 2 and 3 are the same: nothing is compiled at start"
            levels: Any = {"type": int, "choices": (0, 1, 2, 3), "dest": argparse.SUPPRESS, "help": text}
            group.add_argument("-O", "--optimization-level", action=_OptimizationLevel, metavar="LEVEL", **levels)
    if isinstance(parser, ArgumentParser):
        parser.accept_foreign(ENGINE_DEFAULTS)


def _flag_options(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    default = default_of(field)
    kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    options: dict[str, Any] = {"default": default, "dest": field.name, "help": field.metadata["help"]}
    if default not in (None, "", False, {}):
        options["help"] += f" (default: {default})"
    if bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
        return options
    kind = _converter(kinds, field.metadata["check"].words)
    if any(typing.get_origin(kind) is list for kind in kinds):
        options.update(nargs="+", metavar="TEXT")
    else:
        options.update(type=kind, metavar="N" if int in kinds else _METAVARS.get(kind, "TEXT"))
    if field.name == "hf_token":
        options.update(nargs="?", const=True, metavar="TOKEN")  # alone: the stored one
    return options


def _converter(kinds: set[Any], words: Sequence[str]) -> Callable[[str], Any]:
    """What reads a flag's text; a number or an object may also be one of some words, which stays as it is."""
    is_object = any(typing.get_origin(kind) is dict for kind in kinds)
    read = json_object if is_object else human_int if int in kinds else float if float in kinds else str
    if read is str or not words:
        return read
    return lambda text: text.lower() if text.lower() in words else read(text)


_METAVARS: dict[Callable[[str], Any], str] = {json_object: "JSON", float: "X"}
