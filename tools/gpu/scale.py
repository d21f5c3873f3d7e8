"""Two GPUs beside one: TP, PP and DP of an 8B shape, EP of a 30B-A3B shape, dummy weights; tokens of tiny models first.

    PYTHONPATH=src python3 tools/gpu/scale.py [--shared] [--device cpu --only-tiny]

With `--shared`: experts that two copies share, prompts and contexts that two ranks share.
Prints a table last; writes $OUT/scale.json after each part. Each part has a process of its own; `SCALE_SECONDS` bounds all.
"""

import argparse
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "/tmp"))
DEADLINE = time.monotonic() + float(os.environ.get("SCALE_SECONDS", "225"))
MODELS = Path(os.environ.get("SCALE_MODELS", ".bench/models"))
DENSE, SPARSE = os.environ.get("SCALE_DENSE", "llama-3.1-8b"), os.environ.get("SCALE_SPARSE", "qwen3-30b-a3b")
TOKENS_IN, TOKENS_OUT, ROWS = 128, 128, 256
BATCHES = (1, ROWS, 2 * ROWS)
"""The largest one fills two copies; one copy computes it in two turns."""
COMMON = {
    "hidden_act": "silu", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "vocab_size": 4099, "tie_word_embeddings": False, "torch_dtype": "float32",
    "bos_token_id": 0, "eos_token_id": 1, "intermediate_size": 512, "rope_theta": 10000.0,
}  # fmt: skip
TINY: dict[str, dict[str, Any]] = {
    "dense": COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5},
    "sparse": COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "head_dim": 32, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "latent": COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 8, "q_lora_rank": 64,
        "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-6, "moe_layer_freq": 1,
    },
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "one": {},
    "TP=2": {"tensor_parallel_size": 2},
    "PP=2": {"pipeline_parallel_size": 2},
    "DP=2": {"data_parallel_size": 2},
    "EP=2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "DP+EP": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "PCP=2": {"prefill_context_parallel_size": 2},
    "DCP=2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
}
PARTS = [
    *(("dense", way) for way in ("one", "TP=2", "PP=2", "DP=2")),
    *(("sparse", way) for way in ("one", "EP=2")),
]
SHARED = [
    ("sparse", "one"),
    ("sparse", "DP+EP"),
    ("dense", "one"),
    ("dense", "PCP=2"),
    ("latent", "one"),
    ("latent", "DCP=2"),
]
LONG = 16384
"""Tokens of a prompt whose first token is waited for, with `--shared`."""
MOST_SECONDS = {"dense": 36, "sparse": 46}


def prompts(count: int, length: int, vocabulary: int) -> list[dict[str, list[int]]]:
    rng = random.Random(count)
    return [{"prompt_token_ids": rng.choices(range(10, vocabulary), k=length)} for _ in range(count)]


def report(**figures: Any) -> None:
    """One line of JSON for the process that started this part."""
    os.write(1, ("REPORT " + json.dumps(figures) + "\n").encode())


def make_llm(model: str, way: str, device: str, **settings: Any) -> Any:
    from quire import LLM

    fixed = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False, "device": device}
    return LLM(model=model, **fixed, **WAYS[way], **settings)


def tiny(kind: str, way: str, device: str) -> None:
    """Greedy and seeded tokens of a small float32 model."""
    from quire import SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY[kind]))
        lots = [prompts(1, length, 4000)[0] for length in (3, 50, 200, 17, 300, 64, 100, 1)]
        common: dict[str, Any] = {"max_tokens": 32, "ignore_eos": True, "detokenize": False}
        began = time.perf_counter()
        sizes = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512}
        llm = make_llm(folder, way, device, dtype="float32", kv_cache_memory_bytes=1 << 28, **sizes)
        started = time.perf_counter() - began
        runs = [
            llm.generate(lots, SamplingParams(**drawn, **common), use_tqdm=False)
            for drawn in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3})
        ]
        tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in runs]
        report(start_s=round(started, 2), tokens=tokens)
        llm.shutdown()


def large(kind: str, way: str, device: str) -> None:
    """Seconds of batches, and what a decode step of one takes."""
    from quire import SamplingParams

    began = time.perf_counter()
    model = str(MODELS / (DENSE if kind == "dense" else SPARSE))
    sizes = {"max_model_len": 1024, "max_num_seqs": ROWS, "max_num_batched_tokens": 8192}
    llm = make_llm(model, way, device, dtype="bfloat16", gpu_memory_utilization=0.9, **sizes)
    figures: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 2)}

    def run(batch: int, out: int) -> float:
        params = SamplingParams(temperature=0.6, seed=1, max_tokens=out, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(prompts(batch, TOKENS_IN, 100000), params, use_tqdm=False)
        return time.perf_counter() - began

    for batch in BATCHES:
        run(batch, 8)
        rounds = 2 if batch == 1 else 1
        first = min(run(batch, 1) for _ in range(rounds))
        whole = min(run(batch, TOKENS_OUT) for _ in range(rounds))
        figures[f"batch {batch}"] = {
            "tokens_per_s": round(batch * TOKENS_OUT / whole, 1), "first_ms": round(first * 1e3, 1),
            "step_ms": round((whole - first) / (TOKENS_OUT - 1) * 1e3, 3),
        }  # fmt: skip
        report(**figures)
    llm.shutdown()


def long_prompt(kind: str, way: str, device: str) -> None:
    """Milliseconds to the first token behind a long prompt."""
    from quire import SamplingParams

    began = time.perf_counter()
    sizes = {"max_model_len": LONG + 64, "max_num_seqs": 16, "max_num_batched_tokens": LONG // 2}
    llm = make_llm(str(MODELS / DENSE), way, device, dtype="bfloat16", gpu_memory_utilization=0.8, **sizes)
    figures: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 2)}
    params, times = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False), list[float]()
    for prompt in prompts(4, LONG, 100000):
        began = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        times.append(time.perf_counter() - began)
    report(**figures, long_first_ms=round(min(times[1:]) * 1e3, 1))
    llm.shutdown()


