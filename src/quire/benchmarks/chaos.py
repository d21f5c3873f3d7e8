"""`quire bench chaos`: streams of many kinds on a server while its engine core dies; each answer is compared with the oracle's.

The oracle is the same server before the first fault: every request is greedy or has a seed, so that its answer is known. Each
stream asks its request again and again until the faults are over. Knows HTTP and processes. Knows nothing of engines.
"""

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from quire.benchmarks import common
from quire.benchmarks.own_server import is_healthy
from quire.engine.arg_parser import Flags, add_flags
from quire.entrypoints.http_client import OpenAIClient, Target, control
from quire.errors import ConfigError, EngineError, QuireError
from quire.processes import family

COLUMNS = ("fault", "answers", "lost", "repeated", "different", "longest pause", "time to ready")
READY_TIMEOUT_S = 120.0
"""After this a server that is not ready again has failed."""
SILENCE_S = 600.0
"""After this a client gives up an answer of which nothing comes."""
_BETWEEN_LOOKS_S = 0.005
_SUBJECTS = ("the sea", "a clock", "bread", "winter", "a bridge", "music", "the moon", "a garden")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"temperature": 0.0, "ignore_eos": True, "stream": True}),
    ("completion", {"temperature": 1.0, "ignore_eos": True, "stream": True}),
    ("chat", {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "stream": True}),
    ("completion", {"logprobs": 3, "ignore_eos": True, "stream": True}),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}, "stream": True},
    ),
    ("completion", {"stop": ["\n\n", " the end"], "stream": True}),
    ("chat", {"n": 2, "temperature": 0.8, "ignore_eos": True, "stream": True}),
    ("chat", {"temperature": 0.9, "ignore_eos": True, "stream": False}),
)
"""Kinds of requests: greedy, seeded, penalties, logprobs, a JSON schema, stop strings, two answers, not streamed."""


class Case(NamedTuple):
    """What one stream asks."""

    path: str
    body: dict[str, Any]


def build_cases(count: int, model: str, max_tokens: int, seed: int) -> list[Case]:
    """So many requests, the kinds in turn; no two are alike."""
    draw = random.Random(seed)
    cases: list[Case] = []
    for number in range(count):
        kind, fields = _KINDS[number % len(_KINDS)]
        text = f"Write {number + 3} sentences about {draw.choice(_SUBJECTS)} and {draw.choice(_SUBJECTS)}."
        body = {
            "model": model,
            "max_tokens": max_tokens,
            "seed": draw.randrange(1 << 30),
            "return_token_ids": True,
            **fields,
        }
        body |= {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
        cases.append(Case("/chat/completions" if kind == "chat" else "/completions", body))
    return cases


class Answer(msgspec.Struct):
    """What came for one request, by the number of the choice.

    Attributes:
        longest_pause: seconds between two events.
        error: why it did not end as it should; empty where it did.
    """

    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[str]] = {}
    reasons: dict[int, str] = {}
    longest_pause: float = 0.0
    error: str = ""

    def take(self, choices: Sequence[dict[str, Any]]) -> None:
        """Append what an event brings, or a whole answer."""
        for choice in choices:
            index = choice.get("index", 0)
            part = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or (part.get("reasoning") or "") + (
                part.get("content") or ""
            )  # an event may have both
            self.texts[index] = self.texts.get(index, "") + text
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            self.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("tokens") or ())
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]

    def equals(self, other: "Answer") -> bool:
        """Whether everything but the times is the same."""
        mine = (self.texts, self.token_ids, self.logprobs, self.reasons)
        return mine == (other.texts, other.token_ids, other.logprobs, other.reasons)

    def num_beyond(self, other: "Answer") -> int:
        """Tokens that it has more than the other answer."""
        counts = {index: len(ids) for index, ids in other.token_ids.items()}
        return sum(max(0, len(ids) - counts.get(index, 0)) for index, ids in self.token_ids.items())


def fetch(client: OpenAIClient, target: Target, case: Case, is_moving: Callable[[], None]) -> Answer:
    """Ask one request and read its answer to the end; what goes wrong is in the answer."""
    answer = Answer()
    last = time.monotonic()
    try:
        for event in _events(client, target, case):
            now = time.monotonic()
            answer.longest_pause = max(answer.longest_pause, now - last)
            last = now
            answer.take(event.get("choices") or ())
            is_moving()
    except (QuireError, OSError) as error:
        answer.error = str(error) or type(error).__name__
    if not answer.error and len(answer.reasons) != case.body.get("n", 1):
        answer.error = "it ended without a finish_reason"
    return answer


