"""What goes wrong on a real GPU, provoked: no memory in the middle of a step, an fp8 cache beside a plain one, profiles.

    python tools/gpu/trouble.py [--json PATH] [--only SECTION ...]

Takes about a minute on an H200. Prints a table; exits with 1 if anything failed. Shares its machinery with gpu_check.py.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from gpu_check import Report, engine, generate, logprobs_of, prompts_of, tokens_of, versions  # noqa: E402
from quire.benchmarks.tiny_models import make_tiny_model  # noqa: E402
from quire.engine.messages import Utility  # noqa: E402

LEFT_FREE = 48 << 20
"""Bytes: enough for small steps, too little for the logits of a large one."""


def check_memory(report: Report) -> None:
    """Somebody else takes the memory while requests run; then gives it back."""
    prompts = prompts_of((150,) * 12)
    params = {"temperature": 0.8, "seed": 5, "top_k": 20, "logprobs": 4}
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model("Qwen3ForCausalLM", Path(folder), vocab_size=150_000, intermediate_size=8192)
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": False,
        }
        with engine(path, **settings) as llm:
            expected = tokens_of(generate(llm, prompts, **params))
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            neighbour = torch.empty(max(free - LEFT_FREE, 0), dtype=torch.uint8, device="cuda")
            with report.timed("memory", "full: requests wait, none is lost") as line:
                outputs = generate(llm, prompts, **params)
                same = sum(a == b for a, b in zip(tokens_of(outputs), expected, strict=True))
                preempted = llm.llm_engine._client.call(Utility.STATS).num_preemptions
                line(same == len(prompts) and preempted > 0, f"{same} of {len(prompts)} equal, {preempted} preemptions")
            del neighbour
            torch.cuda.empty_cache()
            with report.timed("memory", "free again: the engine goes on") as line:
                same = sum(a == b for a, b in zip(tokens_of(generate(llm, prompts, **params)), expected, strict=True))
                line(same == len(prompts), f"{same} of {len(prompts)} equal")


def check_fp8_cache(report: Report) -> None:
    """A whole model with keys and values in fp8 beside the same with plain ones: teacher-forced by its own tokens."""
    prompts = prompts_of()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM"):
            with report.timed("fp8 cache", name) as line:
                path = make_tiny_model(name, Path(folder) / name)
                with engine(path, dtype="bfloat16", kv_cache_dtype="fp8") as llm:
                    outputs = generate(llm, prompts, logprobs=0)
                with engine(path, dtype="bfloat16") as llm:
                    whole = [prompt + list(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
                    plain = generate(llm, prompts, logprobs=0)
                    first = sum(a[:4] == b[:4] for a, b in zip(tokens_of(outputs), tokens_of(plain), strict=True))
                pairs = [
                    abs(a - b)
                    for ours, theirs in zip(outputs, plain, strict=True)
                    for a, b, same in zip(logprobs_of(ours), logprobs_of(theirs), agreeing(ours, theirs), strict=True)
                    if same
                ]
                mean = sum(pairs) / max(len(pairs), 1)
                line(
                    mean < 0.05 and first >= len(prompts) // 2,
                    f"logprobs off by {mean:.3f}, {first} of {len(whole)} begin alike",
                )


def agreeing(ours, theirs) -> list[bool]:
    """For each position whether all tokens up to it are the same."""
    flags, same = [], True
    for a, b in zip(ours.token_ids, theirs.token_ids, strict=True):
        same = same and a == b
        flags.append(same)
    return flags


def check_profiles(report: Report) -> None:
    """A profile of torch's profiler with the GPU's kernels in it, and NVTX ranges that disturb nothing."""
    prompts = prompts_of()
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model("Qwen3ForCausalLM", Path(folder))
        expected = None
        for kind in ("torch", "cuda"):
            traces = Path(folder) / kind
            profiler = {"profiler": kind, "torch_profiler_dir": str(traces)} if kind == "torch" else {"profiler": kind}
            with report.timed("profiles", kind) as line, engine(path, profiler_config=profiler) as llm:
                llm.start_profile()
                tokens = tokens_of(generate(llm, prompts))
                llm.stop_profile()
                expected = expected or tokens
                files = list(traces.rglob("*")) if traces.exists() else []
                has_kernels = kind == "cuda" or any(
                    b"kernel" in file.read_bytes()[:50_000_000] for file in files if file.is_file()
                )
                line(tokens == expected and has_kernels, f"{len(files)} files")


SECTIONS = {"memory": check_memory, "fp8": check_fp8_cache, "profiles": check_profiles}


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write the table as JSON too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="only these sections")
    args = parser.parse_args()
    report = Report()
    for name in args.only:
        try:
            SECTIONS[name](report)
        except Exception as error:
            traceback.print_exc()
            report.add(name, "section", False, f"{type(error).__name__}: {error}"[:160], 0.0)
    if args.json:
        record = {**versions(), "checks": [dataclasses.asdict(line) for line in report.lines]}
        Path(args.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 0 if all(line.passed for line in report.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
