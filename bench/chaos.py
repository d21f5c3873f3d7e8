"""`python -m bench chaos`, or `make chaos`: the table of faults. Each is made under streams of `quire bench chaos` on servers of
its own, and every answer is compared with the oracle's.

Faults at named points come from `quire/faults.py`, each armed by a file.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from bench.poison import POISON

from quire.benchmarks import common
from quire.benchmarks.chaos import COLUMNS, Chaos, Row, find_process, print_rows
from quire.benchmarks.own_server import started
from quire.engine.arg_parser import flag
from quire.entrypoints.http_client import ask
from quire.errors import EngineError, QuireError
from quire.processes import family

CORE = "quire core"
STEP_POINTS = ("schedule", "execute", "collect", "update", "send")
OTHER_POINTS = ("start", "utility", "grammar", "weights")
HANG_S = 5
"""A step that takes longer is a hang here."""
APART_S = 60.0
"""The next death waits until every stream has moved, or so long. A request that gets nothing from two cores in a row is taken for
the cause of their deaths, and ten cores that give nothing within 60 s end a server."""
CRASHES_IN_A_ROW = 20
ONE_THREAD = {"QUIRE_CPU_THREADS": "1"}
"""Of a step: the clients need the cores too, and threads of a step that share a core wait for each other."""
ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "bench" / "results" / "chaos.json"
BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"


class Server:
    """A server of one's own, with faults that wait for their files.

    Attributes:
        chaos: its streams.
    """

    def __init__(self, args: argparse.Namespace, url: str, pid: int, folder: Path) -> None:
        self.pid, self._folder = pid, folder
        self.chaos = Chaos(url, streams=args.streams, max_tokens=args.max_tokens, seed=args.bench_seed)
        self.draw = random.Random(args.bench_seed)
        self._ready_at = 0.0

    def kill(self, name: str = CORE, number: signal.Signals = signal.SIGKILL) -> None:
        """Strike a process."""
        self.wait_for_turn()
        os.kill(find_process(self.pid, name), number)

    def wait_for_turn(self) -> None:
        """Until a core may die again: when each stream has moved since the last death, or some time after it."""
        streams = [number for number, case in enumerate(self.chaos.cases) if case.body["stream"]]
        last = self.chaos.last_events
        while any(last.get(number, 0.0) <= self._ready_at for number in streams):
            if time.monotonic() > self._ready_at + APART_S:
                break
            time.sleep(0.01)

    def recovery(self) -> float:
        """Seconds until the server is ready again."""
        seconds = self.chaos.recovery()
        self._ready_at = time.monotonic()
        return seconds

    def arm(self, fault: str) -> None:
        """Have the core die the next time it comes to a point."""
        self.wait_for_turn()
        (self._folder / fault).touch()

    def core_pid(self) -> int | None:
        """The core's process, if there is one."""
        return next((state.pid for state in family(self.pid) if state.name == CORE and state.state != "Z"), None)


Fault = Callable[[Server], float | None]


class Scenario(NamedTuple):
    """A row of the table. Returns the time to ready, when all is over."""

    name: str
    fault: Fault
    is_last: bool = False


def _nothing(server: Server) -> None:
    time.sleep(1.0)


def _kill_at_random(server: Server) -> float:
    times: list[float] = []
    for _ in range(3):
        time.sleep(server.draw.random())
        server.kill()
        times.append(server.recovery())
    return max(times)


def _at_points(point: str) -> Fault:
    def fault(server: Server) -> float:
        times: list[float] = []
        for when in ("before", "after"):
            server.arm(f"{when}-{point}")
            times.append(server.recovery())
        return max(times)

    return fault


def _struck(name: str, number: signal.Signals) -> Fault:
    def fault(server: Server) -> float:
        server.kill(name, number)
        return server.recovery()

    return fault


def _while_starting(server: Server) -> float:
    """The core dies, and the next one before it is ready."""
    server.arm("after-start")
    server.kill()
    return server.recovery()


def _in_a_call(route: str, *points: str) -> Fault:
    """Calls in which the core dies at each of the points fail; the weights are the same afterwards."""

    def fault(server: Server) -> float:
        times: list[float] = []
        for point in points:
            server.arm(point)
            status, _ = ask(server.chaos.target, "POST", route)
            if status < 500:
                raise EngineError(f"a call in which the core died was answered with {status}")
            times.append(server.recovery())
        return max(times)

    return fault


