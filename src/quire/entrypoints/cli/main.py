"""The `quire` command: finds the subcommand, imports only its module, and turns errors into one line and an exit code.

Exit codes: 0 all is well, 1 the work failed, 2 a setting or an argument is wrong, 130 interrupted.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.entrypoints import exit_codes

if TYPE_CHECKING:
    from quire.engine.arg_parser import ArgumentParser

GROUPS = {
    "a model, from its name to a talk": {
        "run": "fetch a model, start a server for it in the background, and talk to it",
        "pull": "fetch a model from the hub",
        "search": "search the hub for models",
        "list": "list the models that were fetched",
        "rm": "delete a model that was fetched",
        "ps": "list the servers that run on this machine",
        "stop": "end a server; its running requests finish first",
    },
    "a server, and what talks to it": {
        "serve": "start a server that speaks the OpenAI protocol",
        "route": "one address for several servers: by cached prefix and load, around servers that fail",
        "chat": "talk to a running server, turn by turn",
        "complete": "let a running server complete text",
        "top": "watch a running server: queues, KV pages, tokens a second, slowest requests",
    },
    "without a server": {
        "generate": "generate for every prompt of a file, without a server",
        "run-batch": "answer the requests of an OpenAI batch file, without a server",
        "translate": "translate a command of vLLM's, and tell what becomes of every flag",
        "as-vllm": "run a program that imports vLLM, with no word changed",
    },
    "to run it for others": {
        "deploy": "write files that run a server in Docker, Compose, Kubernetes or systemd, or watch it with Prometheus",
    },
    "to measure and to look": {
        "doctor": "check this machine and the servers that run on it, and tell what to set",
        "bench": "measure: a server under load, throughput, latency, startup; sweeps and plots",
        "simulate": "tell how many devices a load needs, with the engine's scheduler on a virtual clock",
        "explain": "tell what would be chosen for a model, and why",
        "patches": "list what installed packages change in Quire, check it, explain it",
        "models": "list the architectures and what each can do",
        "conformance": "check a platform (a device, or a vendor's plugin) against its contract",
    },
    "this installation": {
        "compile-cache": "compile a model's GPU kernels before they are needed",
        "plugins": "list the plugins and what became of them, or write a new one",
        "collect-env": "tell about this machine and installation",
        "completion": "print a script that completes commands and flags in bash, zsh or fish",
    },
}
"""The help's groups of subcommands, with a line about each. A subcommand's module has `add_arguments`, and `run`, which may
give an exit code."""
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}


def help_text() -> str:
    width = max(len(name) for name in COMMANDS)
    lines: list[str] = []
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {about}" for name, about in commands.items())]
    return "\n".join(
        (
            "usage: quire COMMAND [options]",
            "",
            "Runs and serves large language models.",
            *lines,
            "",
            "options:",
            "  -h, --help     this text; `quire COMMAND --help` for a command's options, --help=WORD to search them",
            "  -v, --version  the version",
        )
    )


def _unknown(word: str) -> int:
    from quire.errors import did_you_mean

    hint = did_you_mean(word, COMMANDS, "{}", f"the commands are {', '.join(COMMANDS)}")
    kind = "option" if word.startswith("-") else "command"
    print(f"quire: error: {word!r} is not a {kind}; {hint}", file=sys.stderr)
    return exit_codes.WRONG_ARGUMENT


def _load(name: str) -> Any:
    return importlib.import_module(f"quire.entrypoints.cli.{name.replace('-', '_')}")


def build_parser(name: str) -> "ArgumentParser":
    from quire.engine.arg_parser import ArgumentParser

    about = COMMANDS[name]
    parser = ArgumentParser(prog=f"quire {name}", description=about[0].upper() + about[1:] + ".")
    _load(name).add_arguments(parser)
    return parser


def _run_command(name: str, argv: Sequence[str]) -> int:
    from quire.envs import set_default
    from quire.patch import bootstrap

    if name != "serve":  # before anything makes a logger
        set_default("QUIRE_LOGGING_STREAM", "stderr")  # standard output is the command's own
    if name != "patches":  # it looks at what is there without them
        bootstrap("inspector" if name == "models" else "frontend")
    module, parser = _load(name), build_parser(name)
    is_help = list(argv[:1]) in (["-h"], ["--help"])
    passed_on = ["--"] if getattr(module, "PASSES_WORDS_ON", False) and not is_help else []
    args = parser.parse_args([*passed_on, *argv])
    args.command_line = list(argv)  # for commands that pass some of them on to another
    return module.run(args) or 0


def _guarded(name: str, argv: Sequence[str]) -> int:
    """Run a command; every error that Quire raises on purpose is one line."""
    from quire.errors import ConfigError, QuireError

    try:
        return _run_command(name, argv)
    except QuireError as error:
        for part in error.parts if isinstance(error, ConfigError) else (error,):
            print(f"quire: error: {' '.join(str(part).split())}", file=sys.stderr)
        return exit_codes.of_error(error)
    except BrokenPipeError:
        # The reader of our output went away (`quire explain | head`): nothing is wrong, and nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.FAILED


def main(argv: Sequence[str] | None = None) -> int:
    """The console entry point. `argv`: the arguments without the program's name; None means the process's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["help"] and len(arguments) > 1:
            arguments = [arguments[1], "--help"]
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(help_text())
            return 0
        if arguments[0] in ("-v", "-V", "--version"):
            from quire.version import __version__

            print(__version__)
            return 0
        if arguments[0] not in COMMANDS:
            return _unknown(arguments[0])
        return _guarded(arguments[0], arguments[1:])
    except KeyboardInterrupt:
        print("quire: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
