"""Speculation on a GPU: tokens with and without it first, then its speed.

    python tools/gpu/speculate.py --json FILE [--only tokens,copy,synthetic,overhead,models] [--tiny]

`tokens`: a few layers of a model of Llama-3.1-8B's shape, `deterministic`, all guesses verified: greedy, seeded, filtered,
penalized, constrained, with logprobs; answers must be equal. The others are `quire bench speculate` on the whole shape with dummy
weights: `copy` prompts that say one text over and over (how many guesses are right is printed: weights are random); `synthetic`,
in which 70 % of guesses are accepted whatever they are, at 1 and at 256 requests; `overhead`, where hardly a guess is right.
`models`: the demo model with its draft model and its EAGLE-3 head: the same comparison of tokens, then stories at 1, 8 and 32
requests with each; last a head of random weights for the whole shape, whose guesses are wrong: what drafting costs (`--only`
with its name, `head`).
`--tiny` takes small shapes, for a machine without a GPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cached_prompts import LLAMA_8B, TINY

NGRAM = {"method": "ngram", "num_speculative_tokens": 6}
ALWAYS = NGRAM | {"enable_adaptive_verification": False, "prompt_lookup_min": 1}
SYNTHETIC = {
    "method": "ngram",
    "num_speculative_tokens": 12,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rate": 0.7,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "few tokens": {"temperature": 1.0, "allowed_token_ids": list(range(100, 140))},
    "biased": {"temperature": 0.6, "logit_bias": {200: 9.0, 201: 9.0, 202: 8.0}},
}  # fmt: skip


DRAFTS = Path(__file__).resolve().parents[2] / "examples" / "demo_drafts"
MODELS = {"draft_model": "small", "eagle3": "eagle3"}
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": 32000,
}  # fmt: skip


def check_models(is_tiny: bool) -> dict[str, Any]:
    """Whether the demo model's answers are the same with each of its drafters, and how long the accepted runs are."""
    from quire import LLM, SamplingParams

    chats = [
        [{"role": "user", "content": f"Write a long story about a {topic}."}] for topic in ("fox", "river", "king")
    ]
    params = [SamplingParams(max_tokens=16 if is_tiny else 96, seed=3, **chosen) for chosen in KINDS.values()]
    asked = [(chat, one) for chat in chats for one in params]
    found: dict[str, Any] = {}
    for name, folder in ({"": ""} | MODELS).items():
        keys = {
            "method": name,
            "model": str(DRAFTS / folder),
            "num_speculative_tokens": 4,
            "enable_adaptive_verification": False,
        }
        llm = LLM(deterministic=True, dtype="float32", speculative_config=keys if name else None)
        outputs = llm.chat([chat for chat, _ in asked], [one for _, one in asked], use_tqdm=False)
        found[name] = [list(output.outputs[0].token_ids) for output in outputs]
        stats = llm.call("stats")
        if name:
            mean = 1 + sum(stats.accepted_per_position) / max(1, stats.num_drafts)
            print(f"{name:12} {'equal' if found[name] == found[''] else 'DIFFERENT'}, {mean:.2f} tokens a verification")
            if found[name] != found[""]:
                raise SystemExit("answers differ")
            found[name] = {
                "equal": True,
                "tokens_per_verification": mean,
                "accepted": list(stats.accepted_per_position),
            }
    del found[""]
    return found


def bench_models(is_tiny: bool) -> dict[str, Any]:
    """Stories by the demo model, with each of its drafters and without."""
    report = check_models(is_tiny)
    small = ("--output-len", "32", "--rounds", "1", "--batch-sizes", "1,4") if is_tiny else ("--batch-sizes", "1,8,32")
    for name, folder in MODELS.items():
        keys = {"method": name, "model": str(DRAFTS / folder), "num_speculative_tokens": 4}
        report[name] |= run_bench("--pattern", "stories", "--speculative-config", json.dumps(keys), *small)
    return report


