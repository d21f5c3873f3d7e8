"""One process a device: the executor of tensor and pipeline parallelism.

Every step is encoded once and read by all ranks from shared memory. The first rank of the last stage alone answers with the
tokens, since all ranks there sample the same ones. Everything else is a call that every rank answers. Knows messages; knows
nothing of tensors.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import select
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from quire.codec import encode
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig, KVCacheSpec
from quire.config.wire import config_to_plain
from quire.core.output import ModelRunnerOutput, SchedulerOutput
from quire.descriptors import wait_readable
from quire.errors import EngineError, RequestError
from quire.executor import wire
from quire.executor.broadcast_ring import Broadcast, RingWriter
from quire.executor.host_network import rank_process
from quire.executor.interface import Executor
from quire.executor.rank_processes import RankProcesses
from quire.executor.wire import Answer, Call, End, Prepare, Prepared, Problem, Result, Start, Step
from quire.logger import init_logger
from quire.patch import marks
from quire.platforms.interface import WorkerProcess
from quire.processes import read_message
from quire.request import EngineRequest
from quire.sample.features import features_of
from quire.sampling_params import SamplingParams
from quire.timeline import STARTUP

logger = init_logger(__name__)

_MOST_PREPARED = 128
"""Grammars that all ranks are taken to keep; they keep more (`structured_output/grammars.py`)."""
_PATIENCE_S = 5.0
"""How long an orderly end may take, and how long ranks may be silent after another one's error."""


@dataclasses.dataclass
class _Preparing:
    """What the ranks prepare for a request; `ranks` have not answered."""

    request_id: str
    ranks: set[int]
    grammar: bytes | None = None
    features: list[str] = dataclasses.field(default_factory=list[str])
    problem: str | None = None


def _grammar_key(params: SamplingParams) -> bytes | None:
    """A hash of what a request's grammar is compiled from; None without one."""
    if params.structured_outputs is None:
        return None
    return hashlib.sha256(msgspec.msgpack.encode((params.structured_outputs, params.eos_token_ids))).digest()


