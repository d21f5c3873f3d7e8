"""`quire bench sweep`: a benchmark over a grid of its own and of a server's parameters; it can be stopped and gone on with.

Each combination of the server's parameters is started once; every benchmark runs against it as often as asked. Each run has a
result file of its own; a run is missing while there is none. `summary.json` and `summary.csv` have a row for each.
"""

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from quire.benchmarks import common
from quire.benchmarks.own_server import RunningServer, running_server
from quire.benchmarks.plot import AXES, USUAL_FIGURES, plot_figures
from quire.benchmarks.results import Row, column, flatten, is_number, names_of
from quire.engine.arg_parser import Flags, add_flags
from quire.entrypoints.http_client import ask
from quire.errors import ConfigError, EngineError, refusing

Parameters = dict[str, Any]
"""Setting to value, as flags have them: `{"max_num_seqs": 64}` is `--max-num-seqs 64`."""


def read_parameters(text: str | None, setting: str) -> list[Parameters]:
    """Combinations from a JSON file, or from JSON itself.
    Raises ConfigError: no such file, or something else than these.

    An object whose values are lists is a grid: every combination of them. A list has one object a combination. An object of
    objects names each combination. Nothing is one combination without parameters.
    """
    if text is None:
        return [{}]
    with refusing(OSError, ValueError, setting=setting, what=f"{setting}: {text!r} is neither a file nor JSON"):
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                given: Any = json.load(file)
        else:
            given = json.loads(text)
    if isinstance(given, Mapping) and given and all(isinstance(value, Mapping) for value in given.values()):
        given = list(given.values())
    if isinstance(given, Mapping):
        columns = [value if isinstance(value, list) else [value] for value in given.values()]
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*columns)]
    if isinstance(given, list) and given and all(isinstance(one, Mapping) for one in given):
        return [{name: value for name, value in one.items() if name != "_benchmark_name"} for one in given]
    raise ConfigError.of(setting, f"{text!r} must be an object of lists (a grid) or a list of objects (combinations).")


