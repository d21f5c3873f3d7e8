"""The offline benchmarks and `quire generate`, end to end on the demo model, with as little work as tells right from wrong."""

import gzip
import json
import re
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main

ENGINE = ["--kv-cache-memory-bytes", "64M", "--max-model-len", "1024", "--max-num-seqs", "16", "--disable-log-stats"]


def run_json(tmp_path, *command: str) -> dict:
    """A benchmark's JSON."""
    report = tmp_path / "report.json"
    assert main(["bench", *command, *ENGINE, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["benchmark"] == command[0]
    return figures


def test_throughput_counts_every_token(tmp_path, capsys):
    sizes = ["--num-prompts", "4", "--input-len", "12", "--output-len", "5", "--n", "2", "--no-progress"]
    figures = run_json(tmp_path, "throughput", *sizes)
    assert figures["input_tokens"] == 48 and figures["output_tokens"] == 40
    assert figures["output_tokens_per_second"] == pytest.approx(40 / figures["seconds"])
    assert figures["tokens_per_second"] == pytest.approx(88 / figures["elapsed_time"])
    told = capsys.readouterr().out
    assert "output tokens per second" in told
    assert re.search(r"^Throughput: [\d.]+ requests/s, [\d.]+ total tokens/s, [\d.]+ output tokens/s$", told, re.M)


def test_throughput_takes_texts_and_conversations_of_a_file(tmp_path):
    path = tmp_path / "own.jsonl"
    lines = [{"prompt": "one two three", "output_tokens": 3}]
    path.write_text(json.dumps(lines[0]))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--custom-output-len", "-1", "--no-progress"]
    figures = run_json(tmp_path, "throughput", *flags, "--num-prompts", "3")
    assert figures["num_requests"] == 3 and figures["output_tokens"] == 9
    lines.append({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "output_tokens": 4})
    path.write_text("\n".join(map(json.dumps, lines)))
    chat = run_json(tmp_path, "throughput", *flags, "--num-prompts", "2")
    assert chat["output_tokens"] == 7 and chat["input_tokens"] > figures["input_tokens"] / 3 * 2
    path.write_text("\n".join(map(json.dumps, [*lines, {"prompt": [20, 21], "output_tokens": 1}])))
    assert main(["bench", "throughput", *flags, "--num-prompts", "3", *ENGINE]) == 2


def test_latency_takes_first_and_further_steps_apart(tmp_path, capsys):
    sizes = [
        "--batch-size",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "1",
    ]
    figures = run_json(tmp_path, "latency", *sizes)
    told = capsys.readouterr().out
    assert f"Avg latency: {figures['avg_latency']} seconds" in told and "\n90% percentile latency: " in told
    assert 0 < figures["first_token_seconds"]["min"] <= figures["batch_seconds"]["max"]
    assert len(figures["latencies"]) == 2 and figures["avg_latency"] == figures["batch_seconds"]["mean"]
    assert "further step, ms" in told


def test_latency_profiles_one_batch(tmp_path, capsys):
    sizes = ["--batch-size", "1", "--output-len", "2", "--num-iters-warmup", "0", "--profile"]
    assert main(["bench", "latency", *sizes, *ENGINE]) == 2
    assert "--profiler-config" in capsys.readouterr().err
    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")})
    files = run_json(tmp_path, "latency", *sizes, "--profiler-config", profiler)["files"]
    assert files and all(b"traceEvents" in gzip.decompress(Path(file).read_bytes()) for file in files)


@pytest.mark.exhaustive
def test_startup_measures_fresh_processes(tmp_path):
    figures = run_json(tmp_path, "startup", "--num-iters", "1", "--num-iters-warmup", "0")
    assert 0 < figures["import"]["p50"] < figures["total"]["p50"]


def test_generate_answers_in_the_order_of_the_file_and_replaces_no_file_unasked(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "id": "sum"}
    source.write_text("\n".join(['"one two three"', json.dumps(question), '{"prompt_token_ids": [20, 21]}']))
    flags = ["--temperature", "0", "--max-tokens", "24", "--no-progress"]
    assert main(["generate", "-i", str(source), "-o", str(target), *flags, *ENGINE]) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["id"] for row in rows] == [0, "sum", 2]
    assert "42" in rows[1]["outputs"][0]["text"] and len(rows[2]["outputs"][0]["token_ids"]) <= 24
    assert "each text is taken as a user's message" in capsys.readouterr().err
    assert main(["generate", "-i", str(source), "-o", str(target), *flags, *ENGINE]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows


def test_first_use_sends_every_feature_twice_to_a_fresh_server(tmp_path, capsys):
    sizes = ["--num-streams", "2", "--output-len", "4", "--long-input-len", "100", "--stream-len", "64"]
    figures = run_json(
        tmp_path, "first-use", *sizes, "--orders", "in-turn", "--features", "greedy", "top_p", "json", "n"
    )
    (run,) = figures["runs"]
    rows = {row["feature"]: row for row in run["features"]}
    assert set(rows) >= {"greedy", "top_p", "json", "json, sampled", "n", "n, sampled"}
    assert "temperature=0" in rows["n"]["refused"]
    for name in ("greedy", "top_p", "json", "n, sampled"):
        for use in ("first", "second"):
            assert not rows[name][use]["error"] and rows[name][use]["first_ms"] > 0 and rows[name][use]["gap_ms"] > 0
            assert rows[name][use]["gap_at_s"] > run["undisturbed_gap_at_s"]
    assert figures["longest_gap_ms"] == run["longest_gap_ms"] >= rows["json"]["first"]["gap_ms"]
    assert run["ready_s"] > 0 and run["streams_first_token_ms"] > 0
    assert "others' gap, ms" in capsys.readouterr().out


def test_first_use_fails_where_a_gap_is_longer_than_is_allowed(tmp_path):
    flags = ["--orders", "at-once", "--features", "greedy", "--num-streams", "1", "--max-gap-ms", "0.001", *ENGINE]
    assert main(["bench", "first-use", *flags]) == 1


def test_first_use_of_a_model_that_pools_measures_beside_pooling_requests(tmp_path):
    flags = ["--runner", "pooling", "--orders", "at-once", "--features", "embed", "classify", "--long-input-len", "60"]
    (run,) = run_json(tmp_path, "first-use", *flags, "--num-streams", "1")["runs"]
    rows = {row["feature"]: row for row in run["features"]}
    assert not rows["embed"]["second"]["error"] and rows["embed"]["first"]["gap_at_s"] > 0
    assert "refused" in rows["classify"]


def test_lora_compares_steps_with_adapters_with_the_bases_in_pairs(tmp_path, capsys):
    sizes = ["--batch-sizes", "1", "2", "--adapters", "1", "2", "--ranks", "4", "--num-iters", "2"]
    figures = run_json(tmp_path, "lora", *sizes, "--input-len", "4", "--output-len", "4")
    assert [(row["batch_size"], row["adapters"]) for row in figures["rows"]] == [(1, 1), (2, 1), (2, 2)]
    assert all({"base_step_ms", "step_ms", "ratio"} <= set(row) for row in figures["rows"])
    assert "A step with adapters" in capsys.readouterr().out


def test_speculation_is_compared_with_none_on_the_same_requests(tmp_path, capsys):
    sizes = ["--batch-sizes", "1", "--input-len", "32", "--output-len", "12", "--rounds", "1"]
    (row,) = run_json(tmp_path, "speculate", *sizes)["sizes"]
    assert row["batch_size"] == 1 and row["equal_answers"] == row["answers"] == 2
    assert row["draft_tokens"] > 0 and len(row["ratios"]) == 1 and row["tokens_per_verification"] >= 1
    assert "guesses right" in capsys.readouterr().out