def _events(client: OpenAIClient, target: Target, case: Case) -> Iterator[dict[str, Any]]:
    if case.body["stream"]:
        yield from client.stream(case.path, case.body)
    else:
        yield control(target, "POST", f"/v1{case.path}", case.body, SILENCE_S)


class Row(msgspec.Struct):
    """What one fault did to the streams.

    Attributes:
        answers: that ended, or should have, while it happened.
        lost: answers that broke off.
        repeated: tokens beyond the oracle's.
        different: answers that are not the oracle's, in any token, text, logprob or finish reason.
        longest_pause_s: between two events of a stream.
        ready_s: from the fault until `/health` said 200 again; None where nothing had to start again.
        errors: of the first few that were lost, or differ.
    """

    fault: str
    answers: int = 0
    lost: int = 0
    repeated: int = 0
    different: int = 0
    longest_pause_s: float = 0.0
    ready_s: float | None = None
    errors: list[str] = []

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.different and self.answers > 0

    def cells(self) -> list[Any]:
        """As `COLUMNS` has them."""
        ready = "-" if self.ready_s is None else f"{self.ready_s:.2f} s"
        pause = f"{self.longest_pause_s:.2f} s"
        return [self.fault, self.answers, self.lost, self.repeated, self.different, pause, ready]