def parse_links(text: str) -> list[tuple[str, str]]:
    """`max_num_seqs=max_concurrency,…`: a server's and a benchmark's parameter that must be equal.
    Raises ConfigError: the text is written otherwise."""
    pairs = [tuple(part.strip() for part in pair.split("=")) for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if len(pair) != 2 or not all(pair):
            raise ConfigError.of("link_vars", f"{text!r} must be SERVER_NAME=BENCH_NAME, with commas between.")
    return [(pair[0], pair[1]) for pair in pairs]


def combine(
    serve: Sequence[Parameters], bench: Sequence[Parameters], links: Sequence[tuple[str, str]]
) -> list[tuple[Parameters, list[Parameters]]]:
    """For each server the benchmarks that run against it.
    Raises ConfigError: the links leave nothing, or name a parameter that there is not."""
    for server_name, bench_name in links:
        if not any(server_name in one for one in serve) or not any(bench_name in one for one in bench):
            message = f"{server_name}={bench_name} names a parameter that the sweep does not have."
            raise ConfigError.of("link_vars", message)
    combined: list[tuple[Parameters, list[Parameters]]] = []
    for server in serve:
        fitting = [one for one in bench if all(server.get(left) == one.get(right) for left, right in links)]
        if fitting:
            combined.append((server, fitting))
    if not combined:
        raise ConfigError.of("link_vars", "no combination has equal values; nothing is left to run.")
    return combined


def flags(parameters: Parameters) -> list[str]:
    """Words of a command line; true and false are `--name` and `--no-name`, null leaves the flag out."""
    words: list[str] = []
    for name, value in parameters.items():
        flag = name.lstrip("-").replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | dict):
            words += [f"--{flag}", json.dumps(value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def folder_name(parameters: Parameters) -> str:
    """A combination as a folder: readable, and short and unlike any other's."""
    if not parameters:
        return "default"
    text = ",".join(
        f"{name}={json.dumps(value) if isinstance(value, list | dict) else value}" for name, value in parameters.items()
    )
    safe = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", text)
    if safe == text and len(safe) <= 100:
        return safe
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{safe[:90]}~{digest}"


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a benchmark, and where its result is kept."""

    server: Parameters
    bench: Parameters
    number: int
    path: str

    def read(self) -> Row | None:
        """The figures; None while there is no whole result."""
        try:
            with open(self.path, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None
        return flatten(found) if isinstance(found, dict) else None


def runs_of(plan: Sequence[tuple[Parameters, list[Parameters]]], folder: str, count: int) -> list[Run]:
    """Every run of a sweep, the runs of one server behind one another."""
    return [
        Run(server, bench, number, os.path.join(folder, folder_name(server), folder_name(bench), f"run={number}.json"))
        for server, benches in plan
        for bench in benches
        for number in range(count)
    ]


DEFINITION = "sweep.json"


FLAGS: dict[str, Flags] = {
    "Commands": (
        ("--bench-cmd", None, "the benchmark, for example `quire bench serve --model X`", {"metavar": "COMMAND"}),
        ("--serve-cmd", None, "the server; none if the benchmark needs none or one runs", {"metavar": "COMMAND"}),
        (
            "--after-bench-cmd",
            None,
            "run after each benchmark, in place of emptying the prefix cache",
            {"metavar": "COMMAND"},
        ),
        ("--server-ready-timeout", 600.0, "seconds a server may take to start"),
        ("--show-stdout", False, "show what the commands print"),
    ),
    "Parameters": (
        (
            "--bench-params",
            None,
            'of the benchmark: a file, or JSON: {"request_rate": [1, 4, 16]}',
            {"metavar": "JSON"},
        ),
        ("--serve-params", None, "of the server, likewise", {"metavar": "JSON"}),
        ("--link-vars", "", "only where server's A equals the benchmark's B", {"metavar": "A=B,…"}),
        ("--num-runs", 3, "repetitions of each combination"),
    ),
    "Results": (
        ("--output-dir -o", "results", "where sweeps are kept", {"metavar": "PATH"}),
        ("--experiment-name -e", None, "this sweep's folder there; else the time", {"metavar": "NAME"}),
        ("--resume", None, "go on with the sweep in this folder", {"metavar": "NAME"}),
        ("--dry-run", False, "only print the commands"),
    ),
    "Plot": (("--plot", False, "plot figures over the parameters, as SVG beside the summary"), *AXES),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=("serve",), help=argparse.SUPPRESS)  # `vllm bench sweep serve`
    add_flags(parser, FLAGS)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    if not args.bench_cmd:
        raise ConfigError.of("bench_cmd", "name the benchmark to run, for example --bench-cmd 'quire bench latency'.")
    plan = combine(
        read_parameters(args.serve_params, "serve_params"),
        read_parameters(args.bench_params, "bench_params"),
        parse_links(args.link_vars),
    )
    if args.serve_params and not args.serve_cmd:
        raise ConfigError.of("serve_params", "there is no server to give them to; add --serve-cmd.")
    folder = os.path.join(args.output_dir, args.resume or args.experiment_name or time.strftime("%Y%m%d_%H%M%S"))
    runs = runs_of(plan, folder, args.num_runs)
    if not args.dry_run:
        _write_definition(args, folder, plan)
    failures: list[str] = []
    for _, group in itertools.groupby(runs, key=lambda run: folder_name(run.server)):
        of_server = list(group)
        if args.dry_run:
            _show(args, of_server)
        elif missing := [run for run in of_server if run.read() is None]:
            failures += _run_on_server(args, folder, missing)
    if args.dry_run:
        return {"rows": []}
    results = [(run, run.read()) for run in runs]
    rows: list[Row] = [
        {**figures, **flatten(run.server), **flatten(run.bench), "run_number": run.number}
        for run, figures in results
        if figures is not None
    ]
    write_summary(folder, rows)
    varied = varying(runs)
    _print(rows, varied, folder)
    if args.plot and rows:
        x = args.x or next((name for name in reversed(varied) if all(is_number(row.get(name)) for row in rows)), None)
        curve_by = args.curve_by if args.curve_by is not None else [name for name in varied if name != x]
        plot_figures(rows, x, args.y, curve_by, lambda figure: os.path.join(folder, f"{figure}.svg"))
    for failure in failures:
        print(failure)
    return {"rows": rows, "failures": failures, "exit_code": int(bool(failures))}


def _write_definition(args: argparse.Namespace, folder: str, plan: list[tuple[Parameters, list[Parameters]]]) -> None:
    """Write down what is swept. Raises ConfigError: the folder has another sweep, or --resume names none."""
    definition = {"bench_cmd": args.bench_cmd, "serve_cmd": args.serve_cmd, "plan": json.loads(json.dumps(plan))}
    path = os.path.join(folder, DEFINITION)
    if os.path.exists(path):
        if not args.resume:
            raise ConfigError.of("experiment_name", f"{folder!r} is there; go on with --resume.")
        with open(path, encoding="utf-8") as file:
            known = json.load(file)
        changed = [name for name, value in definition.items() if known.get(name) != value]
        if changed:
            raise ConfigError.of("resume", f"{folder!r} is a sweep with another {', '.join(changed)}.")
    elif args.resume:
        raise ConfigError.of("resume", f"there is no sweep in {folder!r}.")
    common.write_text(path, json.dumps(definition, indent=2), "output_dir")


def _show(args: argparse.Namespace, runs: list[Run]) -> None:
    if args.serve_cmd:
        print(f"server: {shlex.join(_server_words(args, runs[0].server))}")
    for run in runs:
        print(f"  {shlex.join(_bench_words(args, run))}" + ("" if run.read() is None else " (done)"))


def _run_on_server(args: argparse.Namespace, folder: str, runs: list[Run]) -> list[str]:
    """Start a server, if there is to be one, and run the benchmarks against it; a line for each failure."""
    server: contextlib.AbstractContextManager[RunningServer | None] = contextlib.nullcontext()
    if args.serve_cmd:
        log = os.path.join(folder, folder_name(runs[0].server), "server.log")
        server = running_server(_server_words(args, runs[0].server), log, args.server_ready_timeout)
    failures: list[str] = []
    try:
        with server as running:
            for number, run in enumerate(runs, start=1):
                print(f"[{number} of {len(runs)}] {run.path}", flush=True)
                if failure := _run_bench(args, run, running):
                    failures.append(f"Failed: {failure}")
    except EngineError as error:
        failures.append(f"Failed: {error}")
    return failures


def _run_bench(args: argparse.Namespace, run: Run, server: RunningServer | None) -> str | None:
    """Run a benchmark; why it failed, if it did."""
    os.makedirs(os.path.dirname(run.path), exist_ok=True)
    log = run.path.removesuffix(".json") + ".log"
    words = _bench_words(args, run)
    with open(log, "w", encoding="utf-8") as output:
        streams: dict[str, Any] = {} if args.show_stdout else {"stdout": output, "stderr": subprocess.STDOUT}
        with refusing(OSError, setting="bench_cmd", what=f"bench_cmd: cannot run {words[0]!r}"):
            process = subprocess.Popen(words, **streams)
        try:
            while (code := process.poll()) is None:
                if server is not None and not server.is_alive():
                    return f"{run.path}: the server ended; see {server.log}."
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    failure = None
    if code != 0 or run.read() is None:
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        failure = f"{run.path}: code {code}: {lines[-1] if lines else ''}"
        if os.path.exists(run.path):
            os.remove(run.path)
    if args.after_bench_cmd:
        subprocess.run(shlex.split(args.after_bench_cmd), check=False)
    elif server is not None:
        with contextlib.suppress(OSError, EngineError):  # a server without such a route keeps its cache
            ask(server.target, "POST", "/reset_prefix_cache")
    return failure


def _server_words(args: argparse.Namespace, server: Parameters) -> list[str]:
    return [*shlex.split(args.serve_cmd), *flags(server)]


def _bench_words(args: argparse.Namespace, run: Run) -> list[str]:
    """The benchmark's command; `bench serve` names its file in two flags, the others in one."""
    words = [*shlex.split(args.bench_cmd), *flags(run.bench)]
    if "serve" in words[: words.index("bench") + 2 if "bench" in words else 0]:
        folder, name = os.path.split(run.path)
        return [*words, "--save-result", "--result-dir", folder, "--result-filename", name]
    return [*words, "--output-json", run.path]


def varying(runs: Sequence[Run]) -> list[str]:
    """Parameters with more than one value, the server's first."""
    rows: list[Row] = [{**flatten(run.server), **flatten(run.bench)} for run in runs]
    return [name for name in names_of(rows) if len({str(row.get(name)) for row in rows}) > 1]


def write_summary(folder: str, rows: list[Row]) -> None:
    with open(os.path.join(folder, "summary.json"), "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
    with open(os.path.join(folder, "summary.csv"), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names_of(rows))
        writer.writeheader()
        writer.writerows(rows)


def _print(rows: list[Row], varied: list[str], folder: str) -> None:
    """Medians of each combination's usual figures."""
    figures = [name for name in USUAL_FIGURES if any(name in row for row in rows)]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(row.get(name, "")) for name in varied), []).append(row)
    table = [
        [*key, len(group), *(statistics.median(column(group, figure) or [0.0]) for figure in figures)]
        for key, group in groups.items()
    ]
    header = [*varied, "runs", *figures]
    common.print_columns(f"{len(rows)} results in {folder}: summary.json, summary.csv", header, table)
