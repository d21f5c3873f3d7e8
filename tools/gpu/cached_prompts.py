"""How long a prompt that is in the prefix cache but for its last page waits for its first token, and what of that is the host's.

A model of Llama-3.1-8B's shape with dummy weights (`--tiny`: a small one, for a machine without a GPU). Prompts are token ids;
all but the last 16 are computed before. Measured of each run: from `LLM.generate` to the submission of the first step (host), and
to the first token; beside it a decode step with the same prompts. Under a minute on an H200:

    PYTHONPATH=src python tools/gpu/cached_prompts.py --json $OUT/cached-prompts.json

Two source trees in turns, each in a process of its own:

    python tools/gpu/cached_prompts.py --tiny --trees BEFORE/src AFTER/src
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 64, "torch_dtype": "float32",
}  # fmt: skip
WORKS = ((1, 100_000), (8, 32_000))
"""Prompts at once, and the tokens of each."""
NEW = 16
"""Tokens of a prompt that are not in the cache."""


class Bench:
    """One engine, and prompts that it has seen but for their ends."""

    def __init__(self, is_tiny: bool) -> None:
        from quire import LLM
        from quire.worker.model_runner import ModelRunner
        from quire.worker.step_graphs import StepGraphs

        self._draw = random.Random(0)
        self._submitted: tuple[float, float] | None = None
        self._prompts: dict[tuple[int, int], list[list[int]]] = {}
        self._watch(StepGraphs, "run")
        self._watch(ModelRunner, "_run_model")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(TINY if is_tiny else LLAMA_8B))
            settings: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 29} if is_tiny else {}
            self._llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **settings)

    def _watch(self, kind: type, method: str) -> None:
        """Note when the first step after `generate` is submitted."""
        plain = getattr(kind, method)

        def run(*args: Any) -> Any:
            self._submitted = self._submitted or (time.perf_counter(), time.thread_time())
            return plain(*args)

        setattr(kind, method, run)

    def _generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[dict[str, float], Any]:
        """Milliseconds until the first step was submitted (this thread's processor time too) and until the end; the outputs."""
        from quire import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        self._submitted, began, began_cpu = None, time.perf_counter(), time.thread_time()
        outputs = self._llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]
        ended = time.perf_counter()
        assert self._submitted is not None
        submitted, submitted_cpu = self._submitted
        seconds = {"host": submitted - began, "host_cpu": submitted_cpu - began_cpu, "first": ended - began}
        return {f"{name}_ms": 1e3 * value for name, value in seconds.items()}, outputs

    def prepare(self, count: int, length: int) -> float:
        """Compute the prompts; milliseconds."""
        prompts = [[self._draw.randrange(1000, 128_000) for _ in range(length)] for _ in range(count)]
        self._prompts[count, length] = prompts
        return self._generate(prompts, 1)[0]["first_ms"]

    def hit(self, count: int, length: int) -> dict[str, float]:
        """One run: `host_ms` to the submission of the step, `host_cpu_ms` of it computing, `first_ms` to the token."""
        ends = [[self._draw.randrange(1000, 128_000) for _ in range(NEW)] for _ in range(count)]
        prompts = [prompt[:-NEW] + end for prompt, end in zip(self._prompts[count, length], ends, strict=True)]
        figures, outputs = self._generate(prompts, 1)
        assert all(output.num_cached_tokens >= length - 2 * NEW for output in outputs), "the prompts are not cached"
        return figures

    def step(self, count: int, length: int, num_tokens: int = 33) -> float:
        """Milliseconds a decode step."""
        prompts = self._prompts[count, length]
        one, many = (self._generate(prompts, count)[0]["first_ms"] for count in (1, num_tokens))
        return (many - one) / (num_tokens - 1)


def serve(is_tiny: bool) -> None:
    """Answer calls from standard input, a JSON list a line, until it ends."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is not an answer
    bench = Bench(is_tiny)
    for line in sys.stdin:
        method, *args = json.loads(line)
        output.write(json.dumps(getattr(bench, method)(*args)) + "\n")
        output.flush()


class Child:
    """A process with an engine from one source tree."""

    def __init__(self, tree: str, is_tiny: bool) -> None:
        self.tree = tree
        command = [sys.executable, __file__, "--serve", *(["--tiny"] if is_tiny else [])]
        environment = os.environ | ({"PYTHONPATH": tree} if tree else {})
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def call(self, *words: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine of {self.tree or 'this tree'} has ended")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--trees", nargs="+", default=[""], metavar="SRC", help="source trees to compare")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.tiny)
        return
    children = [Child(tree, args.tiny) for tree in args.trees]
    rows: list[dict[str, Any]] = []
    for work in WORKS:
        cold = [child.call("prepare", *work) for child in children]
        for child in children:
            child.call("hit", *work)  # the first one warms up
        runs = [[child.call("hit", *work) for child in children] for _ in range(args.rounds)]
        for index, child in enumerate(children):
            row: dict[str, Any] = {"tree": child.tree, "prompts": work[0], "tokens": work[1], "cold_ms": cold[index]}
            row |= {name: [run[index][name] for run in runs] for name in ("host_ms", "host_cpu_ms", "first_ms")}
            row["step_ms"] = child.call("step", *work)
            host, cpu, first = (statistics.median(row[name]) for name in ("host_ms", "host_cpu_ms", "first_ms"))
            rows.append(row)
            print(
                f"{work[0]} x {work[1]:,} {child.tree}: host {host:.1f} ms ({cpu:.1f} of processor time), "
                f"first token {first:.1f} ms, a decode step {row['step_ms']:.1f} ms: {first / row['step_ms']:.1f} steps",
                flush=True,
            )
    for child in children:
        child.close()
    if args.json:
        args.json.write_text(json.dumps({"what": __doc__.splitlines()[0], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