# --- all of them ---


def run_part(size: str, kind: str, way: str, device: str) -> dict[str, Any]:
    """A part in a session of its own, which is killed whole at its limit; the last of what it reported."""
    left = min(30 if size == "tiny" else MOST_SECONDS[kind], DEADLINE - time.monotonic())
    if left < 6:
        return {"error": "no time was left"}
    log = OUT / f"scale-{size}-{kind}-{way.replace('=', '')}.txt"
    arguments = [sys.executable, __file__, "--part", size, kind, way, "--device", device]
    began = time.monotonic()
    with log.open("w") as output:
        environment = {**os.environ, "SCALE_STACKS": str(max(2.0, left - 3))}
        process = subprocess.Popen(arguments, stdout=output, stderr=output, start_new_session=True, env=environment)
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    lines = log.read_text(errors="replace").splitlines()
    reports = [line[7:] for line in lines if line.startswith("REPORT ")]
    figures: dict[str, Any] = json.loads(reports[-1]) if reports else {}
    if code:
        figures["error"] = f"exit code {code}"
        print("\n".join(line[:200] for line in lines[-45:] if not line.startswith("REPORT")), flush=True)
    seconds = time.monotonic() - began
    print(f"--- {size} {kind} {way}: code {code} after {seconds:.1f} s", flush=True)
    return figures


def measure(device: str, only_tiny: bool, is_shared: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"same_tokens": {}, "large": {}}
    parts = SHARED if is_shared else PARTS
    oracles: dict[str, Any] = {}
    for kind, way in parts:
        figures = run_part("tiny", kind, way, device)
        oracles.setdefault(kind, figures.get("tokens"))
        is_same = "tokens" in figures and figures["tokens"] == oracles[kind]
        found["same_tokens"][f"{kind} {way}"] = figures.get("error") or is_same
        save(found)
    for kind, way in () if only_tiny else parts:
        size = "long" if is_shared and kind == "dense" else "large"
        if kind != "latent":
            found["large"][f"{kind} {way}"] = run_part(size, kind, way, device)
        save(found)
    return found


def save(found: dict[str, Any]) -> None:
    settings = {"tokens_in": TOKENS_IN, "tokens_out": TOKENS_OUT, "rows": ROWS, "dense": DENSE, "sparse": SPARSE}
    document = {"benchmark": "scale", "settings": settings, **found}
    (OUT / "scale.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def print_table(found: dict[str, Any]) -> None:
    for name, answer in found["same_tokens"].items():
        print(f"tiny {name:12} tokens equal one GPU's: {answer}")
    print(
        f"{'':14}{'start s':>8}"
        + "".join(f"{f'batch {batch}: tok/s':>20}{'of one':>8}{'step ms':>9}" for batch in BATCHES)
    )
    for name, figures in found["large"].items():
        base = found["large"].get(f"{name.split()[0]} one", {})
        line = f"{name:14}{figures.get('start_s', '-'):>8}"
        for batch in BATCHES:
            row, one = figures.get(f"batch {batch}"), base.get(f"batch {batch}")
            if row is None:
                line += f"{'-':>20}{'-':>8}{'-':>9}"
                continue
            ratio = f"{row['tokens_per_s'] / one['tokens_per_s']:.2f}" if one else "-"
            line += f"{row['tokens_per_s']:>20}{ratio:>8}{row['step_ms']:>9}"
        if "long_first_ms" in figures:
            line += f"  first token of {LONG}: {figures['long_first_ms']} ms"
        print(line + ("  " + figures["error"] if "error" in figures else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only-tiny", action="store_true")
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--part", nargs=3)
    arguments = parser.parse_args()
    if arguments.part:
        faulthandler.dump_traceback_later(float(os.environ["SCALE_STACKS"]))
        size, kind, way = arguments.part
        try:
            {"tiny": tiny, "large": large, "long": long_prompt}[size](kind, way, arguments.device)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    found = measure(arguments.device, arguments.only_tiny, arguments.shared)
    print_table(found)
    return 0 if all(answer is True for answer in found["same_tokens"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
