"""`python -m bench chaos`: what does not need a server."""

from pathlib import Path

import pytest
from bench.poison import POISON

from bench import chaos
from quire.benchmarks.chaos import Row
from quire.faults import POINTS


def test_every_point_of_the_table_is_a_point() -> None:
    assert {*chaos.STEP_POINTS, *chaos.OTHER_POINTS} < {*POINTS}
    assert len(POISON) > 1


def test_the_document_has_a_place_for_the_table() -> None:
    text = chaos.DOCUMENT.read_text(encoding="utf-8")
    assert text.count(chaos.BEGIN) == text.count(chaos.END) == 1
    assert text.index(chaos.BEGIN) < text.index(chaos.END)


def test_the_table_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = tmp_path / "reliability.md"
    document.write_text(f"before\n{chaos.BEGIN}\nold\n{chaos.END}\nafter\n")
    monkeypatch.setattr(chaos, "DOCUMENT", document)
    monkeypatch.setattr(chaos, "RESULTS", tmp_path / "chaos.json")
    end = chaos.Leftovers("one device", 0.1, 0, [], [])
    for _ in range(2):
        chaos._write([Row("a death", 64)], [end], {"rows": []})
    text = document.read_text()
    assert text.startswith(f"before\n{chaos.BEGIN}\n| fault |") and text.endswith(f"{chaos.END}\nafter\n")
    assert text.count("a death") == 1 and "old" not in text and "left: 0 processes" in text


def test_a_server_that_leaves_something_behind_is_not_good() -> None:
    assert chaos.Leftovers("one device", 0.1, 0, [], []).is_good
    assert not chaos.Leftovers("one device", 1.1, 0, [], []).is_good
    assert not chaos.Leftovers("one device", 0.1, 1, [], []).is_good
    assert not chaos.Leftovers("one device", 0.1, 0, [], ["psm"]).is_good


def test_the_table_has_a_line_for_each_fault() -> None:
    lines = chaos.markdown([Row("a", 64, ready_s=1.5, longest_pause_s=2.0), Row("b", 3, 1)]).splitlines()
    assert lines[0] == f"| {' | '.join(chaos.COLUMNS)} |"
    assert lines[2:] == ["| a | 64 | 0 | 0 | 0 | 2.00 s | 1.50 s |", "| b | 3 | 1 | 0 | 0 | 0.00 s | - |"]
