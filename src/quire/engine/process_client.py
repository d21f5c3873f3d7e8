"""An engine core in another process: messages over two Unix sockets (ZMQ, one for each direction), and notice of its death.

`SocketClient` is what all such clients have in common; `ProcessClient` starts the core as a child process. Their sockets are in a
folder that only the owner may enter. `open_client` chooses between a process and a thread.
"""

import abc
import dataclasses
import functools
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from socket import gethostbyname
from typing import Any

from quire import envs
from quire.config import EngineConfig
from quire.config.engine import SharingCopies
from quire.config.wire import config_to_plain
from quire.descriptors import memory_file
from quire.engine import core_process, messages
from quire.engine.core_client import CoreClient, OnMessage, ThreadClient
from quire.engine.data_parallel import CopiesClient, StartCopy, config_of_copy
from quire.engine.heartbeat import NUM_BYTES, map_words
from quire.engine.messages import CoreMessage, Dead, Stalled
from quire.engine.nodes import NodeClient, open_door
from quire.engine.recovery import RecoveringClient, StartCore
from quire.engine.remote_client import RemoteClient
from quire.engine.shared_copies import CopySeat, Gathering, place_in_folder
from quire.engine.spare_core import SpareCores, wants_spare
from quire.engine.watchdog import Watchdog, show_stacks
from quire.engine.weights import fetch_missing_weights
from quire.errors import ConfigError, EngineDeadError
from quire.executor.host_door import HostDoor
from quire.executor.host_network import free_place
from quire.logger import init_logger
from quire.patch import marks
from quire.platforms import current_platform
from quire.processes import Child

logger = init_logger(__name__)

_PATIENCE_S = 5.0
"""How long an orderly end may take before the child is killed."""

_LAST_WORDS_MS = 200
"""What a process said before it died comes before the news that it is disconnected; so long at most that news is waited for."""


class SocketClient(RemoteClient):
    """Two sockets, and descriptors that become readable when the other process has ended.

    `send` may be called from any thread.

    Args:
        out_address, in_address: of the sockets; `bind`: they are made here, not there.
        life_fds: readable when the other process has ended, or this client shall.
        release: closes what belongs to this client besides its sockets.
        on_message: called with every message, in a thread of this client's; the last one is `Dead`.
    """

    def __init__(
        self,
        out_address: str,
        in_address: str,
        *,
        bind: bool,
        life_fds: Sequence[int],
        release: Callable[[], None],
        on_message: OnMessage,
    ) -> None:
        import zmq

        super().__init__(on_message)
        self._zmq = zmq
        self._send_lock = threading.Lock()
        self._is_ending = self._is_closed = False
        context = zmq.Context()
        self._out = messages.zmq_socket(context, zmq.PUSH, out_address, bind=bind)
        self._in = messages.zmq_socket(context, zmq.PULL, in_address, bind=bind)
        self._disconnected = self._in.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        # Also for a client that is dropped without `shutdown`: a child ends when its pipe closes, and a context left to
        # the collector would wait for its open sockets for ever.
        self._release = weakref.finalize(self, _release, context, (self._disconnected, self._out, self._in), release)
        self._life_fds = life_fds
        self._writable, self._readable, self._last = zmq.Poller(), zmq.Poller(), zmq.Poller()
        self._writable.register(self._out, zmq.POLLOUT)
        self._readable.register(self._in, zmq.POLLIN)
        for socket in (self._in, self._disconnected):
            self._last.register(socket, zmq.POLLIN)
        for descriptor in life_fds:
            self._writable.register(descriptor, zmq.POLLIN)
            self._readable.register(descriptor, zmq.POLLIN)

    # --- messages ---

    def _send_data(self, *frames: bytes) -> None:
        with self._send_lock:
            while not self._is_closed:
                try:
                    self._out.send_multipart(frames, self._zmq.NOBLOCK)
                    return
                except self._zmq.Again:
                    ready = dict(self._writable.poll())
                    if any(descriptor in ready for descriptor in self._life_fds):
                        return

    def _receive(self, timeout_s: float | None = None) -> CoreMessage | None:
        if self._is_closed:
            return Dead("the engine was shut down")
        ready = dict(self._readable.poll(None if timeout_s is None else int(timeout_s * 1000)))
        if self._is_ending:
            return Dead("the engine was shut down")
        if not ready:
            return None
        if self._in in ready or (self._last.poll(_LAST_WORDS_MS) and self._in.poll(0)):
            return self._decode(self._in.recv())
        return Dead(self._describe_death())

    @abc.abstractmethod
    def _describe_death(self) -> str:
        """How the other process has ended."""

    # --- the end ---

    @abc.abstractmethod
    def _leave(self) -> None:
        """Have the core, or this client's part in it, end, so that `_receive` returns."""

    def shutdown(self) -> None:
        if self._is_closed:
            return
        self._is_ending = True
        self._leave()
        if self._listener is not None:
            self._listener.join()
        with self._send_lock:
            self._is_closed = True
        self._release()


