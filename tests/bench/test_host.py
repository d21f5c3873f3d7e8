"""`python -m bench host`: the null executor answers as a device would, and every stage is found and counted."""

import json

import numpy as np
import pytest
from bench.__main__ import main

from bench import host
from quire import SamplingParams


def test_the_figures_cover_every_case_and_stage(tmp_path, capsys):
    report = tmp_path / "host.json"
    sizes = ["--batch-sizes", "1", "3", "--input-lens", "20", "--output-len", "24", "--runs", "1"]
    assert main(["host", *sizes, "--json", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert figures["benchmark"] == "host"
    assert [(row["batch"], row["prompt_len"]) for row in figures["rows"]] == [(1, 20), (3, 20)]
    for row in figures["rows"]:
        assert set(row["stages_us"]) == set(host.STAGES)
        assert all(value > 0 for value in row["stages_us"].values())
        assert 0 < row["step_us"]["median"] <= row["step_us"]["p99"]
        assert min(row["first_us"], row["last_us"], row["alone_us"]) > 0
    assert "output processor" in capsys.readouterr().out
    assert str(tmp_path) not in report.read_text()


@pytest.mark.parametrize("num_requests", [1, 5])
def test_a_run_over_the_null_executor_has_two_steps_in_flight_and_gives_every_token(num_requests):
    llm, executor = host.build_llm(None, max_num_seqs=8, max_num_batched_tokens=64)
    in_flight: list[int] = []
    collect = executor.collect
    executor.collect = lambda: (in_flight.append(len(executor._in_flight)), collect())[1]
    prompts = [{"prompt_token_ids": [20 + number] * 30} for number in range(num_requests)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    llm.shutdown()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * num_requests
    assert max(in_flight) == 2
    assert sum(executor.num_new) == num_requests and len(executor.outside) == len(in_flight)


def test_the_tokenizer_has_a_large_vocabulary_and_text_for_every_token(tmp_path):
    from quire.tokenizers.loader import get_tokenizer

    tokenizer = get_tokenizer(str(host.write_tokenizer(tmp_path)))
    assert len(tokenizer) == host.VOCAB_SIZE
    drawn = np.random.default_rng(0).integers(0, host.VOCAB_SIZE, 64).tolist()
    assert tokenizer.token_bytes is not None
    assert all(tokenizer.token_bytes.of(token) for token in drawn)
