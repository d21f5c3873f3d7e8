"""Whether Quire computes right on this GPU: kernels, models, graphs, asynchronous steps, batch invariance, the demo model.

    python tools/gpu_check.py [--json PATH] [--only SECTION ...]

Takes under three minutes on an H200 once the kernels are compiled. Prints a table; exits with 1 if anything failed. Needs the
development dependencies (the models come from Transformers, tiny and random).
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tools")]
os.environ.setdefault("QUIRE_LOGGING_LEVEL", "WARNING")

import torch  # noqa: E402
from tests.oracles.tiny_models import VOCAB_SIZE, load_oracle, make_tiny_model  # noqa: E402

from quire import LLM, SamplingParams  # noqa: E402

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 8},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "GPT2LMHeadModel": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "Phi3ForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "OPTForCausalLM": {},
    "GraniteForCausalLM": {},
    "Cohere2ForCausalLM": {},
    "BloomForCausalLM": {},
    "MiniCPM3ForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
}
PROMPT_LENGTHS = (5, 30, 61, 17, 1, 44, 90, 12)
NEW_TOKENS = 24
KERNEL_JOBS = 12
"""Processes at a time: most of the time goes to compiling."""
FLOAT32_LOGPROB_TOLERANCE = 1e-3
BFLOAT16_LOGPROB_TOLERANCE = 0.12
BFLOAT16_MEAN_TOLERANCE = 0.03
"""Of greedy tokens' logprobs beside Transformers' float32 with the same bfloat16 weights. In a mixture of experts a token near
the border between two experts may take the other one: only the mean counts there."""
ALSO_IN_BFLOAT16 = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GPT2LMHeadModel",
    "Gemma3ForCausalLM",
    "MiniCPM3ForCausalLM",
)


@dataclasses.dataclass
class Check:
    """One line of the table."""

    section: str
    name: str
    passed: bool
    detail: str
    seconds: float


def prompts_of(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@contextlib.contextmanager
def engine(model: str | Path | None, **settings: Any) -> Iterator[LLM]:
    """An engine with a small cache, released at the end."""
    given: dict[str, Any] = {"kv_cache_memory_bytes": 256 << 20, "device": "cuda", "disable_log_stats": True}
    if model is not None:
        given |= {"model": str(model), "max_model_len": 200, "max_num_seqs": 16, "skip_tokenizer_init": True}
    llm = LLM(**(given | settings))
    try:
        yield llm
    finally:
        llm.llm_engine.shutdown()
        del llm
        torch.cuda.empty_cache()


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[Any]:
    """Completions of token prompts; greedy, 24 tokens."""
    wanted = SamplingParams(**({"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True} | params))
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """Token ids alone."""
    return [list(output.token_ids) for output in outputs]


def logprobs_of(output: Any) -> list[float]:
    """Logprobs of the sampled tokens."""
    return [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]


def oracle_logprobs(model: Any, prompt: list[int], tokens: list[int]) -> tuple[list[float], list[int]]:
    """Transformers' logprobs of given continuations, and what it would have chosen."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs[range(len(tokens)), tokens].tolist()
    return chosen, logits.argmax(-1).tolist()


# --- sections --------------------------------------------------------------------------------------------------------


def check_kernels(report: "Report") -> None:
    """Every kernel against its reference, on drawn shapes: the kernels of the conformance suite."""
    from quire.conformance.contract import select_checks
    from quire.conformance.suite import Plan, run_checks

    for result in run_checks(Plan("cuda", jobs=KERNEL_JOBS), select_checks(["kernels"])):
        detail = f"{result.message} {result.got}".strip()
        report.add("kernels", result.name, result.is_good, detail, result.seconds)


def check_models(report: "Report") -> None:
    """Greedy parity with Transformers: exact in float32, within a tolerance in bfloat16."""
    prompts = prompts_of()
    for name, overrides in ARCHITECTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = make_tiny_model(name, Path(folder), **overrides)
            oracle = load_oracle(path).to("cuda").float()
            for dtype in ("float32", "bfloat16") if name in ALSO_IN_BFLOAT16 else ("float32",):
                with report.timed("models", f"{name} {dtype}") as line:
                    rounded = oracle if dtype == "float32" else load_oracle(path, "bfloat16").to("cuda").float()
                    with engine(path, dtype=dtype, max_num_batched_tokens=64) as llm:
                        generate(llm, prompts)  # captures
                        outputs = generate(llm, prompts, logprobs=0)
                    differences: list[float] = []
                    wrong = 0
                    for prompt, output in zip(prompts, outputs, strict=True):
                        expected, greedy = oracle_logprobs(rounded, prompt, list(output.token_ids))
                        pairs = zip(logprobs_of(output), expected, strict=True)
                        differences += [abs(ours - theirs) for ours, theirs in pairs]
                        wrong += sum(ours != theirs for ours, theirs in zip(output.token_ids, greedy, strict=True))
                    worst, mean = max(differences), sum(differences) / len(differences)
                    if dtype == "float32":
                        passed = worst <= FLOAT32_LOGPROB_TOLERANCE and wrong == 0
                    else:
                        is_mixture = "Moe" in name
                        passed = mean <= BFLOAT16_MEAN_TOLERANCE
                        passed &= is_mixture or worst <= BFLOAT16_LOGPROB_TOLERANCE
                    line(passed, f"{wrong} other tokens, logprobs off by {mean:.1e}, at most {worst:.1e}")


