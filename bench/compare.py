"""`python -m bench compare`: Quire beside other engines, in rounds that alternate between them on the same machine.

A machine that others share drifts within minutes; a ratio of two measurements of the same round does not. Each engine has a
process of its own (and may have an interpreter of its own), loaded once; only one of them works at a time.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.benchmarks.common import machine, model_name, print_columns
from quire.engine.arg_parser import json_object, positive
from quire.errors import EngineError

WORKLOADS = "decode:128:128,batch:32:64:256:32:128,prefill:2048"
HIGHER_IS_BETTER = {"output_tokens_per_s": True, "prompt_tokens_per_s": True}
"""Of figures that are not named here, a lower one is better."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    peer = '{"name": …, "module": …, "python": interpreter, "path": folder of the module, "arguments": {…}}'
    add = parser.add_argument
    add("--model", required=True, help="a folder with config.json, given to every engine")
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=positive, default=4096)
    add("--peer", type=_peer, action="append", default=[], metavar="JSON", help=f"another engine: {peer}")
    add("--arguments", type=json_object, default={}, metavar="JSON", help="further arguments of Quire's LLM")
    add("--workloads", default=WORKLOADS, help=f"comma-separated ({WORKLOADS})")
    add("--rounds", type=positive, default=5)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    with open(Path(args.model) / "config.json", encoding="utf-8") as file:
        vocab_size = json.load(file)["vocab_size"]
    contenders = [{"name": "quire", "module": "quire", "arguments": args.arguments}, *args.peer]
    job = {"model": args.model, "dtype": args.dtype, "max_model_len": args.max_model_len, "vocab_size": vocab_size}
    engines = [_Contender(spec, job) for spec in contenders]
    workloads = args.workloads.split(",")
    try:
        samples = _rounds(engines, workloads, args.rounds)
    finally:
        for engine in engines:
            engine.end()
    figures = _summarise(samples, [engine.name for engine in engines])
    _print(figures, [engine.name for engine in engines], args)
    return {
        "model": model_name(args.model),
        "dtype": args.dtype,
        "rounds": args.rounds,
        "machine": machine(),
        "figures": figures,
    }


class _Contender:
    """An engine's process."""

    def __init__(self, spec: dict[str, Any], job: dict[str, Any]) -> None:
        self.name = str(spec["name"])
        script = Path(__file__).with_name("compare_child.py")
        self._process = subprocess.Popen(
            [spec.get("python") or sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        extra = {
            "module": spec["module"],
            "path": spec.get("path", ""),
            "arguments": spec.get("arguments", {}),
            "seed": 1,
        }
        self.ask({**job, **extra})

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a job, wait for its answer. Raises EngineError: the engine failed or ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                if "error" in answer:
                    raise EngineError(f"engine {self.name!r}: {answer['error']}")
                return answer
        raise EngineError(f"engine {self.name!r} ended with code {self._process.wait()}")

    def end(self) -> None:
        """Close its input; it ends by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _peer(text: str) -> dict[str, Any]:
    """An argparse type: what names another engine."""
    spec = json_object(text)
    missing = {"name", "module"} - spec.keys()
    if missing:
        raise argparse.ArgumentTypeError(f"{text!r} lacks {' and '.join(sorted(missing))}")
    return spec


Samples = dict[str, dict[str, list[float]]]
"""`workload figure` -> engine -> one value a round."""


def _rounds(engines: list[_Contender], workloads: list[str], rounds: int) -> Samples:
    for engine in engines:
        for workload in workloads:
            engine.ask({"workload": workload})  # once for warmth
    samples: Samples = {}
    for number in range(rounds):
        for workload in workloads:
            # Who goes first alternates, so that a drift of the machine favours nobody.
            for engine in engines if number % 2 == 0 else reversed(engines):
                for figure, value in engine.ask({"workload": workload}).items():
                    samples.setdefault(f"{workload} {figure}", {}).setdefault(engine.name, []).append(value)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return samples


def _summarise(samples: Samples, names: list[str]) -> list[dict[str, Any]]:
    """Medians, and for each peer the median over rounds of how many times better Quire was."""
    rows: list[dict[str, Any]] = []
    for figure, by_engine in samples.items():
        higher = HIGHER_IS_BETTER.get(figure.split()[1], False)
        ours = by_engine[names[0]]
        ratios = {
            name: statistics.median(a / b if higher else b / a for a, b in zip(ours, by_engine[name], strict=True))
            for name in names[1:]
        }
        medians = {name: statistics.median(values) for name, values in by_engine.items()}
        rows.append({"figure": figure, "medians": medians, "times_better": ratios, "samples": by_engine})
    return rows


def _print(figures: list[dict[str, Any]], names: list[str], args: argparse.Namespace) -> None:
    header = ["figure", *names, *(f"quire / {name}" for name in names[1:])]
    rows = [
        [
            row["figure"],
            *(row["medians"][name] for name in names),
            *(f"{row['times_better'][n]:.2f}x" for n in names[1:]),
        ]
        for row in figures
    ]
    print_columns(f"{model_name(args.model)}, {args.dtype}, medians of {args.rounds} rounds", header, rows)