def _in_a_grammar(server: Server) -> float:
    """A request with a schema that nobody has asked for: its core dies while it compiles, and the next one answers it."""
    schema = {"type": "object", "properties": {"novel": {"type": "boolean"}}, "required": ["novel"]}
    case = server.chaos.cases[4]
    form = {"type": "json_schema", "json_schema": {"name": "b", "schema": schema}}
    case = case._replace(body={**case.body, "response_format": form})
    server.arm("before-grammar")
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.chaos.fetch(case)))
    asking.start()
    ready_s = server.recovery()
    asking.join()
    if answers[0].error or not answers[0].equals(server.chaos.fetch(case)):
        raise EngineError(f"the request whose grammar was compiled got another answer: {answers[0]}")
    return ready_s


def _in_a_row(server: Server) -> float:
    times: list[float] = []
    for _ in range(CRASHES_IN_A_ROW):
        server.kill()
        times.append(server.recovery())
    return max(times)


def _poison(server: Server) -> None:
    body = {"prompt": POISON, "max_tokens": 4}
    status, text = ask(server.chaos.target, "POST", "/v1/completions", body)
    if status != 500:
        raise EngineError(f"the request that kills cores was answered with {status}: {text[:200]!r}")


def _while_draining(server: Server) -> None:
    os.kill(server.pid, signal.SIGTERM)
    time.sleep(0.1)
    server.kill()


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
MAIN = (
    Scenario("none", _nothing),
    Scenario("kill -9 of the core, 3 times, at random", _kill_at_random),
    *(Scenario(f"the core dies before and after `{point}`", _at_points(point)) for point in STEP_POINTS),
    Scenario("the core dies, and the next one while it starts", _while_starting),
    Scenario("the core dies in a call (`/reset_prefix_cache`)", _in_a_call("/reset_prefix_cache", "before-utility")),
    Scenario(
        "the core dies before and after it reads new weights",
        _in_a_call("/reload_weights", "before-weights", "after-weights"),
    ),
    Scenario("the core dies while it compiles a grammar", _in_a_grammar),
    Scenario(f"SIGSTOP of the core (a step may take {HANG_S} s)", _struck(CORE, STOP)),
    Scenario(f"{CRASHES_IN_A_ROW} deaths of the core in a row", _in_a_row),
    Scenario("SIGTERM, then kill -9 of the core: the server drains", _while_draining, is_last=True),
)


def _rank_scenarios(size: int) -> list[Scenario]:
    return [
        Scenario(f"{word} of rank {rank} of {size}", _struck(f"quire rank {rank}", number))
        for word, number in (("kill -9", KILL), ("SIGSTOP", STOP))
        for rank in range(size)
    ]


GROUPS: tuple[tuple[str, Sequence[Scenario]], ...] = (
    ("", MAIN),
    (
        "--distributed-executor-backend bench.poison:PoisonedExecutor",
        [Scenario("a request that kills every core", _poison)],
    ),
    ("--tensor-parallel-size 2", _rank_scenarios(2)),
    ("--tensor-parallel-size 4", _rank_scenarios(4)),
)


