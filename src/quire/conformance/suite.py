"""Running checks: each job has a process of its own, which a check may crash; the next check gets a new one.

The parent opens no device. It sends the name of a check and reads its result, a line of JSON each.
"""

import dataclasses
import json
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.conformance.contract import Check, Failed, NotClaimed, Outcome, Subject, checks, load_checks
from quire.descriptors import wait_readable
from quire.processes import Child, begin_child, name_process, read_message, write_message

PATIENCE_S = 300.0
"""For one check, the start of its process included."""
_END_S = 20.0
_STDOUT, _STDERR = 1, 2


@dataclasses.dataclass
class Result:
    """What a check found.

    Attributes:
        message: what was seen, why it is not claimed, or what is wrong.
        expected, got: of a failure.
        trace: where an exception came from.
    """

    name: str
    about: str
    outcome: Outcome
    message: str
    expected: str = ""
    got: str = ""
    trace: str = ""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether a platform may be shipped with it."""
        return self.outcome in (Outcome.PASS, Outcome.NOT_CLAIMED)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a process is told.

    Attributes:
        jobs: checks at a time; those that look at the device as a whole run alone, before the others.
        patience_s: seconds for one check.
    """

    platform: str
    seed: int = 0
    is_quick: bool = False
    jobs: int = 1
    patience_s: float = PATIENCE_S


def run_check(each: Check, subject: Subject) -> Result:
    """One check, in this process."""
    begin = time.perf_counter()
    result = Result(each.name, each.about, Outcome.PASS, "")
    try:
        result.message = each.function(subject)
    except NotClaimed as why:
        result.outcome, result.message = Outcome.NOT_CLAIMED, str(why)
    except Failed as failure:
        result.outcome, result.message = Outcome.FAIL, str(failure)
        result.expected, result.got = failure.expected, failure.got
    except Exception as error:
        result.outcome, result.message = Outcome.ERROR, f"{type(error).__name__}: {error}"
        result.trace = traceback.format_exc()
    result.seconds = time.perf_counter() - begin
    return result


def run_checks(
    plan: Plan, chosen: Sequence[Check], on_result: Callable[[Result], None] = lambda _: None
) -> list[Result]:
    """Every check, each in a process that no crash of another one has reached; results in the checks' order.

    Args:
        on_result: called as results come, from several threads but one at a time.
    """
    found: dict[str, Result] = {}
    lock = threading.Lock()

    def work(waiting: deque[Check]) -> None:
        for result in _results(plan, waiting):
            with lock:
                found[result.name] = result
                on_result(result)

    work(deque(each for each in chosen if each.is_alone))
    others = deque(each for each in chosen if not each.is_alone)
    with ThreadPoolExecutor(plan.jobs) as threads:
        list(threads.map(work, [others] * min(plan.jobs, len(others))))
    return [found[each.name] for each in chosen]


def _results(plan: Plan, waiting: deque[Check]) -> Iterator[Result]:
    """One job: takes checks from a queue that others take from too."""
    process: _Process | None = None
    try:
        while waiting:
            try:
                each = waiting.popleft()
            except IndexError:  # another job was faster
                return
            begin = time.perf_counter()
            process = process or _Process(plan)
            answer, problem = process.ask(each.name, plan.patience_s)
            if answer is not None:
                yield Result(**{**json.loads(answer), "outcome": Outcome(json.loads(answer)["outcome"])})
                continue
            process.end()
            process = None
            yield Result(each.name, each.about, Outcome.ERROR, problem, seconds=time.perf_counter() - begin)
    finally:
        if process is not None:
            process.end()


class _Process:
    """A child that computes checks."""

    def __init__(self, plan: Plan) -> None:
        theirs_in, self._to_child = os.pipe()
        self._from_child, theirs_out = os.pipe()
        words = [str(theirs_in), str(theirs_out), json.dumps(dataclasses.asdict(plan))]
        self._child = Child(f"{__name__}:serve", words, (theirs_in, theirs_out), kind="core")
        os.close(theirs_in)
        os.close(theirs_out)

    def ask(self, name: str, patience_s: float) -> tuple[bytes | None, str]:
        """The answer, or None and why there is none; the process is of no more use then."""
        try:
            write_message(self._to_child, name.encode())
        except BrokenPipeError:
            return None, f"its process {self._child.describe_exit()}"
        if not wait_readable(self._from_child, patience_s):
            return None, f"no result after {patience_s:.0f} s: its process was ended"
        answer = read_message(self._from_child)
        return answer, "" if answer is not None else f"its process {self._child.describe_exit()}"

    def end(self) -> None:
        """Let it end, with everything that it started."""
        os.close(self._to_child)
        self._child.end(0.0 if wait_readable(self._from_child, 0.0) else _END_S)
        os.close(self._from_child)
        self._child.close()


def serve(arguments: list[str]) -> int:
    """The child: reads names until there are no more."""
    words, _ = begin_child(arguments)
    name_process("conformance")
    os.dup2(_STDERR, _STDOUT)  # what libraries print is no result
    read_fd, write_fd, plan = int(words[0]), int(words[1]), Plan(**json.loads(words[2]))
    from quire.conformance import oracle_platform
    from quire.plugins import load_general_plugins

    load_general_plugins("core")
    load_checks()
    oracle_platform.install()
    subject = Subject(plan.platform, seed=plan.seed, is_quick=plan.is_quick)
    try:
        while (name := read_message(read_fd)) is not None:
            result = run_check(checks[name.decode()], subject)
            write_message(write_fd, json.dumps(dataclasses.asdict(result)).encode())
    finally:
        subject.close()
    return 0
