"""The server that `python -m bench frontend` measures: the real one, over a device with a clock in a core process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from bench.steady import FIRST_TOKEN, NUM_MARKS

from bench import stand_in
from quire.config import EngineConfig, SchedulerConfig
from quire.entrypoints.http.listen import ListenOptions, open_socket

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer whose tokens above the bytes are words with a number: ` s0000`, ` s0001` …"""
    vocabulary = {letter: index for index, letter in enumerate(stand_in.byte_letters())}
    vocabulary |= {f"Ġs{index:04d}": FIRST_TOKEN + index for index in range(NUM_MARKS)}
    return stand_in.write_tokenizer(folder, vocabulary, CHAT_TEMPLATE)


def engine_config(folder: Path, settings: dict[str, Any]) -> EngineConfig:
    """A GPU's settings over the device with a clock."""
    scheduler = SchedulerConfig(
        max_model_len=16384, max_num_seqs=4096, max_num_batched_tokens=16384, async_scheduling=True
    )
    settings = {"vocab_size": FIRST_TOKEN + NUM_MARKS, **settings}
    executor = "bench.steady:SteadyExecutor"
    return stand_in.engine_config("steady", folder, settings, scheduler, num_blocks=400_000, executor=executor)


def main() -> int:
    """Serve until a signal; prints the port."""
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    listener, options = open_socket(ListenOptions(port=0, access_log=False))

    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.http.state import ServerSettings, ServerState
    from quire.entrypoints.server.app import build_app
    from quire.entrypoints.server.process import ServerProcess

    state = ServerState(ServerSettings())

    def build_engine() -> Any:
        return AsyncLLM(engine_config(folder, settings), core="process")

    def announce(engine: Any, seconds: float) -> None:
        print(f"frontend at port {options.port}", flush=True)

    return ServerProcess(build_app(state), state, listener, options, build_engine, announce).run()


if __name__ == "__main__":
    sys.exit(main())
