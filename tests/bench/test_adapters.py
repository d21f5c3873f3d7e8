"""The benchmark of many adapters answers every request on both sides, with the adapters that were drawn."""

import json
from pathlib import Path

from bench.__main__ import main


def test_many_adapters_stand_beside_the_base(tmp_path: Path):
    report = tmp_path / "report.json"
    sizes = [
        "--adapters",
        "6",
        "--requests",
        "8",
        "--rounds",
        "1",
        "--rate",
        "200",
        "--max-loras",
        "2",
        "--max-cpu-loras",
        "3",
    ]
    assert main(["adapters", *sizes, "--input-len", "4", "--output-len", "2", "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    (base,), (adapters,) = figures["base"], figures["adapters"]
    assert base["distinct_adapters"] == 0 < 2 < adapters["distinct_adapters"] <= 6
    for side in (base, adapters):
        assert side["requests_per_second"] > 0 and 0 < side["ttft_ms"]["p50"] <= side["ttft_ms"]["p99"]