@contextlib.contextmanager
def _server(args: argparse.Namespace, flags: str) -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="quire-chaos-"))
    names = [f"{when}-{point}" for point in (*STEP_POINTS, *OTHER_POINTS) for when in ("before", "after")]
    environment = {
        "QUIRE_FAULTS": ",".join(f"{name}@core:kill:1:{folder / name}" for name in names),
        "QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS": str(HANG_S),
        "QUIRE_SERVER_DEV_MODE": "1",
        **ONE_THREAD,
    }
    words = ["serve", "--port", "0", "--disable-uvicorn-access-log", "--shutdown-timeout", "60", *flags.split()]
    try:
        with started("quire.entrypoints.cli.main", words, " is ready after ", environment) as (line, process):
            yield Server(args, line.rsplit(" at ", 1)[1], process.pid, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_group(args: argparse.Namespace, flags: str, scenarios: Sequence[Scenario]) -> Iterator[Row]:
    """Rows on one server; after a bad one on another."""
    left = [scenario for scenario in scenarios if args.only in scenario.name]
    while left:
        with _server(args, flags) as server:
            is_good = True
            while left and is_good:
                scenario = left.pop(0)
                row = _run_one(server, scenario)
                is_good = row.is_good
                print(" | ".join(str(cell) for cell in row.cells()), *row.errors, sep="\n  ", flush=True)
                yield row


def _run_one(server: Server, scenario: Scenario) -> Row:
    row = Row(fault=scenario.name)
    try:
        row = server.chaos.round(scenario.name, lambda: scenario.fault(server), is_last=scenario.is_last)
    except (QuireError, OSError) as error:
        row.errors = [f"{type(error).__name__}: {error}"]
    return row


# --- the server's own death ---


class Leftovers(NamedTuple):
    """What is there of a server that was killed.

    Attributes:
        ended_s: until its core and all ranks had ended.
        processes, files, shared_memory: that are left.
    """

    server: str
    ended_s: float
    processes: int
    files: list[str]
    shared_memory: list[str]

    @property
    def is_good(self) -> bool:
        return self.ended_s < 1.0 and not (self.processes or self.files or self.shared_memory)


def _kill_server(args: argparse.Namespace, flags: str) -> Leftovers:
    """kill -9 of the server itself, while it answers."""
    memory = Path("/dev/shm")
    before = set(memory.iterdir())
    base = Path(tempfile.mkdtemp(prefix="quire-chaos-"))
    words = ["serve", "--port", "0", "--disable-uvicorn-access-log", *flags.split()]
    environment = {"QUIRE_RPC_BASE_PATH": str(base), **ONE_THREAD}
    try:
        with started("quire.entrypoints.cli.main", words, " is ready after ", environment) as (line, process):
            chaos = Chaos(line.rsplit(" at ", 1)[1], streams=8, max_tokens=args.max_tokens)
            pids = [state.pid for state in family(process.pid)[1:]]

            def kill() -> None:
                process.kill()
                process.wait()

            with contextlib.suppress(QuireError):
                chaos.round("the server", kill, is_last=True)
            ended_s = _await_end(pids)
        files = [str(path.relative_to(base)) for path in base.rglob("*")]
        shared = sorted(path.name for path in set(memory.iterdir()) - before)
        return Leftovers(flags or "one device", ended_s, sum(map(_is_running, pids)), files, shared)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _await_end(pids: Sequence[int]) -> float:
    """Seconds until none of them runs; ten at most."""
    began = time.monotonic()
    while any(map(_is_running, pids)) and time.monotonic() - began < 10.0:
        time.sleep(0.005)
    return time.monotonic() - began


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--streams", 64, "requests at once")
    flag(parser, "--max-tokens", 64, "tokens an answer")
    flag(parser, "--bench-seed", 0, "draws the requests and the times of the faults")
    flag(parser, "--only", "", "only faults whose name has this text")
    flag(parser, "--write", False, "put the table into docs/reliability.md and bench/results/chaos.json")


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    print(" | ".join(COLUMNS), flush=True)
    rows = [row for flags, scenarios in GROUPS for row in _run_group(args, flags, scenarios)]
    ends = [] if args.only else [_kill_server(args, flags) for flags in ("", "--tensor-parallel-size 2")]
    print_rows(rows)
    for end in ends:
        print(f"kill -9 of the server: {end}")
    result = {
        "streams": args.streams,
        "seconds": round(time.monotonic() - began, 1),
        "rows": msgspec.to_builtins(rows),
        "server_killed": [end._asdict() for end in ends],
        "machine": common.machine(),
    }
    if args.write:
        _write(rows, ends, result)
    is_good = all(one.is_good for one in (*rows, *ends))
    return {**result, "exit_code": int(not is_good)}


def markdown(rows: Sequence[Row]) -> str:
    """The table of the faults for a document."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *([str(cell) for cell in row.cells()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write(rows: Sequence[Row], ends: Sequence[Leftovers], result: dict[str, Any]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    head, _, tail = text.partition(BEGIN)
    lines = [markdown(rows), ""]
    for end in ends:
        left = f"{end.processes} processes, {len(end.files)} files, {len(end.shared_memory)} segments of shared memory"
        lines.append(
            f"kill -9 of the server ({end.server}): its processes ended after {end.ended_s:.2f} s; left: {left}.\n"
        )
    body = "\n".join(lines)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{body}{END}{tail.partition(END)[2]}", encoding="utf-8")
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
