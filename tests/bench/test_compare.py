"""What `python -m bench compare` asks of an engine's process, with an engine that says how long it takes."""

import json
import subprocess
import sys
from pathlib import Path

from bench import compare

ENGINE = """
import time
from types import SimpleNamespace as Of

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, dtype, max_model_len):
        assert (model, dtype, max_model_len) == ("m", "bfloat16", 64)

    def generate(self, prompts, params, use_tqdm):
        until = time.process_time() + 1e-3 * sum(each.max_tokens for each in params)
        while time.process_time() < until:
            pass
        return [Of(outputs=[Of(token_ids=[0] * each.max_tokens)]) for each in params]
"""
JOB = {"model": "m", "dtype": "bfloat16", "max_model_len": 64, "vocab_size": 100, "module": "slow_engine", "seed": 1}


def test_an_engines_process_answers_with_figures_of_the_clock_and_of_the_processor(tmp_path):
    (tmp_path / "slow_engine.py").write_text(ENGINE)
    jobs = [{**JOB, "path": str(tmp_path), "arguments": {}}]
    jobs += [{"workload": each} for each in ("decode:4:5", "prefill:8", "batch:2:1:3:2:4", "walk:1")]
    child = Path(compare.__file__).with_name("compare_child.py")
    done = subprocess.run(
        [sys.executable, str(child)], input="".join(json.dumps(job) + "\n" for job in jobs), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    ready, decode, prefill, batch, refused = (json.loads(line[1:]) for line in done.stdout.splitlines())
    assert ready == {"ready": True}
    assert set(decode) == {"ttft_ms", "ms_per_token", "cpu_ms_per_token"}
    assert all(figure > 0 for answer in (decode, prefill, batch) for figure in answer.values())
    assert set(prefill) == {"prompt_tokens_per_s", "cpu_ms_per_prompt_token"}
    assert set(batch) == {"output_tokens_per_s"}
    assert "workload 'walk:1'" in refused["error"]


def test_a_ratio_above_one_means_that_quire_was_better():
    samples = {
        "decode:1:2 cpu_ms_per_token": {"quire": [1.0, 2.0], "peer": [2.0, 6.0]},
        "prefill:8 prompt_tokens_per_s": {"quire": [30.0, 10.0], "peer": [10.0, 10.0]},
    }
    lower, higher = compare._summarise(samples, ["quire", "peer"])
    assert lower["times_better"] == {"peer": 2.5} and higher["times_better"] == {"peer": 2.0}
