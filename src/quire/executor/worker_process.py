"""A worker as a process of its own: the child's side of `MultiprocExecutor`.

The main thread takes messages in order: a step is submitted as soon as it comes, a call is made and answered. A second thread
waits for the steps' results, in order, so that submitting never waits for an earlier result; rank 0 alone sends them.
"""

import contextlib
import dataclasses
import functools
import os
import queue
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from quire import faults
from quire.codec import encode
from quire.config import EngineConfig
from quire.config.kv_spec import KVCacheConfig
from quire.config.wire import config_from_plain
from quire.core.output import ModelRunnerOutput
from quire.errors import QuireError
from quire.executor import wire
from quire.executor.broadcast_ring import RingReader
from quire.executor.interface import find_method
from quire.executor.selector import make_worker
from quire.executor.socket_ring import SocketReader
from quire.executor.wire import Answer, Call, End, Prepare, Prepared, Problem, Result, Start, Step
from quire.logger import init_logger, set_process_label, trace_this_thread_if_asked
from quire.patch import check_same, settle
from quire.platforms.host import usable_cpus
from quire.plugins import load_general_plugins
from quire.processes import begin_child, name_process, settle_collector, write_message

if TYPE_CHECKING:
    import concurrent.futures

    from quire.worker.runner import PendingStep  # which imports torch

logger = init_logger(__name__)

EXIT_FAILED = 1
SPIN_S = 100e-6
SPARE_CORES = 4
"""A worker's threads beside the one that spins, and the engine's."""
SWITCH_S = 0.5e-3
"""How long one of the two threads may keep the interpreter from the other."""


class _FlyingStep:
    """A step whose result the second thread fetches."""

    def __init__(self, pending: "ModelRunnerOutput | PendingStep") -> None:
        self._pending = pending
        self.done = threading.Event()

    def result(self) -> ModelRunnerOutput:
        """Blocks until the device has come there."""
        pending = self._pending
        return pending if isinstance(pending, ModelRunnerOutput) else pending.result()


