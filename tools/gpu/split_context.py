"""Decode context parallelism on two GPUs: the tokens of one GPU, how many tokens fit, and what a step costs.

Every engine has a process of its own. Prints a table last and writes $OUT/split_context.json; about two minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "/tmp"))
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 1,
    "head_dim": 128, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 4099,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ENGINES = {
    "one GPU": {},
    "tp 2": {"tensor_parallel_size": 2},
    "tp 2, dcp 2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}


def measure(dtype: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Tokens of prompts of many lengths, twice (the second time behind cached pages), pages, and milliseconds a step."""
    from quire import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | {"torch_dtype": dtype}))
        settings: dict[str, Any] = {
            "dtype": dtype, "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 40000,
            "kv_cache_memory_bytes": 1 << 31, "max_num_batched_tokens": 2048, "disable_log_stats": True,
        }  # fmt: skip
        with LLM(folder, **sizes, **settings) as llm:
            given: list[Any] = [
                {"prompt_token_ids": [5 + (7 * i * i + n) % 4000 for i in range(n)]} for n in (1, 17, 300, 3000)
            ]
            greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
            both = [
                [list(each.outputs[0].token_ids) for each in llm.generate(given, greedy, use_tqdm=False)]
                for _ in range(2)
            ]
            cache = llm.llm_engine.config.cache
            found: dict[str, Any] = {"tokens": both, "kv_tokens": cache.num_gpu_blocks * cache.block_size}
            for context in (1000, 32000):
                prompt: Any = [{"prompt_token_ids": [5 + (11 * i) % 4000 for i in range(context)]}]
                times: list[float] = []
                for count in (8, 72, 8, 72):
                    drawn = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
                    begin = time.perf_counter()
                    llm.generate(prompt, drawn, use_tqdm=False)
                    times.append(time.perf_counter() - begin)
                found[f"step_ms_{context}"] = round((times[3] - times[2]) * 1000 / 64, 3)
            return found


def main() -> int:
    report: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for name, sizes in ENGINES.items():
            line = [sys.executable, __file__, dtype, json.dumps(sizes)]
            child = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
            answer = child.stdout.rpartition("REPORT ")[2] if "REPORT " in child.stdout else "{}"
            report[f"{dtype}, {name}"] = found = json.loads(answer) or {"failed": child.stderr[-2000:]}
            found["same"] = found.get("tokens") == report[f"{dtype}, one GPU"].get("tokens")
    (OUT / "split_context.json").write_text(json.dumps(report, indent=1))
    for name, found in report.items():
        steps = [found.get(f"step_ms_{context}") for context in (1000, 32000)]
        print(
            f"{name:24} same {found['same']!s:6} step ms {steps} fits {found.get('kv_tokens')} tokens {found.get('failed', '')}"
        )
    return 0 if all(found["same"] for name, found in report.items() if "float32" in name) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("REPORT " + json.dumps(measure(sys.argv[1], json.loads(sys.argv[2])), default=str))
    else:
        sys.exit(main())
