"""First uses and starts on a fresh GPU machine: what `quire bench` says of them, and what captures and loads take.

Run on a machine where nothing was run yet: `python tools/gpu/first_use.py MODEL OTHER_MODEL`, folders with a config.json.
The first has a tokenizer; the second, which may be left out, has a shape that no list knows. Prints tables, writes JSON under
$OUT. After them may come `quantized`: the same with each way of rounding, and `captures` and `vocabulary`: what takes how long.

`python tools/gpu/first_use.py MODEL everything` measures only first uses, but all of them: generation and pooling, in turn and
all at once, fp8 and int4. Every server starts on empty caches. About three minutes for a model of 0.6B on an H200 (estimated from
its parts); exits with 1 if a gap is longer than 50 ms.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "/tmp"))


def part_vocabulary(folder: str) -> dict:
    """How long a thread works for what the first form needs."""
    from quire.config import StructuredOutputsConfig
    from quire.structured_output.backend import find_backend
    from quire.structured_output.string_masks import StringMasks
    from quire.structured_output.vocabulary import read_vocabulary
    from quire.tokenizers.loader import get_tokenizer

    seconds: dict[str, float] = {"backend": 0.0}
    marks = [time.thread_time()]

    def mark(name: str) -> None:
        marks.append(time.thread_time())
        seconds[name] = round(marks[-1] - marks[-2], 3)

    tokenizer = get_tokenizer(folder)
    mark("tokenizer")
    size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    vocabulary = read_vocabulary(tokenizer, size)
    mark("vocabulary")
    find_backend("guidance")
    StructuredOutputsConfig()
    mark("import")
    find_backend("guidance")(vocabulary, (1,))
    mark("backend")
    StringMasks(vocabulary, frozenset(vocabulary.special_ids))
    mark("strings")
    return seconds


def part_captures(folder: str) -> dict:
    """In one process: how long each step size takes to run eagerly for the first time, and to capture."""
    from quire.worker import step_graphs

    seconds: dict[str, list[tuple[str, float]]] = {"run": [], "capture": []}
    plain_capture, plain_init = step_graphs.Captures.capture, step_graphs.StepGraphs.__init__

    def timed_capture(self, shape, function):
        begin = time.perf_counter()
        graph = plain_capture(self, shape, function)
        seconds["capture"].append((str(shape), time.perf_counter() - begin))
        return graph

    def timed_init(self, *args, **named):
        plain_init(self, *args, **named)
        run = self._run

        def timed_run(shape):
            begin = time.perf_counter()
            run(shape)
            seconds["run"].append((str(shape), time.perf_counter() - begin))

        self._run = timed_run

    step_graphs.Captures.capture, step_graphs.StepGraphs.__init__ = timed_capture, timed_init
    from quire import LLM

    llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True)
    executor: Any = llm.llm_engine._client.core._executor  # type: ignore[attr-defined]
    begin = time.perf_counter()
    while executor.idle():
        pass
    total = time.perf_counter() - begin
    longest = {kind: sorted((round(1e3 * took, 1), shape) for shape, took in of)[-6:] for kind, of in seconds.items()}
    return {"idle, s": round(total, 2), "longest, ms": longest, "captures": len(seconds["capture"])}


def bench(*words: str) -> dict:
    """The JSON of a benchmark."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "quire.entrypoints.cli.main", "bench", *words, "--json", file.name]
        done = subprocess.run(command, text=True, capture_output=True)
        print(done.stdout[-5000:], flush=True)
        if done.returncode not in (0, 1) or not os.path.getsize(file.name):
            print(done.stderr[-3000:], flush=True)
            return {"error": done.stderr[-2000:]}
        return json.loads(Path(file.name).read_text())


MOST_MS = 50.0
FEW = ("greedy", "top_p", "logprobs", "prompt_logprobs", "long", "n", "json")
EVERYTHING: dict[str, tuple[str, ...]] = {
    "generation": ("--long-input-len", "3000"),
    "pooling": ("--runner", "pooling", "--long-input-len", "3000"),
    "fp8": ("--quantizations", "fp8", "--orders", "in-turn", "--features", *FEW),
    "int4": ("--quantizations", "int4", "--orders", "in-turn", "--features", *FEW),
}
"""The runs of `everything`, and their flags."""


