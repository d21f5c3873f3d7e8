"""A whole server process over the fake engine: `python -m tests.oracles.fake_server TOKENS`.

The engine gives TOKENS tokens and then waits; SIGUSR1 lets it go on for ever. `slow-start` as a second word keeps the engine
from starting until SIGUSR1; `broken-start` makes the start fail. SIGUSR2 makes the engine die; `stays` keeps the server then.
"""

import asyncio
import signal
import sys
import threading
from typing import Any

from tests.oracles.fake_async_llm import FakeAsyncLLM

from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.process import ServerProcess
from quire.errors import ConfigError, EngineDeadError


def main() -> int:
    tokens, start = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "at-once"
    go_on = threading.Event()
    engine = FakeAsyncLLM()
    gate = engine.gate = asyncio.Semaphore(tokens)

    def release(number: int, frame: Any) -> None:
        go_on.set()
        for _ in range(100_000):
            gate.release()

    def die(number: int, frame: Any) -> None:
        engine.errored, engine.failure = True, EngineDeadError("the core was killed")
        release(number, frame)
        if engine.on_death is not None:
            engine.on_death()

    signal.signal(signal.SIGUSR1, release)
    signal.signal(signal.SIGUSR2, die)
    state = ServerState(ServerSettings())
    listener, options = open_socket(
        ListenOptions(port=0, access_log=False, keep_alive_on_engine_death=start == "stays")
    )

    def build_engine() -> Any:
        if start == "broken-start":
            raise ConfigError("max_model_len: 0 is too small.", setting="max_model_len")
        if start == "slow-start":
            go_on.wait()
        return engine

    print(f"listening at {options.url}", flush=True)

    def announce(engine: Any, seconds: float) -> None:
        print(f"fake is ready after {seconds:.1f} s at {options.url}", flush=True)

    return ServerProcess(build_app(state), state, listener, options, build_engine, announce).run()


if __name__ == "__main__":
    sys.exit(main())
