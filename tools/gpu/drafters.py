"""Drafters of another tokenizer and drafters that make all guesses at once, on a GPU: whether tokens equal those without, and how
many guesses are accepted; and adapters with tokens of their own beside PEFT.

    python tools/gpu/drafters.py --json drafters.json
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
DRAFTS = ROOT / "examples" / "demo_drafts"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8}, "filtered": {"temperature": 0.9, "top_k": 8, "top_p": 0.9},
}  # fmt: skip


def variants(folder: Path, tokenizer: Path) -> dict[str, dict[str, Any]]:
    """The demo model's drafters, changed into the new kinds (which were not trained as such: their guesses are seldom right)."""
    from safetensors.torch import load_file, save_file
    from tests.spec_decode.test_other_tokenizers import renumbered

    small = shutil.copytree(DRAFTS / "small", folder / "small")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (small / name).is_file():
            shutil.copy(tokenizer / name, small)
    parallel, head = shutil.copytree(small, folder / "parallel"), shutil.copytree(DRAFTS / "eagle3", folder / "head")
    for path, key in ((parallel, "pard_token"), (head, "ptd_token_id")):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {key: 1}))
    weights = load_file(head / "model.safetensors")
    weights["mask_hidden"] = torch.randn(1, weights["fc.weight"].shape[1]).to(weights["fc.weight"].dtype)
    save_file(weights, head / "model.safetensors")
    return {
        "its own tokenizer": {"method": "draft_model", "model": str(small)},
        "renumbered": {"method": "draft_model", "model": str(renumbered(small, folder / "renumbered"))},
        "parallel draft model": {"method": "draft_model", "model": str(parallel), "parallel_drafting": True},
        "parallel eagle3": {"method": "eagle3", "model": str(head), "parallel_drafting": True},
    }


def answers(config: dict[str, Any] | None) -> tuple[list[list[int]], float, Path]:
    """Tokens of some chats; tokens a verification; where the tokenizer is."""
    from quire import LLM, SamplingParams

    asked = [
        (
            [{"role": "user", "content": f"Write a long story about a {topic}."}],
            SamplingParams(max_tokens=48, seed=3, **kind),
        )
        for topic in ("fox", "river", "king")
        for kind in KINDS.values()
    ]
    settings: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(deterministic=True, dtype="float32", speculative_config=config, **settings)
    outputs = llm.chat([chat for chat, _ in asked], [params for _, params in asked], use_tqdm=False)
    stats, path = llm.call("stats"), Path(llm.llm_engine.config.model.path)
    run = 1 + sum(stats.accepted_per_position) / max(1, stats.num_drafts) if config else 1.0
    return [list(output.outputs[0].token_ids) for output in outputs], run, path


def check_adapters(folder: Path) -> str:
    from tests.lora.test_added_tokens import SETTINGS, assert_grown, make_grown
    from tests.oracles.tiny_models import make_tiny_model

    from quire import LLM

    base = make_tiny_model("LlamaForCausalLM", folder / "base", tie_word_embeddings=False)
    try:
        assert_grown(
            LLM(str(base), **SETTINGS), base, [make_grown(base, folder / name, 1) for name in ("saved", "tokens")]
        )
    except AssertionError as error:
        return f"differs from PEFT: {error}"
    return "equals PEFT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="drafters.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, _, tokenizer = answers(None)
        report: dict[str, Any] = {"added tokens": check_adapters(folder)}
        for kind, config in variants(folder, tokenizer).items():
            own = {"num_speculative_tokens": 4, "enable_adaptive_verification": False}
            found, run, _ = answers(config | own)
            report[kind] = {"tokens_equal": found == expected, "tokens_per_verification": round(run, 2)}
        for kind, result in report.items():
            print(f"{kind:22} {result}")
        Path(args.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