def answers(folder: str, speculative: dict[str, Any] | None, layers: int) -> tuple[dict[str, list[list[int]]], Any]:
    """Each kind's tokens for several prompts, all in one batch; and the engine's figures."""
    from quire import LLM, SamplingParams

    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, deterministic=True, max_model_len=2048,
        hf_overrides={"num_hidden_layers": layers}, kv_cache_memory_bytes=1 << 30, speculative_config=speculative,
    )  # fmt: skip
    prompts, params, names = [], [], []
    for number, (name, chosen) in enumerate(KINDS.items()):
        for size in (20, 300, 1200):
            passage = [1000 + (37 * number + 11 * place) % 400 for place in range(size // 4)]
            prompts.append({"prompt_token_ids": passage * 4})
            params.append(SamplingParams(max_tokens=96, seed=size, ignore_eos=True, **chosen))
            names.append(name)
    found: dict[str, list[list[int]]] = {}
    for name, output in zip(names, llm.generate(prompts, params, use_tqdm=False), strict=True):
        found.setdefault(name, []).append(list(output.outputs[0].token_ids))
    return found, llm.call("stats")


def check_tokens(folder: str, is_tiny: bool) -> dict[str, Any]:
    """Whether answers with speculation and without are the same."""
    layers = 1 if is_tiny else 4
    plain, _ = answers(folder, None, layers)
    guessed, stats = answers(folder, ALWAYS, layers)
    right = sum(stats.accepted_per_position)
    print(f"{stats.num_draft_tokens} tokens guessed, {right} right")
    equal = {}
    for name, streams in plain.items():
        equal[name] = streams == guessed[name]
        print(f"{name:12} {'equal' if equal[name] else 'DIFFERENT'}")
    if not all(equal.values()) or not right:
        raise SystemExit("answers differ, or no guess was right")
    return {"equal": equal, "draft_tokens": stats.num_draft_tokens, "accepted_tokens": right}


def bench(folder: str, speculative: dict[str, Any], is_tiny: bool, *flags: str) -> dict[str, Any]:
    """One run of `quire bench speculate`."""
    pages = "64M" if is_tiny else "14G"
    return run_bench(
        *("--model", folder, "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "4096"),
        *("--kv-cache-memory-bytes", pages, "--speculative-config", json.dumps(speculative), *flags),
    )  # fmt: skip


def run_bench(*flags: str) -> dict[str, Any]:
    """`quire bench speculate` in a process of its own."""
    command = (
        sys.executable,
        "-m",
        "quire.entrypoints.cli.main",
        "bench",
        "speculate",
        "--json",
        "-",
        "--disable-log-stats",
    )
    done = subprocess.run([*command, *flags], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", default="tokens,copy,synthetic,overhead")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    small = ("--input-len", "64", "--output-len", "32", "--rounds", "1")
    runs = {
        "copy": (NGRAM | {"num_speculative_tokens": 16}, ("--pattern", "copy", "--batch-sizes", "1,8,32")),
        "synthetic": (SYNTHETIC, ("--pattern", "copy", "--batch-sizes", "1,32,256", "--input-len", "256", "--output-len", "128")),
        "overhead": (NGRAM, ("--pattern", "random", "--batch-sizes", "1,32,256", "--input-len", "256", "--output-len", "128")),
    }  # fmt: skip
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        shape = TINY if args.tiny else LLAMA_8B
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        (Path(folder) / "head").mkdir()
        reads = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}
        own = {"draft_vocab_size": shape["vocab_size"], "eagle_config": reads} if args.tiny else {}
        (Path(folder) / "head" / "config.json").write_text(json.dumps(shape | EAGLE3 | own))
        head = {"method": "eagle3", "model": str(Path(folder) / "head"), "num_speculative_tokens": 4}
        runs["head"] = (
            head,
            ("--pattern", "random", "--batch-sizes", "1,32,256", "--input-len", "256", "--output-len", "128"),
        )
        for name in args.only.split(","):
            print(f"--- {name}", flush=True)
            if name == "tokens":
                report[name] = check_tokens(folder, args.tiny)
            elif name == "models":
                report[name] = bench_models(args.tiny)
            else:
                config, flags = runs[name]
                report[name] = bench(folder, config, args.tiny, *flags, *(small if args.tiny else ()))
            Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