def _release(context: Any, sockets: tuple[Any, ...], release: Callable[[], None]) -> None:
    release()
    for socket in sockets:
        socket.close(linger=0)
    context.term()


class ProcessClient(SocketClient):
    """The core is a child process. One that makes no progress is ended.

    Args:
        on_message: called with the core's messages, in another thread.
        executor: class path of the executor, if not the one that the configuration names.
        standing: of the core in whose place this one is started.
        spares: starts the process, and keeps a spare for the next one.

    Raises:
        ConfigError: the configuration cannot be sent, or the core refuses it.
        EngineDeadError: the core died before it was ready, or is not ready in time.
    """

    _hang = ""

    def __init__(
        self,
        config: EngineConfig,
        on_message: OnMessage,
        standing: messages.Standing | None = None,
        *,
        executor: str | None = None,
        spares: SpareCores | CopySeat | None = None,
    ) -> None:
        if executor is None:
            fetch_missing_weights(config)
        start = messages.Start(config_to_plain(config), executor, standing, marks())
        folder = tempfile.mkdtemp(prefix="quire-", dir=envs.QUIRE_RPC_BASE_PATH)
        try:
            out_address, in_address = f"ipc://{folder}/in", f"ipc://{folder}/out"
            memory_fd = memory_file(NUM_BYTES, "quire-heartbeat")
            try:
                self._watchdog = Watchdog(map_words(memory_fd), self._on_hang)
                start_core = core_process.start if spares is None else spares.start
                self._child = child = start_core([out_address, in_address], memory_fd)
            finally:
                os.close(memory_fd)
            super().__init__(
                out_address,
                in_address,
                bind=True,
                life_fds=(child.life_fd,),
                release=functools.partial(_close, child, self._watchdog),
                on_message=on_message,
            )
            try:
                self._start(start)
            except BaseException:
                child.end(0.0)
                self.shutdown()
                raise
            if spares is not None:
                spares.refill(self.ready.modules)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # the child is connected, or will never be

    def _start(self, start: messages.Start) -> None:
        self.send(start)
        if not self._await_ready(envs.QUIRE_ENGINE_READY_TIMEOUT_S):
            show_stacks(self.pid)
            self._child.kill()
            raise EngineDeadError(
                f"the engine core was not ready within {envs.QUIRE_ENGINE_READY_TIMEOUT_S:.0f} s "
                "(QUIRE_ENGINE_READY_TIMEOUT_S)"
            )
        self._watchdog.begin()
        self._start_listener()

    def _send_data(self, *frames: bytes) -> None:
        super()._send_data(*frames)
        self._watchdog.sent()

    def _on_hang(self, reason: str) -> None:
        """In the watching thread: end the core, with its ranks; what follows is as with any death."""
        self._watchdog.end()
        self._hang = f"the engine core process {self.pid} {reason}"
        logger.error("%s; it is ended", self._hang)
        self._on_message(Stalled(self._hang))
        show_stacks(self.pid)
        self._child.kill()

    @property
    def pid(self) -> int:
        return self._child.pid

    def _describe_death(self) -> str:
        how = self._child.describe_exit()
        return f"{self._hang}, and was ended" if self._hang else f"the engine core process {self.pid} {how}"

    def _leave(self) -> None:
        """End the child: in good order if it can, else by force."""
        self._watchdog.end()
        if self._child.process.poll() is None:
            self.send(messages.Shutdown())
            self._child.end(_PATIENCE_S)


def _close(child: Child, watchdog: Watchdog) -> None:
    watchdog.end()
    child.close()


