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
