"""Small engines of one process and of several, which are to draw the same tokens, and processes that play other hosts."""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from quire import LLM, SamplingParams

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20,
    "max_num_batched_tokens": 64, "disable_log_stats": True, "max_num_seqs": 8,
}  # fmt: skip
PROMPTS: Any = [{"prompt_token_ids": [3 + (i * i + 7 * n) % 300 for i in range(5 + 9 * n)]} for n in range(5)]


def tokens(llm: LLM) -> list[list[int]]:
    """What it draws, the same again each time."""
    drawn = SamplingParams(temperature=0.8, seed=4, max_tokens=12, ignore_eos=True, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, drawn, use_tqdm=False)]


def free_port() -> int:
    """One at which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def a_host(*words: str, given: bytes = b"") -> Iterator["subprocess.Popen[bytes]"]:
    """A Python process that reads what it is given, and is gone afterwards."""
    child = subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.PIPE)
    assert child.stdin is not None
    child.stdin.write(given)
    child.stdin.close()
    try:
        yield child
    finally:
        child.kill()
        child.wait()
