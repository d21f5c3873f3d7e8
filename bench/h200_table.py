"""The table of `docs/performance.md` for one H200, from results of `offline_bench.py`.

    python bench/h200_table.py bench/results/h200-offline.jsonl

Peers were measured on other machines of the same kind with the same script (`peers` below: vLLM 0.25.1 and SGLang 0.5.17,
default settings, torch 2.11); limits are what the work cannot avoid over the ceilings of those machines (copy 4,238 GB/s,
bf16 784 TFLOP/s, fp8 1,449 TFLOP/s). Differences under 3 % (10 % for the 0.6B) mean nothing.
"""

import dataclasses
import json
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: which result, and what the peers and the limit are. `higher` is better, or lower."""

    model: str
    workload: str
    key: str
    unit: str
    vllm: float | None
    sglang: float | None
    limit: float | None
    aim: float
    higher: bool = False
    label: str = ""


QWEN, LLAMA, MOE = "qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b"
ROWS = [
    Row(QWEN, "first", "start_s", "s", 42.5, 54.5, None, 4.0, label="warm"),
    Row(LLAMA, "first", "start_s", "s", 34.6, 53.0, None, 6.0, label="warm"),
    Row(QWEN, "first", "start_s", "s", 93.0, 89.3, None, 6.0, label="cold"),
    Row(LLAMA, "first", "start_s", "s", 87.0, 87.2, None, 8.0, label="cold"),
    Row(MOE, "first", "start_s", "s", 116.8, 116.7, None, 14.0, label="cold"),
    Row(QWEN, "mix", "out_tok_s", "out tok/s", 23305, 21457, 35150, 30000, True),
    Row(QWEN, "latency:1:128:256", "step_ms", "ms a step", 1.654, 1.692, 0.29, 0.70),
    Row(QWEN, "latency:1:128:256", "ttft_ms", "ms TTFT", 9.15, 10.2, None, 3.0),
    Row(QWEN, "latency:32:128:256", "step_ms", "ms a step", 2.423, 2.042, 0.50, 1.0),
    Row(QWEN, "latency:256:128:256", "step_ms", "ms a step", 6.156, 5.578, 2.16, 3.0),
    Row(QWEN, "fixed:1000:1024:128", "total_tok_s", "total tok/s", 150557, 153191, 220000, 187000, True),
    Row(QWEN, "prefill:32768", "wall_s", "s", 0.317, None, 0.194, 0.24),
    Row(LLAMA, "mix", "out_tok_s", "out tok/s", 9853, 9639, 13300, 11600, True),
    Row(LLAMA, "fixed:1000:1024:128", "total_tok_s", "total tok/s", 34048, 35058, 45560, 39800, True),
    Row(LLAMA, "latency:1:128:256", "step_ms", "ms a step", 4.877, 4.856, 3.55, 3.95),
    Row(LLAMA, "latency:1:128:256", "ttft_ms", "ms TTFT", 11.3, 13.6, None, 6.0),
    Row(LLAMA, "latency:32:128:256", "step_ms", "ms a step", 5.449, 5.535, 3.79, 4.3),
    Row(LLAMA, "latency:256:128:256", "step_ms", "ms a step", 11.41, 11.65, 6.93, 8.2),
    Row(LLAMA, "prefill:32768", "wall_s", "s", 1.2335, 1.1907, 0.942, 1.08),
    Row(LLAMA, "prefix:200:2000:100:50", "wall_s", "s", 1.515, 1.685, 1.252, 1.35),
    Row(LLAMA, "fixed:1000:1024:128", "total_tok_s", "total tok/s", 48488, None, 73600, 62000, True, "fp8"),
    Row(LLAMA, "mix", "out_tok_s", "out tok/s", 12085, None, 18800, 15500, True, "fp8"),
    Row(LLAMA, "latency:1:128:256", "step_ms", "ms a step", 3.507, None, 1.78, 2.2, False, "fp8"),
    Row(LLAMA, "latency:32:128:256", "step_ms", "ms a step", 4.574, None, 2.02, 2.7, False, "fp8"),
    Row(LLAMA, "latency:256:128:256", "step_ms", "ms a step", 9.170, None, 4.68, 6.0, False, "fp8"),
    Row(MOE, "mix", "out_tok_s", "out tok/s", 5590, 6010, 7830, 6900, True),
    Row(MOE, "latency:1:128:256", "step_ms", "ms a step", 4.159, 4.100, 1.44, 2.3),
    Row(MOE, "latency:256:128:256", "step_ms", "ms a step", 22.04, 21.95, 15.8, 18.0),
]


def main(paths: list[str]) -> int:
    """Print the table; the last result of each kind counts."""
    results: dict[tuple[str, str, str], dict[str, float]] = {}
    for path in paths:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            results[record["model"], record["workload"], record.get("label", "")] = record
    print("| model | work | Quire | vLLM | SGLang | ratio to the better | limit | share of it | aim |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        record = results.get((row.model, row.workload, row.label))
        if record is None or row.key not in record:
            continue
        ours = record[row.key]
        peers = [value for value in (row.vllm, row.sglang) if value is not None]
        best = max(peers) if row.higher else min(peers)
        ratio = ours / best if row.higher else best / ours
        share = "" if row.limit is None else f"{ours / row.limit if row.higher else row.limit / ours:.0%}"
        name = f"{row.model} {row.label}".strip()
        cells = [_figure(value) for value in (row.vllm, row.sglang)]
        met = "met" if (ours >= row.aim if row.higher else ours <= row.aim) else ""
        print(
            f"| {name} | `{row.workload}`, {row.unit} | **{_figure(ours)}** | {cells[0]} | {cells[1]} | {ratio:.2f}x "
            f"| {_figure(row.limit)} | {share} | {_figure(row.aim)} {met} |"
        )
    return 0


def _figure(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
