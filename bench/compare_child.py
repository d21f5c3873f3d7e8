"""One engine under comparison, in a process of its own: loads, then measures what it is told, a line at a time.

Run by any interpreter, so it imports the standard library alone, besides the engine: a module with `LLM(model=..., dtype=...,
max_model_len=...)`, `SamplingParams(temperature=, max_tokens=, ignore_eos=)` and `LLM.generate(prompts, params, use_tqdm=False)`.
Between two lines it blocks on its input, so that it does not disturb the engine that is being measured.
"""

import importlib
import json
import random
import sys
import time
from typing import Any


class Engine:
    """The engine, and the workloads. Prompts are new for every measurement."""

    def __init__(self, job: dict[str, Any]) -> None:
        if job["path"]:
            sys.path.insert(0, job["path"])
        module = importlib.import_module(job["module"])
        self._sampling = module.SamplingParams
        self._llm = module.LLM(
            model=job["model"], dtype=job["dtype"], max_model_len=job["max_model_len"], **job["arguments"]
        )
        self._vocab = job["vocab_size"]
        self._random = random.Random(job["seed"])

    def _seconds(self, lengths: list[tuple[int, int]]) -> tuple[float, float]:
        """Of the clock, and of this process on processors: the one that neighbours on a shared machine do not blur, where an
        engine works with one thread (several wait for one another by looking)."""
        prompts = [
            {"prompt_token_ids": [self._random.randrange(10, self._vocab - 10) for _ in range(size)]}
            for size, _ in lengths
        ]
        params = [self._sampling(temperature=0.0, max_tokens=size, ignore_eos=True) for _, size in lengths]
        begin, busy = time.perf_counter(), time.process_time()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
        produced = [len(output.outputs[0].token_ids) for output in outputs]
        if produced != [size for _, size in lengths]:
            raise RuntimeError(f"asked for {[size for _, size in lengths]} tokens, got {produced}")
        return seconds, busy

    def measure(self, workload: str) -> dict[str, float]:
        """Figures of one workload: `decode:IN:OUT`, `batch:N:IN_LOW:IN_HIGH:OUT_LOW:OUT_HIGH`, `prefill:IN`."""
        kind, *numbers = workload.split(":")
        values = [int(number) for number in numbers]
        if kind == "decode":
            prompt, steps = values
            first, full = self._seconds([(prompt, 1)]), self._seconds([(prompt, steps)])
            figures = {"ttft_ms": first[0] * 1e3, "ms_per_token": (full[0] - first[0]) / (steps - 1) * 1e3}
            return figures | {"cpu_ms_per_token": max(full[1] - first[1], 1e-9) / (steps - 1) * 1e3}
        if kind == "batch":
            count, *bounds = values
            source = random.Random(0)  # the same lengths in every round and for every engine
            lengths = [(source.randint(*bounds[:2]), source.randint(*bounds[2:])) for _ in range(count)]
            return {"output_tokens_per_s": sum(size for _, size in lengths) / self._seconds(lengths)[0]}
        if kind == "prefill":
            seconds, busy = self._seconds([(values[0], 1)])
            return {"prompt_tokens_per_s": values[0] / seconds, "cpu_ms_per_prompt_token": busy / values[0] * 1e3}
        raise ValueError(f"workload {workload!r}: it is decode:IN:OUT, batch:N:LOW:HIGH:LOW:HIGH or prefill:IN")


def main() -> None:
    """Jobs come as JSON lines on standard input; answers go out as lines that begin with `@`."""
    engine: Engine | None = None
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if engine is None:
                engine = Engine(job)
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = engine.measure(job["workload"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