def check_experts(report: "Report") -> None:
    """Mixtures whose experts stay codes beside the same values in a plain checkpoint, both in float16."""
    from tests.oracles.quantized_models import WEIGHT_ONLY, store, store_mxfp4_experts

    small: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 128}
    prompts = prompts_of()
    gpt_oss: dict[str, Any] = {"head_dim": 64, "hidden_size": 192, "intermediate_size": 160, "num_local_experts": 8}
    for name, architecture, sizes in (
        ("mxfp4", "GptOssForCausalLM", gpt_oss),
        *((name, "Qwen3MoeForCausalLM", small) for name in ("gptq 4 bits", "awq", "compressed nvfp4")),
    ):
        with tempfile.TemporaryDirectory() as folder, report.timed("experts", f"{architecture} {name}") as line:
            plain, stored = make_tiny_model(architecture, Path(folder) / "plain", **sizes), Path(folder) / "stored"
            store_mxfp4_experts(plain, stored) if name == "mxfp4" else store(plain, stored, WEIGHT_ONLY[name])
            found = []
            for path in (stored, stored / "worth"):
                with engine(path, dtype="float16", max_num_batched_tokens=64) as llm:
                    generate(llm, prompts)  # captures
                    found.append(generate(llm, prompts, logprobs=0))
            first = [abs(logprobs_of(ours)[0] - logprobs_of(theirs)[0]) for ours, theirs in zip(*found, strict=True)]
            same = sum(ours[:1] == theirs[:1] for ours, theirs in zip(*map(tokens_of, found), strict=True))
            mean = sum(first) / len(first)
            passed = mean <= BFLOAT16_MEAN_TOLERANCE and same >= len(prompts) - 1
            line(passed, f"{same} of {len(prompts)} first tokens equal, their logprobs off by {mean:.1e}")


def check_steps(report: "Report") -> None:
    """Graphs against eager steps, asynchronous scheduling against synchronous, and no synchronisation in the loop."""
    prompts = prompts_of() * 3
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model("Qwen3ForCausalLM", Path(folder))
        settings = {"dtype": "float32", "max_num_batched_tokens": 64}
        results: dict[str, list[list[int]]] = {}
        for name, more in {
            "eager": {"enforce_eager": True},
            "graphs": {},
            "synchronous": {"async_scheduling": False},
        }.items():
            with engine(path, **settings, **more) as llm:
                for _ in range(3):
                    results[name] = tokens_of(generate(llm, prompts, temperature=0.8, seed=7))
                if name == "graphs":
                    with report.timed("steps", "no synchronising call in the loop") as line:
                        torch.cuda.set_sync_debug_mode("error")
                        try:
                            generate(llm, prompts, temperature=0.8, seed=7)
                            generate(llm, prompts, temperature=0.8, seed=7, top_k=9, top_p=0.8, presence_penalty=0.3)
                        finally:
                            torch.cuda.set_sync_debug_mode("default")
                        line(True, "set_sync_debug_mode('error')")
        for name in ("graphs", "synchronous"):
            with report.timed("steps", f"{name} = eager") as line:
                same = sum(a == b for a, b in zip(results[name], results["eager"], strict=True))
                line(same == len(prompts), f"{same} of {len(prompts)} requests equal")