def everything(folder: str) -> bool:
    """Every kind of first use. Whether no gap was too long."""
    began, report, rows = time.monotonic(), dict[str, Any](), list[tuple[str, float, str, bool]]()
    for name, flags in EVERYTHING.items():
        figures = report[name] = bench("first-use", "--model", folder, "--load-format", "dummy", *flags)
        (OUT / "first-use-everything.json").write_text(json.dumps(report, indent=1))
        for run in figures.get("runs", []):
            worst = max(
                (row[use]["gap_ms"], f"{row['feature']} ({use} use)")
                for row in run["features"]
                if "refused" not in row
                for use in ("first", "second")
            )
            rows.append((f"{name}, {run['order']}", *worst, worst[0] <= MOST_MS))
        if "error" in figures:
            rows.append((name, 0.0, "did not run", False))
        print(f"== {name} at {time.monotonic() - began:.0f} s", flush=True)
    print(f"{'':28} {'longest gap, ms':>16}  feature")
    for name, gap, feature, is_short in rows:
        print(f"{name:28} {gap:16.1f}  {feature}{'' if is_short else '  <- above the aim'}")
    return all(row[3] for row in rows)


def main(models: list[str]) -> None:
    report: dict = {}

    def keep(name: str, figures: dict) -> None:
        report[name] = figures
        (OUT / "first-use.json").write_text(json.dumps(report, indent=1))
        print(f"== {name} at {time.monotonic() - began:.0f} s", flush=True)

    began = time.monotonic()
    one = ("--num-iters", "1", "--num-iters-warmup", "0")
    dummy, no_text = ("--load-format", "dummy"), ("--skip-tokenizer-init",)
    keep("start, bare machine", bench("startup", "--cold", *one, "--model", models[0], *dummy))
    keep("start, no kernels", bench("startup", "--cold", *one, "--model", models[0], *dummy))
    for other in models[1:]:
        keep("start, no kernels, unlisted shape", bench("startup", "--cold", *one, "--model", other, *dummy, *no_text))
    keep(
        "start, no kernels, unlisted page size",
        bench("startup", "--cold", *one, "--model", models[0], "--block-size", "32", *dummy),
    )
    keep("first use", bench("first-use", "--model", models[0], *dummy, "--long-input-len", "12000"))
    for other in models[1:]:
        keep("first use, unlisted", bench("first-use", "--orders", "at-once", "--model", other, *dummy, *no_text))
    keep(
        "start, nothing to compile", bench("startup", *one[:2], "--num-iters-warmup", "1", "--model", models[0], *dummy)
    )
    for file in Path(os.environ["QUIRE_CACHE_ROOT"]).rglob("lists/*.json"):
        (OUT / file.name).write_bytes(file.read_bytes())
    if "quantized" in sys.argv:
        few = ("--features", "greedy", "top_p", "logprobs", "prompt_logprobs", "long", "n", "json")
        formats = ("--quantizations", "fp8", "int8", "int4", "--orders", "in-turn")
        keep("first use, quantized", bench("first-use", *formats, *few, "--model", models[0], *dummy))
    for part in (name for name in sys.argv if name in ("captures", "vocabulary")):
        done = subprocess.run([sys.executable, __file__, part, models[0]], text=True, capture_output=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        keep(part, json.loads(lines[-1]) if lines else {"error": done.stderr[-1500:]})
        print(report[part])


if __name__ == "__main__":
    if "everything" in sys.argv:
        sys.exit(0 if everything(sys.argv[1]) else 1)
    if sys.argv[1] in ("captures", "vocabulary"):
        print(json.dumps(globals()[f"part_{sys.argv[1]}"](sys.argv[2])))
    else:
        main(sys.argv[1:3])
