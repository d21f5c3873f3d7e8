"""Whole engines on this GPU beside Transformers in float32, for every model type that the CPU's tests run.

    python tools/gpu/model_types.py [--json PATH] [--processes 3] [--seconds 300] [TYPE ...]

Tiny random checkpoints, greedy, three times over (sizes of steps run, are captured, are replayed): the tokens' logprobs beside
those of Transformers on the CPU, in float32, and in bfloat16 with the same rounded weights. Prints a table, those that differ
last; exits with 1 if any does. With `--device cpu` the same without a GPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("QUIRE_LOGGING_LEVEL", "ERROR")

NEWEST = (
    *(
        "gemma4_text",
        "gemma4_unified_text",
        "deepseek_v4",
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "minimax",
        "olmo_hybrid",
    ),
    *("kimi_linear", "lfm2_moe", "lfm3", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "granitemoehybrid", "jamba"),
    *("bailing_hybrid", "hy_v4", "jetmoe", "diffllama", "rwkv", "codegen", "gpt_neo", "gpt_neox_japanese"),
    *("recurrent_gemma", "deepseek_v32", "minimax_m2", "mimo_v2_flash", "laguna", "flint", "nemotron_h", "zamba2"),
    *("falcon_h1", "bamba", "mamba", "mamba2", "falcon_mamba", "qwen3_next", "gpt_oss", "llama4_text", "granite_swa"),
    *("gemma3n_text", "bert", "bitnet", "modernbert-decoder"),
)
"""Checked first."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.4}
"""Of float32's largest difference; of bfloat16's mean, where a token may take another expert than with float32's activations."""
TIE = 1e-4
NEW_TOKENS = 16
TURNS = 3


def check(model_type: str, device: str) -> dict[str, Any]:
    """How far one type's tokens and logprobs are from Transformers', in both precisions."""
    import torch
    from tests.models.causal_types import make_model
    from tests.models.test_drawn_configs import make_prompts
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        oracle = make_model(model_type, ARCHITECTURES[model_type], Path(folder))
        prompts = make_prompts(random.Random(1), oracle.config.get_text_config().vocab_size)
        for dtype in ("float32", "bfloat16"):
            began = time.perf_counter()
            if dtype == "bfloat16":
                oracle = oracle.to(torch.bfloat16).float()
            try:
                turns = run(folder, prompts, device, dtype)
                found[dtype] = {**compare(oracle, prompts, turns), "s": round(time.perf_counter() - began, 1)}
            except Exception as error:
                found[dtype] = {"error": f"{type(error).__name__}: {error}"[:1500]}
    return found


def run(folder: str, prompts: list[list[int]], device: str, dtype: str) -> list[list[tuple[list[int], list[float]]]]:
    """By turn and prompt: tokens, and their logprobs."""
    from quire import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    settings: dict[str, Any] = {"max_model_len": 200, "num_gpu_blocks_override": 200, "max_num_seqs": 8}
    settings |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    turns = []
    with LLM(folder, dtype=dtype, device=device, **settings) as llm:
        for _ in range(TURNS):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
            done = [output.outputs[0] for output in outputs]
            turns.append(
                [
                    (
                        list(one.token_ids),
                        [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)],
                    )
                    for one in done
                ]
            )
    return turns


def compare(oracle: Any, prompts: list[list[int]], turns: Any) -> dict[str, Any]:
    """The largest and the mean difference of logprobs, tokens that Transformers would not choose, requests that another turn
    answers otherwise."""
    import torch

    known: dict[tuple[int, ...], Any] = {}
    off: list[float] = []
    wrong = 0
    for turn in turns:
        for prompt, (tokens, logprobs) in zip(prompts, turn, strict=True):
            key = (*prompt, *tokens)
            if key not in known:
                known[key] = oracle(torch.tensor([key]), use_cache=False).logits[0].float().log_softmax(-1)
            rows = known[key][-len(tokens) - 1 : -1]
            expected = rows[range(len(tokens)), tokens]
            off += (torch.tensor(logprobs) - expected).abs().tolist()
            wrong += int((rows.amax(1) - expected > TIE).sum())
    changed = sum(one[0] != turns[0][at][0] for turn in turns[1:] for at, one in enumerate(turn))
    finite = all(value == value for value in off)
    return {"most": max(off) if finite else None, "mean": sum(off) / len(off), "other": wrong, "changed": changed}


def passes(dtype: str, figures: dict[str, Any]) -> bool:
    """Whether they are near enough."""
    if figures.get("error") or figures.get("most") is None:
        return False
    if dtype == "float32":
        return figures["most"] <= TOLERANCE[dtype] and not figures["other"]
    return figures["mean"] <= TOLERANCE[dtype]


class Runs:
    """Types checked by processes of their own, one process a type."""

    def __init__(self, types: list[str], device: str, seconds: float) -> None:
        self._left, self._device = types, device
        self._end, self._lock = time.monotonic() + seconds, threading.Lock()
        self.found: dict[str, dict[str, Any]] = {}

    def work(self) -> None:
        while True:
            with self._lock:
                if not self._left or time.monotonic() > self._end:
                    return
                model_type = self._left.pop(0)
            command = [sys.executable, __file__, "--one", model_type, "--device", self._device]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=150)
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                figures = json.loads(lines[-1]) if lines else {"float32": {"error": done.stderr[-800:]}}
            except subprocess.TimeoutExpired:
                figures = {"float32": {"error": "no answer after 150 s"}}
            with self._lock:
                self.found[model_type] = figures
            print(table_line(model_type, figures), flush=True)


def table_line(model_type: str, figures: dict[str, Any]) -> str:
    parts = [f"{'ok  ' if all(passes(*item) for item in figures.items()) else 'DIFF'} {model_type:20}"]
    for dtype, one in figures.items():
        if "error" in one:
            parts.append(f"{dtype}: {one['error'].strip().splitlines()[-1][:230]}")
        else:
            most = "nan" if one["most"] is None else f"{one['most']:.1e}"
            parts.append(
                f"{dtype} {most} mean {one['mean']:.1e} other {one['other']} changed {one['changed']}; {one['s']} s"
            )
    return " | ".join(parts)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="of a config.json (all that run, the newest first)")
    parser.add_argument("--json", type=Path, help="write the table as JSON too")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no further type after this")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(check(args.one, args.device)))
        return 0
    from tests.models.causal_types import TYPES

    runnable = [name for name, each in TYPES.items() if each.how != "refused"]
    types = args.types or [*(n for n in NEWEST if n in runnable), *(n for n in runnable if n not in NEWEST)]
    runs = Runs(list(types), args.device, args.seconds)
    threads = [threading.Thread(target=runs.work) for _ in range(args.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    differ = {name: one for name, one in runs.found.items() if not all(passes(*item) for item in one.items())}
    print(f"{len(runs.found)} of {len(types)} types checked, {len(differ)} differ")
    for name, figures in differ.items():
        print(table_line(name, figures))
    if args.json:
        args.json.write_text(json.dumps({"device": args.device, "types": runs.found}, indent=1) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