class WorkerProcess:
    """One rank.

    Args:
        rank: among all workers of the engine.
        addresses: where the ranks of a stage meet, and where stages do.
        ring: messages for all ranks, in this host's memory or over a connection.
        answer_fd: where results and answers go.
        last_words_fd: where a problem goes that ends this process.
        model_path: the model's folder on this host; None: where the engine's is.
    """

    def __init__(
        self,
        rank: int,
        addresses: tuple[str, str],
        ring: RingReader | SocketReader,
        answer_fd: int,
        last_words_fd: int,
        model_path: str | None = None,
    ) -> None:
        self._rank, self._addresses, self._model_path = rank, addresses, model_path
        self._ring = ring
        self._answer_fd, self._last_words_fd = answer_fd, last_words_fd
        self._send_lock = threading.Lock()
        self._worker: Any = None
        self._config: EngineConfig | None = None
        self._tells_results = False
        self._patches: list[str] = []
        self._in_flight: deque[_FlyingStep] = deque()
        self._to_fetch: queue.SimpleQueue[_FlyingStep | None] = queue.SimpleQueue()

    def run(self) -> NoReturn:
        """Serve until told to end. Ends the process without waiting for threads or libraries that may hang."""
        code = 0
        try:
            self._serve()
        except BaseException as error:
            code = EXIT_FAILED
            self._say_last_words(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _serve(self) -> None:
        threading.Thread(target=self._fetch_results, name="results", daemon=True).start()
        while (data := self._ring.receive()) is not None:
            match wire.decode_to_worker(data):
                case Step(plan=plan):
                    self._submit(plan)
                case Call() as call:
                    self._answer(call)
                case Prepare(number=number, what=what):
                    wire.begin(self._worker, what).add_done_callback(functools.partial(self._tell_end, number))
                case Start(config=config, patches=patches):
                    self._config, self._patches = self._as_mine(config_from_plain(config)), patches
                case End():
                    break
        self._to_fetch.put(None)
        if self._worker is not None:
            self._worker.shutdown()

    def _tell_end(self, number: int, future: "concurrent.futures.Future[Any]") -> None:
        """A preparation has ended."""
        self._send(Prepared(number, wire.describe_failure(future)))

    # Steps.

    def _submit(self, plan: Any) -> None:
        in_flight = self._in_flight
        assert self._config is not None
        # As many as an engine has in flight: an older one's result has been read, by the rank that tells it at least.
        depth = self._config.scheduler.depth
        while in_flight and (len(in_flight) >= depth or in_flight[0].done.is_set()):
            in_flight.popleft().done.wait()  # from this plan on a row may belong to another request
        step = _FlyingStep(self._worker.execute(plan))
        in_flight.append(step)
        self._to_fetch.put(step)

    def _fetch_results(self) -> None:
        """The second thread."""
        is_adopted = False
        try:
            while (step := self._to_fetch.get()) is not None:
                if not is_adopted:
                    self._worker.adopt_thread()
                    is_adopted = True
                output = step.result()
                step.done.set()
                if self._tells_results:
                    self._send(Result(output))
        except BaseException as error:
            self._say_last_words(error)
            os._exit(EXIT_FAILED)

    # Calls.

    def _answer(self, call: Call) -> None:
        while self._in_flight:
            self._in_flight.popleft().done.wait()
        try:
            answer = Answer(call.call_id, self._call(call))
            self._send(answer)
        except Exception as error:  # the caller's to know
            if not isinstance(error, QuireError | MemoryError | ValueError):
                logger.exception("%s failed", call.method)
            self._send(Answer(call.call_id, problem=wire.problem_of(error, time.monotonic_ns())))

    def _call(self, call: Call) -> Any:
        if call.method == "start":
            return self._start()
        method = find_method(self._worker, call.method)
        args = call.args
        if call.method == "initialize":
            assert self._config is not None
            ends = args[1][self._config.parallel.stage :]
            args = [msgspec.convert(args[0], KVCacheConfig).of_layers(range(*ends[:2]))]
        value = method(*args, **call.kwargs)
        if call.method == "initialize":
            settle_collector()
        return value

    def _as_mine(self, config: EngineConfig) -> EngineConfig:
        """The configuration with this worker's place."""
        group, rank = divmod(self._rank, config.parallel.tensor_parallel_size)
        stage, part = divmod(group, config.parallel.prefill_context_parallel_size)
        place = {"stage": stage, "prompt_part": part, "rank": rank}
        met = {"rendezvous": self._addresses[0], "stage_rendezvous": self._addresses[1]}
        mine = dataclasses.replace(config.parallel, **place, **met)
        self._tells_results = mine.is_last_stage and part == rank == 0
        model = config.model
        if self._model_path is not None:
            model = dataclasses.replace(model, path=self._model_path)
        return dataclasses.replace(config, parallel=mine, model=model)

    def _start(self) -> int:
        """Make the worker and load the model."""
        assert self._config is not None, "a configuration comes first"
        config = self._config
        trace_this_thread_if_asked(config.instance_id)
        load_general_plugins("worker")
        settle(config)
        check_same(self._patches, "the process that starts this worker")
        self._worker = make_worker(config)
        return os.getpid()

    # Words.

    def _send(self, message: Result | Answer | Prepared) -> None:
        data = encode(message)
        with self._send_lock, contextlib.suppress(BrokenPipeError):
            write_message(self._answer_fd, data)

    def _say_last_words(self, error: BaseException) -> None:
        if isinstance(error, QuireError):
            logger.error("rank %d ends: %s", self._rank, error)
        else:
            logger.exception("rank %d ends", self._rank)
        problem: Problem = wire.problem_of(error, time.monotonic_ns())
        with contextlib.suppress(OSError):
            os.write(self._last_words_fd, encode(problem))


def _spin_seconds(size: int) -> float:
    """Spinning pays where every rank has cores to spare."""
    return SPIN_S if usable_cpus() >= SPARE_CORES * size else 0.0


def main(arguments: list[str]) -> NoReturn:
    """Entry of the child process: rank, the ranks of this host, three descriptors, and where ranks and stages meet."""
    (*numbers, meeting, stages), last_words_fd = begin_child(arguments)
    rank, size, memory_fd, ring_fd, answer_fd = map(int, numbers)
    for descriptor in (memory_fd, ring_fd, answer_fd):
        os.set_inheritable(descriptor, False)
    set_process_label(f"rank {rank}")
    name_process(f"quire rank {rank}")
    faults.begin_process(f"rank {rank}")
    sys.setswitchinterval(SWITCH_S)
    ring = RingReader(memory_fd, ring_fd, rank, size, spin_s=_spin_seconds(size))
    WorkerProcess(rank, (meeting, stages), ring, answer_fd, last_words_fd).run()