class MultiprocExecutor(Executor):
    """Runs steps on as many worker processes as the configuration has ranks: of each stage of the pipeline, those that share its
    layers.

    Raises:
        ConfigError: the configuration cannot be sent, or a rank refuses it.
        EngineError: a rank ended; the message says which, how, and its last words.
    """

    name = "mp"

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._size, self._share = config.parallel.world_size, config.parallel.stage_size
        self._layer_ends: list[int] = [0]
        start = Start(config_to_plain(config), marks())
        self._calls = 0
        self._results: deque[ModelRunnerOutput] = deque()
        self._in_flight = 0
        self._preparing: dict[int, _Preparing] = {}
        self._prepared: list[str] = []
        self._problems: dict[str, str] = {}
        self._known_grammars: OrderedDict[bytes, None] = OrderedDict()
        self._used_features: set[str] = set()
        self._send_lock = threading.Lock()
        self._is_shut_down = False
        self._ring: Broadcast = self._open_ring()
        self._processes = self._start_ranks()
        # Also for an executor that is dropped without `shutdown`.
        self._release = weakref.finalize(self, self._processes.end, 0.0)
        self._rank_of_fd = {rank.answers_fd: n for n, rank in enumerate(self._processes.ranks)}
        self._any_answer = self._poll_for(list(self._rank_of_fd))
        self._result = self._poll_for([self._processes.ranks[self._size - self._share].answers_fd])
        try:
            self._send(start)
            with STARTUP.phase("ranks"):
                self._call("start")
        except BaseException:
            self.shutdown(patience_s=0.0)
            raise

    def _open_ring(self) -> Broadcast:
        return RingWriter(self._size)

    def _start_ranks(self) -> RankProcesses:
        told = self._tell_of_failure(weakref.ref(self))
        ranks = self.config.parallel.tensor_parallel_size
        return self._make_ranks(self._size, ranks, self._ring, self._start_as, told)

    def _start_as(self, rank: int) -> WorkerProcess:
        """How a rank's process starts."""
        return rank_process(self.config, rank)

    def _make_ranks(self, *arguments: Any) -> RankProcesses:
        return RankProcesses(*arguments)

    @staticmethod
    def _tell_of_failure(executor: "weakref.ref[MultiprocExecutor]") -> Any:
        def tell() -> None:
            alive = executor()
            if alive is not None and alive.on_failure is not None:
                alive.on_failure()

        return tell

    def _poll_for(self, descriptors: list[int]) -> select.poll:
        poll = select.poll()
        for descriptor in (*descriptors, self._processes.failure_fd):
            poll.register(descriptor, select.POLLIN)
        return poll

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return self._processes.pids

    # Steps.

    def execute(self, step: SchedulerOutput) -> None:
        self._send(Step(step))
        self._in_flight += 1

    def collect(self) -> ModelRunnerOutput:
        if not self._in_flight:
            raise EngineError("collect() without a step in flight")
        while not self._results:
            self._take_in(self._result, None)
        self._in_flight -= 1
        return self._results.popleft()

    # What requests need.

    def is_prepared(self, request: EngineRequest) -> bool:
        params = request.sampling_params
        assert params is not None
        grammar = _grammar_key(params)
        if grammar is not None:
            if grammar not in self._known_grammars:
                return False
            self._known_grammars.move_to_end(grammar)
        return self._used_features.issuperset(features_of(params))

    def encodes_beside(self) -> bool:
        return all(self._call("encodes_beside"))

    def _begin(self, request: EngineRequest, what: wire.Preparation) -> None:
        self._calls += 1
        preparing = _Preparing(request.request_id, set(range(self._size)))
        if isinstance(what, wire.Compile):
            preparing.grammar, preparing.features = _grammar_key(what.params), features_of(what.params)
        self._preparing[self._calls] = preparing
        self._send(Prepare(self._calls, what))

    def problems(self) -> dict[str, str]:
        problems, self._problems = self._problems, {}
        return problems

    def prepared(self, wait_s: float) -> list[str]:
        self._take_in(self._any_answer, time.monotonic())
        if not self._prepared and wait_s:
            self._take_in(self._any_answer, time.monotonic() + wait_s)
        prepared, self._prepared = self._prepared, []
        return prepared

    def _note_prepared(self, rank: int, number: int, problem: str | None) -> None:
        preparing = self._preparing[number]
        preparing.ranks.discard(rank)
        preparing.problem = preparing.problem or problem
        if not preparing.ranks:
            del self._preparing[number]
            self._prepared.append(preparing.request_id)
            if preparing.problem is not None:
                self._problems[preparing.request_id] = preparing.problem
            self._used_features.update(preparing.features)
            if preparing.grammar is not None:
                self._known_grammars[preparing.grammar] = None
            if len(self._known_grammars) > _MOST_PREPARED:
                self._known_grammars.popitem(last=False)

    # Calls.

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Of all layers: those of each stage, one after another."""
        parts = msgspec.convert(self._call("kv_cache_specs")[:: self._share], list[list[KVCacheSpec]])
        self._layer_ends = [0, *itertools.accumulate(map(len, parts))]
        return [spec for part in parts for spec in part]

    def available_kv_bytes(self) -> int:
        """What the rank with the least has left, for all layers if it has some of them."""
        specs, ends = self.kv_cache_specs(), self._layer_ends
        sizes = [sum(spec.page_bytes for spec in specs[start:end]) for start, end in itertools.pairwise(ends)]
        left = enumerate(self._call("available_kv_bytes"))
        return min(num_bytes * sum(sizes) // sizes[rank // self._share] for rank, num_bytes in left)

    def initialize(self, kv_cache: KVCacheConfig) -> None:
        with STARTUP.phase("pages and first steps"):
            self._call("initialize", [kv_cache, self._layer_ends])

    def prepare_to_serve(self, wait: bool = False) -> None:
        self._call("prepare_to_serve", [wait])

    def idle(self) -> bool:
        return any(self._call("idle"))

    def sleep(self, level: int = 1) -> None:
        self._call("sleep", [level])

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._call("wake_up", [tags])

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        if callable(method):
            raise RequestError(
                "a function cannot be sent to workers in other processes: name a method (worker_cls gives workers methods of "
                "your own)",
                param="method",
            )
        return self._call(method, list(args), kwargs, timeout)

    def check_request(self, request: EngineRequest) -> None:
        params = request.sampling_params
        if params is not None and params.logits_processors:
            raise RequestError(
                "logits_processors are functions and cannot be sent to workers in other processes; give the engine a logits "
                "processor class by its path",
                param="logits_processors",
            )

    def explain(self) -> dict[str, Any]:
        reports = self._call("explain")
        ranks = [
            {"rank": n, "pid": pid, "device": report["device"], "memory": report["memory"]}
            for n, (pid, report) in enumerate(zip(self.pids, reports, strict=True))
        ]
        return {**reports[0], "executor": self.name, "ranks": ranks}

    def _call(
        self,
        method: str,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Every rank's value.

        Raises:
            ConfigError, RequestError, MemoryError, ValueError, EngineError: what a rank raised, rank 0's first.
            TimeoutError: not all have answered within `timeout` seconds; their answers are passed over when they come.
        """
        self._calls += 1
        self._send(Call(self._calls, method, args or [], kwargs or {}))
        answers: dict[int, Answer] = {}
        ends = None if timeout is None else time.monotonic() + timeout
        deadline: float | None = None
        while len(answers) < self._size:
            if ends is not None and deadline is None and time.monotonic() > ends:
                late = [rank for rank in range(self._size) if rank not in answers]
                raise TimeoutError(f"{method}: rank {', '.join(map(str, late))} gave no answer within {timeout} s")
            for rank, answer in self._take_in(self._any_answer, ends if deadline is None else deadline):
                if answer.call_id == self._calls:
                    answers[rank] = answer
                    if answer.problem is not None and deadline is None:
                        deadline = time.monotonic() + _PATIENCE_S
            if deadline is not None and time.monotonic() > deadline:
                break
        for rank, answer in sorted(answers.items()):
            if answer.problem is not None:
                raise self._error_of(rank, answer.problem, is_alone=len(answers) < self._size)
        return [answers[rank].value for rank in range(self._size)]

    def _error_of(self, rank: int, problem: Problem, is_alone: bool) -> Exception:
        """A rank's error. Where the others wait for it in vain, the engine is of no use any more."""
        if is_alone:
            self.shutdown(patience_s=0.0)
            if problem.kind != "config":
                return EngineError(f"rank {rank}, while the others waited for it: {problem.message}")
        return problem.to_error(f"rank {rank}")

    # Messages.

    def _send(self, message: wire.ToWorker) -> None:
        self._check_alive()
        try:
            data = encode(message)
        except TypeError as error:
            raise EngineError(f"this cannot be sent to the workers: {error}") from None
        try:
            with self._send_lock:
                self._ring.send(data, give_up=lambda: self._processes.failure is not None)
        except BrokenPipeError:
            self._raise_failure()

    def _take_in(self, poll: select.poll, deadline: float | None) -> list[tuple[int, Answer]]:
        """Wait for messages, at most until the deadline; results are kept, answers returned with their ranks."""
        self._check_alive()
        left = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        answers: list[tuple[int, Answer]] = []
        for descriptor, _ in poll.poll(left):
            rank = self._rank_of_fd.get(descriptor)
            data = None if rank is None else read_message(self._processes.ranks[rank].answers_fd)
            if rank is None or data is None:
                self._raise_failure()
                continue
            match wire.decode_from_worker(data):
                case Result(output=output):
                    self._results.append(output)
                case Prepared(number=number, problem=problem):
                    self._note_prepared(rank, number, problem)
                case Answer() as answer:
                    answers.append((rank, answer))
        return answers

    def _check_alive(self) -> None:
        if self._is_shut_down:
            raise EngineError("the executor was shut down")
        if self._processes.failure is not None:
            raise self._processes.failure

    def _raise_failure(self) -> None:
        """A rank is gone: the watching thread is about to say why."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._processes.failure is None and time.monotonic() < deadline:
            wait_readable(self._processes.failure_fd, 0.05)
        raise self._processes.failure or EngineError("a worker process has closed its pipe")

    def shutdown(self, patience_s: float = _PATIENCE_S) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if patience_s > 0 and self._processes.failure is None:
            with contextlib.suppress(OSError), self._send_lock:
                self._ring.send(encode(End()), give_up=lambda: True)
        self._results.clear()
        self._release.detach()
        self._processes.end(patience_s if self._processes.failure is None else 0.0)
