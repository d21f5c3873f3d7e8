"""`python -m bench NAME`: the developers' benchmarks, end to end on the demo model."""

import json

import pytest
from bench.__main__ import BENCHMARKS, main

ENGINE = ["--kv-cache-memory-bytes", "64M", "--max-model-len", "1024", "--max-num-seqs", "16", "--disable-log-stats"]


def run_json(tmp_path, name: str, *flags: str, engine: list[str] = ENGINE) -> dict:
    """A benchmark's JSON."""
    report = tmp_path / "report.json"
    assert main([name, *flags, *engine, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["benchmark"] == name
    return figures


def test_without_a_name_all_are_listed(capsys):
    assert main([]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told and about in told for name, about in BENCHMARKS.items())
    assert main(["nothing"]) == 2


def test_a_step_moves_at_least_the_weights(tmp_path):
    figures = run_json(tmp_path, "step", "--batch-sizes", "1", "3", "--input-len", "16", "--num-steps", "8")
    one, three = figures["rows"]
    assert (one["batch"], three["batch"]) == (1, 3) and three["num_steps"] >= 4
    assert 10 < one["mb"] < three["mb"] < 40  # the demo model's weights are about 15 MB
    assert three["gflop"] == pytest.approx(3 * one["gflop"])
    assert one["device_ms"] <= one["step_ms"] and one["read_bandwidth_gb_per_second"] > 0


def test_demo_tells_accuracy_by_task(tmp_path, capsys):
    figures = run_json(tmp_path, "demo", "--tasks", "copying", "json", "--num-examples", "6", "--no-progress")
    assert set(figures["tasks"]) == {"copying", "json"}
    assert figures["accuracy"] >= 0.75, "the demo model copies and extracts reliably; something spoils its numbers"
    assert "copying" in capsys.readouterr().out


def test_demo_refuses_a_task_that_there_is_not(capsys):
    assert main(["demo", "--tasks", "juggling"]) == 2
    assert "juggling" in capsys.readouterr().err


def test_long_answers_are_made_in_one_go_and_in_pieces(tmp_path, capsys):
    sizes = ["--tokens", "400", "--width", "40", "--entries", "3", "--rounds", "1"]
    results = run_json(tmp_path, "answers", *sizes, engine=[])["results"]
    assert [each["way"] for each in results] == ["in one go", "in pieces"] * 3
    for whole, pieces in zip(results[::2], results[1::2], strict=True):
        assert whole["answer"] == pieces["answer"] and whole["megabytes"] == pieces["megabytes"] > 0
    assert "longest, ms" in capsys.readouterr().out


def test_forms_are_compared_with_free_answers(tmp_path, capsys):
    sizes = ["--batch-sizes", "1", "3", "--input-len", "6", "--output-len", "8", "--rounds", "2"]
    results = run_json(tmp_path, "forms", *sizes)["results"]
    assert [(each["batch_size"], each["form"]) for each in results] == [
        (size, form)
        for size in (1, 3)
        for form in ("compact", "any whitespace", "compact, maxLength", "any whitespace, maxLength")
    ]
    for each in results:
        assert len(each["ratios"]) == 2 and min(each["ratios"]) <= each["ratio"] <= max(each["ratios"])
    assert "ms a token" in capsys.readouterr().out


def test_the_client_alone_is_measured(tmp_path):
    report = tmp_path / "figures.json"
    command = ["client", "--num-streams", "9", "--output-len", "7", "--json", str(report)]
    assert main(command) == 0
    figures = json.loads(report.read_text())
    assert figures["failed"] == 0 and figures["tokens_per_client_cpu_second"] > 0
    assert figures["output_throughput"] == pytest.approx(63 / figures["duration"])
