"""What goes wrong on a real GPU, provoked: no memory in the middle of a step, an fp8 cache beside a plain one, profiles.

    python tools/gpu/trouble.py [--json PATH] [--only SECTION ...]

Takes about a minute on an H200. Prints a table; exits with 1 if anything failed. Shares its machinery with gpu_check.py.
"""

import argparse
import dataclasses
import gzip
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from tests.oracles.tiny_models import load_oracle, make_tiny_model  # noqa: E402

from gpu_check import (  # noqa: E402
    Report,
    engine,
    generate,
    logprobs_of,
    prompts_of,
    tokens_of,
    versions,
)

LEFT_FREE = 6 << 20
"""Bytes: enough for the small tensors of a small step, too little for one of the allocator's larger blocks."""
FP8_TOLERANCE = 5e-3
"""Of mean logprobs in float32: products of fp8 values are float16's."""


def check_memory(report: Report) -> None:
    """Somebody else takes the memory while requests run; then gives it back."""
    prompts = prompts_of((150,) * 12)
    # Logprobs before penalties: the step's logits are put aside, which takes memory in proportion to its requests.
    params = {"temperature": 0.8, "seed": 5, "top_k": 20, "logprobs": 4, "presence_penalty": 0.2}
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model("Qwen3ForCausalLM", Path(folder), vocab_size=150_000, intermediate_size=8192)
        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_num_batched_tokens": 4096,
            "enable_prefix_caching": False,
        }
        with engine(path, **settings) as llm:
            for count in range(1, len(prompts)):  # whatever a step of any size loads is there
                generate(llm, prompts[:count], **params)
            expected = tokens_of(generate(llm, prompts, **params))
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            neighbour = torch.empty(max(free - LEFT_FREE, 0), dtype=torch.uint8, device="cuda")
            with report.timed("memory", "full: requests wait, none is lost") as line:
                outputs = generate(llm, prompts, **params)
                same = sum(a == b for a, b in zip(tokens_of(outputs), expected, strict=True))
                preempted = llm.llm_engine.call("stats").num_preemptions
                line(same == len(prompts) and preempted > 0, f"{same} of {len(prompts)} equal, {preempted} preemptions")
            del neighbour
            torch.cuda.empty_cache()
            with report.timed("memory", "free again: the engine goes on") as line:
                same = sum(a == b for a, b in zip(tokens_of(generate(llm, prompts, **params)), expected, strict=True))
                line(same == len(prompts), f"{same} of {len(prompts)} equal")


def check_fp8_cache(report: Report) -> None:
    """A whole model with keys and values in fp8 beside Transformers with a cache that rounds them the same way."""
    prompts = prompts_of()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM"):
            with report.timed("fp8 cache", name) as line:
                # One layer: in a second one some keys would be rounded the other way for what float16 lost.
                path = make_tiny_model(name, Path(folder) / name, num_hidden_layers=1)
                oracle = load_oracle(path).to("cuda").float()
                with engine(path, dtype="float32", kv_cache_dtype="fp8", max_num_batched_tokens=64) as llm:
                    generate(llm, prompts)  # captures
                    outputs = generate(llm, prompts, logprobs=0)
                means = []
                for is_rounded in (True, False):
                    differences: list[float] = []
                    for prompt, output in zip(prompts, outputs, strict=True):
                        expected = rounded_logprobs(oracle, prompt, list(output.token_ids), is_rounded)
                        differences += [abs(a - b) for a, b in zip(logprobs_of(output), expected, strict=True)]
                    means.append(sum(differences) / len(differences))
                line(
                    means[0] <= FP8_TOLERANCE,
                    f"logprobs off by {means[0]:.3f} from a cache rounded alike, by {means[1]:.3f} from a plain one",
                )


def rounded_logprobs(model: Any, prompt: list[int], tokens: list[int], is_rounded: bool) -> list[float]:
    """Transformers' logprobs of a given continuation, its keys and values rounded to fp8 on their way into the cache."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            rounded = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key_states, value_states))
            return super().update(*rounded, *args, **kwargs)

    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.no_grad():
        logits = model(ids, past_key_values=RoundingCache() if is_rounded else None, use_cache=is_rounded).logits
    logprobs = torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), -1)
    return logprobs[range(len(tokens)), tokens].tolist()


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
                has_kernels = kind == "cuda" or any(b'"cat": "kernel"' in gunzipped(file) for file in files)
                line(tokens == expected and has_kernels, f"{len(files)} files")


def gunzipped(file: Path) -> bytes:
    """What a compressed trace holds."""
    return gzip.decompress(file.read_bytes()) if file.name.endswith(".gz") else b""


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
