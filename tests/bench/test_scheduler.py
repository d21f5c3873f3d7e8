import json
from pathlib import Path

import pytest
from bench.__main__ import main

from bench import scheduler as bench


@pytest.fixture
def no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark collects garbage before each case: here it would look through all that other tests have loaded."""
    monkeypatch.setattr(bench.gc, "collect", lambda: 0)


@pytest.mark.parametrize("to_file", [True, False])
def test_the_benchmark_measures_every_case_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to_file: bool, no_garbage: None
) -> None:
    path = tmp_path / "new" / "result.json"
    options = ["--num-running", "4", "8", "--waiting", "20", "--context", "200", "--steps", "5"]
    assert main(["scheduler", *options, "--json", str(path) if to_file else "-"]) == 0
    told = capsys.readouterr()
    result = json.loads(path.read_text(encoding="utf-8") if to_file else told.out)
    assert result["benchmark"] == "scheduler" and result["steps"] == 5 and result["machine"]["cores"] > 0
    assert [row["running"] for row in result["rows"]] == [4] * 4 + [8] * 4
    assert all(row["us_per_request_step"] > 0 for row in result["rows"])
    table = (told.out if to_file else told.err).strip().splitlines()
    assert [line.split("  ")[0] for line in table[3:]] == [row["case"] for row in result["rows"]]


def test_only_decode_steps_are_measured() -> None:
    scheduler = bench._build(4, 64, 100)
    pending: list[object] = []
    for index in range(4):
        scheduler.add_request(bench._request(index, list(range(64)), 50))
    counts = [bench._step(scheduler, pending, depth=1)[2] for _ in range(6)]  # type: ignore[arg-type]
    assert counts[0] > 4 and counts[2:] == [4] * 4
