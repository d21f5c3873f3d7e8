import argparse
import json
from pathlib import Path

from quire.benchmarks import scheduler as bench


def test_the_benchmark_measures_every_case_and_writes_json(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    path = tmp_path / "result.json"
    options = ["--num-running", "4", "8", "--waiting", "20", "--context", "200", "--steps", "5", "--json", str(path)]
    assert bench.run_command(parser.parse_args(options)) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [row["running"] for row in result["rows"]] == [4] * 4 + [8] * 4
    assert all(row["us_per_request_step"] > 0 for row in result["rows"])
    assert len(bench.format_table(result).splitlines()) == 9


def test_only_decode_steps_are_measured() -> None:
    scheduler = bench._build(4, 64, 100)
    pending: list[object] = []
    for index in range(4):
        scheduler.add_request(bench._request(index, list(range(64)), 50))
    counts = [bench._step(scheduler, pending, depth=1)[2] for _ in range(6)]  # type: ignore[arg-type]
    assert counts[0] > 4 and counts[2:] == [4] * 4
