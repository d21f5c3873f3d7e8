"""`quire bench`: finds the benchmark and imports only its module."""

import argparse
import contextlib
import importlib
import json
import sys
from typing import Any

from quire.engine.arg_parser import ArgumentParser
from quire.entrypoints.cli.terminal import columns

BENCHMARKS = {
    "throughput": "offline tokens a second, all requests at once",
    "latency": "seconds of one batch, and a step of it",
    "lora": "a step with none, one and many adapters, beside the base model's",
    "startup": "fresh processes: import, load, first token",
    "first-use": "how long the first use of each feature stops other streams of a fresh server",
    "serve": "load on any OpenAI server: throughput, TTFT, TPOT, ITL, end-to-end latency, goodput",
    "speculate": "the same requests with guessed tokens and without: speed, guesses that were right, equal tokens",
    "chaos": "streams of many kinds on any server while its engine core dies: answers lost, tokens repeated, pauses",
    "sweep": "any of these over a grid of parameters, its own and a server's; can be gone on with",
    "plot": "figures of results over a setting, as SVG",
    "compare-results": "two results of the same work, with a margin for noise",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser a benchmark; the module of a benchmark is imported when it is named."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "\n".join((parser.description or "", "", "benchmarks:", *columns(BENCHMARKS)))
    parser.usage = f"{parser.prog} BENCHMARK [options]"
    parser.add_argument("benchmark", nargs="?", choices=tuple(BENCHMARKS), metavar="BENCHMARK", help=argparse.SUPPRESS)
    parser.set_defaults(parser=parser)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def build_parser(name: str) -> "ArgumentParser":
    return parser_of(f"quire bench {name}", BENCHMARKS[name], _load(name))


def run(args: argparse.Namespace) -> int:
    name = args.benchmark
    if name is None:
        args.parser.print_help()
        return 0
    return measure(name, build_parser(name).parse_args(args.arguments), _load(name))


def _load(name: str) -> Any:
    return importlib.import_module(f"quire.benchmarks.{name.replace('-', '_')}")


def parser_of(prog: str, about: str, benchmark: Any) -> "ArgumentParser":
    """The flags of a benchmark: a module with `add_arguments` and `run_command`."""
    parser = ArgumentParser(prog=prog, description=about[0].upper() + about[1:] + ".")
    benchmark.add_arguments(parser)
    text = "write the figures as JSON too; - is standard output"
    parser.add_argument("--json", "--output-json", metavar="PATH", help=text)
    return parser


def measure(name: str, args: argparse.Namespace, benchmark: Any) -> int:
    """Run a benchmark with its flags; the exit code."""
    from quire.benchmarks.common import write_text

    to_stdout = args.json == "-"  # then tables go to standard error
    if args.json and not to_stdout:
        write_text(args.json, "", "json", "a")  # a file that cannot be written is refused before anything is measured
    with contextlib.redirect_stdout(sys.stderr) if to_stdout else contextlib.nullcontext():
        result = benchmark.run_command(args)
    code = result.pop("exit_code", 0)
    text = json.dumps({"benchmark": name, **result}, indent=2) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    elif args.json:
        write_text(args.json, text, "json")
    return code
