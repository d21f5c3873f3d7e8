"""The server that `quire bench frontend` measures: the real one, over a device with a clock in a core process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from quire.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    HFConfig,
    LoadConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
)
from quire.entrypoints.openai.listen import ListenOptions, open_socket
from quire.simulator.steady import FIRST_TOKEN, NUM_MARKS

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"


def write_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer whose tokens above the bytes are words with a number: ` s0000`, ` s0001` …"""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary |= {f"Ġs{index:04d}": FIRST_TOKEN + index for index in range(NUM_MARKS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


def engine_config(folder: Path, settings: dict[str, Any]) -> EngineConfig:
    """A GPU's settings over the device with a clock."""
    max_model_len = 16384
    return EngineConfig(
        model=ModelConfig(
            model="steady",
            path=str(folder),
            hf_config=HFConfig({"vocab_size": FIRST_TOKEN + NUM_MARKS, **settings}),
            tokenizer="steady",
            tokenizer_path=str(folder),
            dtype="bfloat16",
            max_model_len=max_model_len,
            architecture="Steady",
        ),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=400_000),
        parallel=ParallelConfig(distributed_executor_backend="quire.simulator.steady:SteadyExecutor"),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len, max_num_seqs=4096, max_num_batched_tokens=16384, async_scheduling=True
        ),
        device=DeviceConfig(device="cpu"),
        load=LoadConfig(),
        attention=AttentionConfig(),
        observability=ObservabilityConfig(),
        instance_id="bench-frontend",
    )


def main() -> int:
    """Serve until a signal; prints the port, this process's id and the core's."""
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    listener, options = open_socket(ListenOptions(port=0, access_log=False))

    from quire.engine.async_llm import AsyncLLM
    from quire.entrypoints.openai.app import build_app
    from quire.entrypoints.openai.server import ServerProcess
    from quire.entrypoints.openai.state import ServerSettings, ServerState

    state = ServerState(ServerSettings())

    def build_engine() -> Any:
        return AsyncLLM(engine_config(folder, settings), core="process")

    def announce(engine: Any, seconds: float) -> None:
        print(f"ready {options.port}", flush=True)

    return ServerProcess(build_app(state), state, listener, options, build_engine, announce).run()


if __name__ == "__main__":
    sys.exit(main())