class Chaos:
    """Streams on one server, and what the oracle says of each.

    Attributes:
        last_events: when each stream got its last event, by its number.

    Raises:
        EngineError: the server cannot answer without faults.
    """

    def __init__(self, url: str, *, streams: int, max_tokens: int, seed: int = 0, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.target = Target.parse(url, headers, setting="url")
        self._client = OpenAIClient(url, api_key, timeout_s=SILENCE_S)
        self.cases = build_cases(streams, self._client.first_model(), max_tokens, seed)
        self.last_events: dict[int, float] = {}
        self._oracle = [Answer() for _ in self.cases]
        self._ask_all(self._learn)

    def _learn(self, number: int) -> None:
        self._oracle[number] = answer = self.fetch(self.cases[number])
        if answer.error:
            raise EngineError(f"the server cannot answer without a fault: {answer.error}")

    def _ask_all(self, work: Callable[[int], None]) -> None:
        """One thread a stream. Raises what the first of them raised."""
        with ThreadPoolExecutor(len(self.cases)) as threads:
            list(threads.map(work, range(len(self.cases))))

    def fetch(self, case: Case, is_moving: Callable[[], None] = lambda: None) -> Answer:
        """The server's answer to a request."""
        return fetch(self._client, self.target, case, is_moving)

    def round(self, name: str, fault: Callable[[], float | None], *, is_last: bool = False) -> Row:
        """All streams while something happens.

        Args:
            fault: called when every stream moves; returns when its consequences are over, with the time to ready.
            is_last: the server ends by the fault: no stream asks again.
        """
        row, lock = Row(fault=name), threading.Lock()
        moving: set[int] = set()
        has_all, is_over = threading.Event(), threading.Event()
        if is_last:
            is_over.set()

        def note(number: int) -> None:
            self.last_events[number] = time.monotonic()
            if number not in moving and self.cases[number].body["stream"]:
                moving.add(number)
                if len(moving) == sum(case.body["stream"] for case in self.cases):
                    has_all.set()

        def stream(number: int) -> None:
            while True:
                answer = self.fetch(self.cases[number], lambda: note(number))
                with lock:
                    self._judge(row, number, answer)
                if is_over.is_set() or answer.error:
                    return

        streams = threading.Thread(target=self._ask_all, args=(stream,), daemon=True)
        streams.start()
        try:
            if not has_all.wait(READY_TIMEOUT_S):
                raise EngineError(f"only {len(moving)} of {len(self.cases)} streams began")
            row.ready_s = fault()
        finally:
            is_over.set()
            streams.join()
        return row

    def _judge(self, row: Row, number: int, answer: Answer) -> None:
        expected = self._oracle[number]
        row.answers += 1
        row.longest_pause_s = max(row.longest_pause_s, answer.longest_pause)
        row.repeated += answer.num_beyond(expected)
        if answer.error:
            row.lost += 1
            row.errors = [*row.errors, answer.error][:3]
        elif not answer.equals(expected):
            row.different += 1
            row.errors = [*row.errors, f"{self.cases[number]}: {answer} instead of {expected}"][:3]

    # --- the server's health ---

    def recovery(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Seconds until the server has been unhealthy and is healthy again.
        Raises EngineError: that takes too long."""
        began = time.monotonic()
        for wanted in (False, True):
            while is_healthy(self.target) is not wanted:
                if time.monotonic() - began > timeout_s:
                    raise EngineError(f"/health has not become {'200' if wanted else '503'} within {timeout_s:.0f} s")
                time.sleep(_BETWEEN_LOOKS_S)
        return time.monotonic() - began


def find_process(pid: int, name: str) -> int:
    """The process below a server's that calls itself so: `quire core`, `quire rank 1`.
    Raises ConfigError: there is none."""
    states = family(pid)
    found = next((state.pid for state in states if state.name == name), None)
    if found is None:
        names = ", ".join(sorted({state.name for state in states[1:]})) or "no children"
        raise ConfigError.of("victim", f"process {pid} has no child {name!r}; it has {names}.")
    return found


def strike(chaos: Chaos, pid: int, name: str, number: signal.Signals) -> float:
    """Send a process of a server a signal; the time until the server is ready again."""
    os.kill(find_process(pid, name), number)
    return chaos.recovery()


def print_rows(rows: Sequence[Row]) -> None:
    """The table of the faults; what went wrong follows it."""
    common.print_columns("Streams under faults", COLUMNS, [row.cells() for row in rows])
    for row in rows:
        for error in row.errors:
            print(f"{row.fault}: {error[:600]}")


# --- the command ---

FLAGS: Flags = (
    ("--url", "http://127.0.0.1:8000", "the server"),
    ("--api-key", None, "its key", {"metavar": "KEY"}),
    ("--streams", 64, "requests at once"),
    ("--max-tokens", 96, "tokens an answer"),
    ("--bench-seed", 0, "draws the requests and the times of the faults"),
    (
        "--pid",
        None,
        "the server's process on this machine: this command makes the faults",
        {"type": int, "metavar": "PID"},
    ),
    ("--victim", "quire core", "the process below it that is struck; quire rank N is another one"),
    ("--signal", "KILL", "what it gets: KILL or STOP", {"choices": ("KILL", "STOP")}),
    ("--faults", 3, "how many"),
    ("--pause", 7.0, "seconds between two of them; ten restarts within 60 s end a server"),
    ("--duration", 60.0, "without --pid: seconds in which you make the faults yourself"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, {"": FLAGS})


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    if args.pid is not None:
        find_process(args.pid, args.victim)  # refuses before anything is asked
    print(f"asking {args.streams} requests without a fault", flush=True)
    chaos = Chaos(
        args.url, streams=args.streams, max_tokens=args.max_tokens, seed=args.bench_seed, api_key=args.api_key
    )
    rows = [chaos.round("none", lambda: time.sleep(1.0))]
    if args.pid is None:
        print(f"make faults now: {args.duration:.0f} s", flush=True)
        rows.append(chaos.round("yours", lambda: time.sleep(args.duration)))
    else:
        rows.append(
            chaos.round(f"SIG{args.signal} of {args.victim}, {args.faults} times", lambda: _strike_all(args, chaos))
        )
    print_rows(rows)
    return {
        "streams": args.streams,
        "rows": msgspec.to_builtins(rows),
        "machine": common.machine(),
        "exit_code": int(not all(row.is_good for row in rows)),
    }


def _strike_all(args: argparse.Namespace, chaos: Chaos) -> float:
    """The longest time to ready."""
    draw = random.Random(args.bench_seed)
    longest = 0.0
    for number in range(args.faults):
        time.sleep(args.pause * draw.uniform(0.8, 1.2) if number else draw.random())
        longest = max(longest, strike(chaos, args.pid, args.victim, signal.Signals[f"SIG{args.signal}"]))
    return longest
