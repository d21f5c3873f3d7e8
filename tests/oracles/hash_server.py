"""A whole server process over the hash model: `python -m tests.oracles.hash_server FOLDER CORE MAX_LEN`."""

import sys
from pathlib import Path
from typing import Any

from tests.engine.builders import make_config

from quire.entrypoints.http.listen import ListenOptions, open_socket
from quire.entrypoints.http.state import ServerSettings, ServerState
from quire.entrypoints.server.app import build_app
from quire.entrypoints.server.process import ServerProcess


def main() -> int:
    folder, core, max_len = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    state = ServerState(ServerSettings())
    listener, options = open_socket(ListenOptions(port=0, access_log=False))

    def build_engine() -> Any:
        from quire.engine.async_llm import AsyncLLM

        config = make_config(
            folder,
            max_model_len=max_len,
            num_blocks=60_000,
            recovery=False,
            max_num_seqs=2048,
            max_num_batched_tokens=8192,
        )
        engine = AsyncLLM.from_engine_config(config, core=core)
        from quire.metrics.prometheus import PrometheusExposition

        state.metrics = PrometheusExposition(engine.metrics, {})
        return engine

    def announce(engine: Any, seconds: float) -> None:
        print(f"hash is ready after {seconds:.1f} s at {options.url}", flush=True)

    return ServerProcess(build_app(state), state, listener, options, build_engine, announce).run()


if __name__ == "__main__":
    sys.exit(main())
