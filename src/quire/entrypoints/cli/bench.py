"""`quire bench`: finds the benchmark and imports only its module."""

import argparse
import contextlib
import importlib
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.arg_parser import ArgumentParser

BENCHMARKS = {
    "throughput": "offline tokens a second, all requests at once",
    "latency": "seconds of one batch, and a step of it",
    "startup": "fresh processes: import, load, first token",
    "first-use": "how long the first use of each feature stops other streams of a fresh server",
    "scheduler": "microseconds a request and step, without a model",
    "grammars": "structured outputs: microseconds a mask, milliseconds of all masks of a step, by form",
    "forms": "answers that follow a JSON schema beside free ones, in rounds that alternate",
    "frontend": "the server around the engine: microseconds a streamed token by part, and added latency",
    "host": "the engine's own thread around the device's work: microseconds a step and a request, by stage",
    "serve": "load on any OpenAI server: throughput, TTFT, TPOT, ITL, end-to-end latency, goodput",
    "client": "what the client of `serve` can take, beside a server that computes nothing",
    "sweep": "any of these over a grid of parameters, its own and a server's; can be gone on with",
    "plot": "figures of results over a setting, as SVG",
    "compare-results": "two results of the same work, with a margin for noise",
    "step": "one step: host and device time, bytes and operations moved, share of the read bandwidth",
    "compare": "beside other engines, in rounds that alternate: ratios on the same machine in the same minutes",
    "demo": "accuracy of the built-in demo model, task by task",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser a benchmark; the module of a benchmark is imported when it is named."""
    width = max(len(name) for name in BENCHMARKS)
    listed = "\n".join(f"  {name:<{width}}  {about}" for name, about in BENCHMARKS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description or ''}\n\nbenchmarks:\n{listed}"
    parser.usage = f"{parser.prog} BENCHMARK [options]"
    parser.add_argument("benchmark", nargs="?", choices=tuple(BENCHMARKS), metavar="BENCHMARK", help=argparse.SUPPRESS)
    parser.set_defaults(parser=parser)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _load(name: str) -> Any:
    return importlib.import_module(f"quire.benchmarks.{name.replace('-', '_')}")


def build_parser(name: str) -> "ArgumentParser":
    from quire.engine.arg_parser import ArgumentParser

    about = BENCHMARKS[name][0].upper() + BENCHMARKS[name][1:] + "."
    parser = ArgumentParser(prog=f"quire bench {name}", description=about)
    _load(name).add_arguments(parser)
    text = "write the figures as JSON too; - is standard output"
    parser.add_argument("--json", "--output-json", metavar="PATH", help=text)
    return parser


def run(args: argparse.Namespace) -> int:
    name = args.benchmark
    if name is None:
        args.parser.print_help()
        return 0
    parsed = build_parser(name).parse_args(args.arguments)
    to_stdout = parsed.json == "-"  # then tables go to standard error
    if parsed.json and not to_stdout:
        from quire.benchmarks.common import write_text

        write_text(parsed.json, "", "json", "a")  # a file that cannot be written is refused before anything is measured
    with contextlib.redirect_stdout(sys.stderr) if to_stdout else contextlib.nullcontext():
        result = _load(name).run_command(parsed)
    code = result.pop("exit_code", 0)
    text = json.dumps({"benchmark": name, **result}, indent=2) + "\n"
    if to_stdout:
        sys.stdout.write(text)
    elif parsed.json:
        from quire.benchmarks.common import write_text

        write_text(parsed.json, text, "json")
    return code