def check_invariance(report: "Report") -> None:
    """With `deterministic`, a request's logprobs are the same to the bit alone, in any batch, order and chunking."""
    prompts = prompts_of()
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model("Qwen3ForCausalLM", Path(folder))
        for dtype in ("bfloat16", "float32"):
            with engine(path, dtype=dtype, deterministic=True, enable_prefix_caching=False) as llm:
                alone = [logprobs_of(generate(llm, [prompt], logprobs=0)[0]) for prompt in prompts]
            for name, order, tokens in (
                ("all at once", list(range(len(prompts))), 512),
                ("another order", [5, 2, 7, 0, 3, 6, 1, 4], 512),
                ("chunks of 16", list(range(len(prompts))), 16),
                ("chunks of 48", [7, 6, 5, 4, 3, 2, 1, 0], 48),
            ):
                with (
                    report.timed("invariance", f"{dtype}: {name}") as line,
                    engine(
                        path,
                        dtype=dtype,
                        deterministic=True,
                        enable_prefix_caching=False,
                        max_num_batched_tokens=tokens,
                    ) as llm,
                ):
                    outputs = generate(llm, [prompts[index] for index in order], logprobs=0)
                    pairs = zip(order, outputs, strict=True)
                    same = sum(alone[index] == logprobs_of(output) for index, output in pairs)
                    line(same == len(prompts), f"{same} of {len(prompts)} requests equal to the bit")


def check_demo(report: "Report") -> None:
    """The built-in model's accuracy, the same table as on a CPU."""
    from bench.demo import ask, draw, held_out, is_correct

    with engine(None, dtype="bfloat16", kv_cache_memory_bytes=2 << 30) as llm:
        for task in held_out():
            with report.timed("demo", task) as line:
                questions = draw(task, 100, 0)
                params = SamplingParams(temperature=0.0, max_tokens=384, skip_special_tokens=False)
                answers = ask(llm, questions, params, False)
                right = sum(is_correct(question, answer) for question, answer in zip(questions, answers, strict=True))
                line(right >= 95, f"{right} of {len(questions)}")


BESIDE = "kernels"
"""The section that runs in processes of its own, beside the others."""
SECTIONS = {
    "kernels": check_kernels,
    "models": check_models,
    "experts": check_experts,
    "steps": check_steps,
    "invariance": check_invariance,
    "demo": check_demo,
}


class Report:
    """Collects lines; a section that raises is a line that failed."""

    def __init__(self) -> None:
        self.lines: list[Check] = []

    @contextlib.contextmanager
    def timed(self, section: str, name: str) -> Iterator[Callable[[bool, str], None]]:
        """One check: call what it gives with the verdict."""
        began = time.perf_counter()
        verdict: list[tuple[bool, str]] = []
        try:
            yield lambda passed, detail: verdict.append((passed, detail))
        except Exception as error:
            traceback.print_exc()
            verdict = [(False, f"{type(error).__name__}: {error}"[:160])]
        passed, detail = verdict[-1] if verdict else (False, "no verdict")
        self.add(section, name, passed, detail, time.perf_counter() - began)

    def add(self, section: str, name: str, passed: bool, detail: str, seconds: float) -> None:
        """One line."""
        line = Check(section, name, passed, detail, round(seconds, 2))
        self.lines.append(line)
        print(f"{'ok  ' if passed else 'FAIL'} {section:11} {name:42} {detail} ({line.seconds:.1f} s)", flush=True)


def versions() -> dict[str, Any]:
    """What it ran on."""
    import transformers
    import triton

    import quire

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit.stdout.strip() or "unknown",
        "quire": quire.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
    }


def run_beside(folder: Path) -> subprocess.Popen[bytes]:
    """A process for the section that does little else than compile, while the others run here."""
    command = [sys.executable, __file__, "--only", BESIDE, "--json", str(folder / "checks.json")]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def take_in(process: "subprocess.Popen[bytes]", folder: Path, report: Report) -> None:
    """That process's lines, once it has ended."""
    code = process.wait()
    path = folder / "checks.json"
    if not path.exists():
        report.add(BESIDE, "section", False, f"its process ended with {code} and wrote nothing", 0.0)
        return
    for entry in json.loads(path.read_text(encoding="utf-8"))["checks"]:
        report.add(*(entry[field.name] for field in dataclasses.fields(Check)))


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="write the table as JSON too")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="only these sections")
    args = parser.parse_args()
    report = Report()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        sections, beside = list(args.only), None
        if BESIDE in sections and len(sections) > 1:
            sections.remove(BESIDE)
            beside = run_beside(Path(folder))
        for name in sections:
            try:
                SECTIONS[name](report)
            except Exception as error:
                traceback.print_exc()
                report.lines.append(Check(name, "section", False, f"{type(error).__name__}: {error}"[:160], 0.0))
        if beside is not None:
            take_in(beside, Path(folder), report)
    seconds = time.perf_counter() - began
    failed = [line for line in report.lines if not line.passed]
    print(f"{len(report.lines)} checks in {seconds:.0f} s, {len(failed)} failed")
    for line in failed:
        print(f"FAIL {line.section}: {line.name}: {line.detail}")
    if args.json:
        record = {**versions(), "seconds": seconds, "checks": [dataclasses.asdict(line) for line in report.lines]}
        Path(args.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
