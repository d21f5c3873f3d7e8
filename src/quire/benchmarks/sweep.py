"""`quire bench sweep`: a benchmark over a grid of its own and of a server's parameters; it can be stopped and gone on with.

Each combination of the server's parameters is started once; every benchmark runs against it as often as asked. Results are
files of their own, which is how a sweep knows what is done; `summary.json` and `summary.csv` have a row for each.
"""

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from quire.benchmarks import common
from quire.benchmarks.http_load import Target, ask
from quire.benchmarks.plot import USUAL_FIGURES, add_axes, draw
from quire.benchmarks.results import Row, column, flatten, is_number, names_of
from quire.errors import ConfigError, EngineError

Parameters = dict[str, Any]
"""Setting to value, as flags have them: `{"max_num_seqs": 64}` is `--max-num-seqs 64`."""


def read_parameters(text: str | None, setting: str) -> list[Parameters]:
    """Combinations from a JSON file, or from JSON itself.
    Raises ConfigError: no such file, or none of these forms.

    An object whose values are lists is a grid: every combination of them. A list has one object a combination. An object of
    objects names each combination. Nothing is one combination without parameters.
    """
    if text is None:
        return [{}]
    try:
        if os.path.isfile(text):
            with open(text, encoding="utf-8") as file:
                given: Any = json.load(file)
        else:
            given = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError.of(setting, f"{text!r} is neither a file nor JSON: {error}.") from None
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
    Raises ConfigError: another form."""
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


STOP_TIMEOUT_S = 60.0


class SweepServer:
    """A running server; a context that ends it with all the processes it started.

    Args:
        words: the command.
        log: the file for what it prints.
        timeout_s: how long it may take until it is ready.

    Raises:
        EngineError: it ended, or is not ready in time.
        ConfigError: there is no such command, or something else listens at its address.
    """

    def __init__(self, words: list[str], log: str, timeout_s: float) -> None:
        self._words = words
        self.log = log
        self._timeout_s = timeout_s
        host = _value(words, "--host") or "127.0.0.1"
        self.target = Target("127.0.0.1" if host in ("0.0.0.0", "::") else host, int(_value(words, "--port") or 8000))

    def __enter__(self) -> "SweepServer":
        if self._answers():
            message = f"something answers at {self.target.url} already; end it, or give --port."
            raise ConfigError.of("serve_cmd", message)
        os.makedirs(os.path.dirname(self.log), exist_ok=True)
        with open(self.log, "w", encoding="utf-8") as output:
            try:
                self._process = subprocess.Popen(
                    self._words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            except OSError as error:
                raise ConfigError.of("serve_cmd", f"cannot run {self._words[0]!r}: {error}.") from None
        last = time.monotonic() + self._timeout_s
        try:
            while not self._answers():
                if not self.is_alive():
                    raise EngineError(f"the server ended with code {self._process.returncode}; see {self.log}.")
                if time.monotonic() > last:
                    raise EngineError(f"the server was not ready after {self._timeout_s:.0f} s; see {self.log}.")
                time.sleep(0.2)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def reset_prefix_cache(self) -> None:
        """Forget what the last benchmark left, as far as the server has a route for it."""
        with contextlib.suppress(OSError, EngineError):
            ask(self.target, "POST", "/reset_prefix_cache")

    def _answers(self) -> bool:
        try:
            return ask(self.target, "GET", "/health")[0] == 200
        except (OSError, EngineError):
            return False

    def _stop(self) -> None:
        if self.is_alive():
            self._process.send_signal(signal.SIGINT)  # at once, and with its children
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _value(words: list[str], flag: str) -> str | None:
    value = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            value = words[index + 1]
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value


DEFINITION = "sweep.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=("serve",), help=argparse.SUPPRESS)  # `vllm bench sweep serve`
    commands = parser.add_argument_group("Commands")
    commands.add_argument(
        "--bench-cmd", metavar="COMMAND", help="the benchmark, for example `quire bench serve --model X`"
    )
    commands.add_argument(
        "--serve-cmd", metavar="COMMAND", help="the server; none if the benchmark needs none or one runs"
    )
    commands.add_argument(
        "--after-bench-cmd", metavar="COMMAND", help="run after each benchmark, in place of emptying the prefix cache"
    )
    common.flag(commands, "--server-ready-timeout", 600.0, "seconds a server may take to start")
    common.flag(commands, "--show-stdout", False, "show what the commands print")
    grid = parser.add_argument_group("Parameters")
    grid.add_argument(
        "--bench-params", metavar="JSON", help='of the benchmark: a file, or JSON: {"request_rate": [1, 4, 16]}'
    )
    grid.add_argument("--serve-params", metavar="JSON", help="of the server, likewise")
    grid.add_argument("--link-vars", default="", metavar="A=B,…", help="only where server's A equals the benchmark's B")
    common.flag(grid, "--num-runs", 3, "repetitions of each combination")
    output = parser.add_argument_group("Results")
    common.flag(output, "--output-dir -o", "results", "where sweeps are kept", metavar="PATH")
    output.add_argument("--experiment-name", "-e", metavar="NAME", help="this sweep's folder there; else the time")
    output.add_argument("--resume", metavar="NAME", help="go on with the sweep in this folder")
    common.flag(output, "--dry-run", False, "only print the commands")
    plot = parser.add_argument_group("Plot")
    common.flag(plot, "--plot", False, "draw figures over the parameters, as SVG beside the summary")
    add_axes(plot)  # type: ignore[arg-type]


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
    sweep = _Sweep(args, folder)
    if args.dry_run:
        for server, benches in plan:
            sweep.show(server, benches)
        return {"rows": []}
    sweep.define(plan)
    for server, benches in plan:
        sweep.run_server(server, benches)
    rows = sweep.rows(plan)
    write_summary(folder, rows)
    varied = varying(plan)
    _print(rows, varied, folder)
    if args.plot and rows:
        x = args.x or next((name for name in reversed(varied) if all(is_number(row.get(name)) for row in rows)), None)
        curve_by = args.curve_by if args.curve_by is not None else [name for name in varied if name != x]
        draw(rows, x, args.y, curve_by, lambda figure: os.path.join(folder, f"{figure}.svg"))
    for failure in sweep.failures:
        print(failure)
    return {"rows": rows, "failures": sweep.failures, "exit_code": int(bool(sweep.failures))}


class _Sweep:
    """A sweep's folder and the commands that fill it.

    Attributes:
        failures: a line for each command that failed; it is run again when the sweep is gone on with.
    """

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._args = args
        self._folder = folder
        self.failures: list[str] = []

    def define(self, plan: list[tuple[Parameters, list[Parameters]]]) -> None:
        """Write down what is swept; going on with another sweep's folder is refused."""
        args = self._args
        definition = {"bench_cmd": args.bench_cmd, "serve_cmd": args.serve_cmd, "plan": json.loads(json.dumps(plan))}
        path = os.path.join(self._folder, DEFINITION)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                known = json.load(file)
            changed = [name for name, value in definition.items() if known.get(name) != value]
            if not args.resume:
                raise ConfigError.of("experiment_name", f"{self._folder!r} is there; go on with --resume.")
            if changed:
                names = ", ".join(changed)
                raise ConfigError.of("resume", f"{self._folder!r} is a sweep with another {names}.")
        elif args.resume:
            raise ConfigError.of("resume", f"there is no sweep in {self._folder!r}.")
        os.makedirs(self._folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(definition, file, indent=2)

    def show(self, server: Parameters, benches: list[Parameters]) -> None:
        if self._args.serve_cmd:
            print(f"server: {shlex.join(self._server_words(server))}")
        for bench in benches:
            for run in range(self._args.num_runs):
                path = self._path(server, bench, run)
                print(f"  {shlex.join(self._bench_words(bench, path))}" + (" (done)" if _is_done(path) else ""))

    def run_server(self, server: Parameters, benches: list[Parameters]) -> None:
        """Everything that is missing of one server."""
        runs = [(bench, run) for bench in benches for run in range(self._args.num_runs)]
        missing = [(bench, run) for bench, run in runs if not _is_done(self._path(server, bench, run))]
        if not missing:
            return
        with ExitStack() as stack:
            running = None
            if self._args.serve_cmd:
                words = self._server_words(server)
                log = os.path.join(self._folder, folder_name(server), "server.log")
                try:
                    running = stack.enter_context(SweepServer(words, log, self._args.server_ready_timeout))
                except EngineError as error:
                    self.failures.append(f"Failed: {error}")
                    return
            for number, (bench, run) in enumerate(missing, start=1):
                path = self._path(server, bench, run)
                print(f"[{number} of {len(missing)}] {path}", flush=True)
                self._run_bench(bench, path, running)

    def _run_bench(self, bench: Parameters, path: str, server: SweepServer | None) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        log = path.removesuffix(".json") + ".log"
        with open(log, "w", encoding="utf-8") as output:
            process = _start(self._bench_words(bench, path), None if self._args.show_stdout else output)
            try:
                while (code := process.poll()) is None:
                    if server is not None and not server.is_alive():
                        self.failures.append(f"Failed: {path}: the server ended; see {server.log}.")
                        return
                    time.sleep(0.1)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if code != 0 or not _is_done(path):
            with open(log, encoding="utf-8", errors="replace") as file:
                last = next((line.strip() for line in reversed(file.readlines()) if line.strip()), "")
            self.failures.append(f"Failed: {path}: code {code}: {last}")
            if os.path.exists(path):
                os.remove(path)
        if self._args.after_bench_cmd:
            subprocess.run(shlex.split(self._args.after_bench_cmd), check=False)
        elif server is not None:
            server.reset_prefix_cache()

    def _server_words(self, server: Parameters) -> list[str]:
        return [*shlex.split(self._args.serve_cmd), *flags(server)]

    def _bench_words(self, bench: Parameters, path: str) -> list[str]:
        """The benchmark's command; `bench serve` names its file in two flags, the others in one."""
        words = [*shlex.split(self._args.bench_cmd), *flags(bench)]
        if "serve" in words[: words.index("bench") + 2 if "bench" in words else 0]:
            return [
                *words,
                "--save-result",
                "--result-dir",
                os.path.dirname(path),
                "--result-filename",
                os.path.basename(path),
            ]
        return [*words, "--output-json", path]

    def _path(self, server: Parameters, bench: Parameters, run: int) -> str:
        names = (folder_name(server), folder_name(bench), f"run={run}.json")
        return os.path.join(self._folder, *names)

    def rows(self, plan: list[tuple[Parameters, list[Parameters]]]) -> list[Row]:
        """A row for every result there is: its parameters, its run, its figures."""
        rows: list[Row] = []
        for server, benches in plan:
            for bench in benches:
                for run in range(self._args.num_runs):
                    path = self._path(server, bench, run)
                    if _is_done(path):
                        with open(path, encoding="utf-8") as file:
                            figures = flatten(json.load(file))
                        rows.append({**figures, **flatten(server), **flatten(bench), "run_number": run})
        return rows


def _start(words: list[str], output: Any) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(words, stdout=output, stderr=None if output is None else subprocess.STDOUT)
    except OSError as error:
        raise ConfigError.of("bench_cmd", f"cannot run {words[0]!r}: {error}.") from None


def _is_done(path: str) -> bool:
    """Whether a result is there, and whole."""
    try:
        with open(path, encoding="utf-8") as file:
            return isinstance(json.load(file), dict)
    except (OSError, ValueError):
        return False


def varying(plan: list[tuple[Parameters, list[Parameters]]]) -> list[str]:
    """Parameters with more than one value, the server's first."""
    rows: list[Row] = [{**flatten(server), **flatten(bench)} for server, benches in plan for bench in benches]
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