def open_client(config: EngineConfig, core: str | None, on_message: OnMessage) -> CoreClient:
    """Start a core. One in a process is started again when it dies, unless `recovery` is off; `on_message` then gets
    `Restarting`, `GivenUp` and `Restarted` too.

    Args:
        core: `inproc` (a thread), `process`, or None: as QUIRE_ENABLE_MULTIPROCESSING says, and where it is not set a thread on
            a device that computes on the host's cores, a process otherwise.
        on_message: called with the core's messages, from another thread.

    Raises:
        ConfigError: the core refuses its configuration.
        EngineDeadError: it died while it started.
    """
    wish = config.parallel.wish_for_processes
    if core is None:
        on_host = current_platform(config.device.device).capabilities().computes_on_host.value
        core = chosen_core("inproc" if on_host and wish is None else "process")
    if core == "inproc":
        if wish is not None:
            message = (
                f"{wish} needs a core in a process of its own; a thread was asked for (QUIRE_ENABLE_MULTIPROCESSING=0?)"
            )
            raise ConfigError(message, setting=wish.split("=")[0])
        return ThreadClient(config, on_message)
    if core != "process":
        raise ConfigError(f"core is {core!r}; it may be 'inproc' or 'process'", setting="core")
    num_copies, num_here = config.parallel.data_parallel_size, config.parallel.num_copies_here
    if num_copies == num_here == 1:
        return _open_process(config, None, on_message)
    gathering = _gathering(config) if config.parallel.enable_expert_parallel and num_copies > 1 else None
    starts: list[StartCopy] = [
        functools.partial(_open_process, config_of_copy(config, number), gathering) for number in range(num_here)
    ]
    door = None
    if num_copies > num_here:
        door = open_door(config)
        starts += [
            functools.partial(_open_elsewhere, config, door, number, gathering)
            for number in range(num_here, num_copies)
        ]
        starts = [functools.partial(_open_or_close, start, door) for start in starts]
    if gathering is not None:
        starts = [functools.partial(_open_or_close, start, gathering) for start in starts]
    return CopiesClient(starts, on_message, gathering, door)


def _gathering(config: EngineConfig) -> Gathering:
    """Where copies that share experts meet: on one host through a file, else at a port of the first one's host."""
    parallel = config.parallel
    if parallel.num_copies_here:
        fetch_missing_weights(config)  # before others wait
    is_here = not parallel.data_parallel_elsewhere
    place = place_in_folder() if is_here else functools.partial(free_place, parallel.data_parallel_address)
    return Gathering(place, parallel.data_parallel_size)


def _open_process(config: EngineConfig, gathering: Gathering | None, on_message: OnMessage) -> CoreClient:
    """Start one core in a process."""
    parallel = config.parallel
    is_alone = parallel.recovery is False
    spares = SpareCores() if not is_alone and wants_spare(config) else None
    start: StartCore = functools.partial(ProcessClient, config, spares=spares)
    if gathering is not None:
        seat = gathering.seats[parallel.data_parallel_rank]
        seat.spares = spares
        address = gethostbyname(parallel.data_parallel_address) if parallel.data_parallel_elsewhere else ""
        sharing = SharingCopies("", parallel.data_parallel_rank, parallel.data_parallel_size, address)
        start = functools.partial(open_seated, seat, config, sharing)
    return start(on_message, None) if is_alone else RecoveringClient(start, on_message, spares)


def open_seated(
    seat: CopySeat,
    config: EngineConfig,
    sharing: SharingCopies,
    on_message: OnMessage,
    standing: messages.Standing | None,
) -> CoreClient:
    """Start a copy that shares experts, as a process of this host."""

    def start(on_message: OnMessage, standing: messages.Standing | None) -> CoreClient:
        place = dataclasses.replace(sharing, rendezvous=seat.join())
        parallel = dataclasses.replace(config.parallel, sharing=place)
        return ProcessClient(dataclasses.replace(config, parallel=parallel), on_message, standing, spares=seat)

    return seat.open(start, on_message, standing)


def _open_elsewhere(
    config: EngineConfig, door: HostDoor, number: int, gathering: Gathering | None, on_message: OnMessage
) -> CoreClient:
    """Wait for one core of another host."""
    seat = None if gathering is None else gathering.seats[number]
    start: StartCore = functools.partial(NodeClient, door, number, seat=seat)
    if seat is not None:
        start = functools.partial(seat.open, start)
    return start(on_message, None) if config.parallel.recovery is False else RecoveringClient(start, on_message)


def _open_or_close(start: StartCopy, awaited: HostDoor | Gathering, on_message: OnMessage) -> CoreClient:
    """Start a copy. Where it cannot start, those that wait for hosts or for copies wait no more."""
    try:
        return start(on_message)
    except BaseException:
        awaited.close()
        raise


def chosen_core(usual: str = "process") -> str:
    """Where a core runs, as `open_client` names it: where QUIRE_ENABLE_MULTIPROCESSING says, or where it usually does. A
    server's usually runs in a process."""
    asked = envs.QUIRE_ENABLE_MULTIPROCESSING
    return usual if asked is None else ("process" if asked else "inproc")
