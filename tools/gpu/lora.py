"""Adapters on a GPU: kernels against their references, an engine against merged weights, then times of steps.

`PYTHONPATH=src python3 tools/gpu/lora.py [--quick]` in the repository's root. The times are of an 8B model's shape with random
weights: steps with none, 1 and 32 adapters of rank 16 and 64 at batch 1, 32 and 256. Prints tables, writes $OUT/lora.json.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, os.getcwd())

import torch

from quire import LLM, SamplingParams
from quire.adapters import LoRARequest

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = LLAMA_8B | {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 2048, "gpu_memory_utilization": 0.5}
PROMPTS = [[(7 * i + 13 * j) % 4000 + 3 for j in range(20 + 9 * i)] for i in range(12)]


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def check_kernels() -> dict[str, str]:
    """Every kernel of adapters against its reference, on drawn shapes."""
    from quire.conformance import cases
    from quire.conformance.kernel_checks import Target, check_draw
    from quire.platforms import current_platform

    current_platform("cuda").select_kernels()
    cases.load()
    results: dict[str, str] = {}
    for name in ("adapter_shrink", "adapter_lookup", "adapter_expand"):
        for verdict in check_draw(name, Target("cuda", "cuda"), range(24), 0):
            told = verdict.failure or f"off by {verdict.error:.1e} in {verdict.num_cases} cases"
            results[verdict.name if hasattr(verdict, "name") else name] = told
            print(name, told, flush=True)
    return results


def write_checkpoint(folder: Path) -> Path:
    """Random weights that keep lengths, so that logits are neither ties nor certainties."""
    from safetensors.torch import save_file

    write_config(folder, SMALL)
    generator, hidden, wide, vocab = torch.Generator().manual_seed(1), 1024, 2816, 4096
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(4):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (1024, hidden), f"{at}self_attn.k_proj.weight": (256, hidden),
            f"{at}self_attn.v_proj.weight": (256, hidden), f"{at}self_attn.o_proj.weight": (hidden, 1024),
            f"{at}mlp.gate_proj.weight": (wide, hidden), f"{at}mlp.up_proj.weight": (wide, hidden),
            f"{at}mlp.down_proj.weight": (hidden, wide),
        }  # fmt: skip
    tensors = {
        name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    norms = [f"model.layers.{n}.{w}_layernorm.weight" for n in range(4) for w in ("input", "post_attention")]
    tensors |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in [*norms, "model.norm.weight"]}
    save_file(tensors, folder / "model.safetensors")
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint with the adapter's updates in its weights."""
    from safetensors.torch import load_file, save_file

    write_config(folder, SMALL)
    weights, updates = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in updates.items():
        if name.endswith(".lora_A.weight"):
            up = updates[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[target] = (weights[target].float() + up.float() @ down.float()).to(torch.bfloat16)
    save_file(weights, folder / "model.safetensors")
    return folder


def logprobs_of(llm: LLM, adapters: list[LoRARequest | None]) -> list[torch.Tensor]:
    """The first token's logprobs of each prompt, and its tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=-1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, lora_request=adapters, use_tqdm=False)
    found = []
    for output in outputs:
        assert output.error is None, output.error
        first = output.outputs[0].logprobs[0]
        found.append(torch.tensor([first[token].logprob for token in range(4096)]))
    return found


def check_engine(folder: Path) -> dict[str, float]:
    """A mixed batch with graphs against engines whose weights have the updates; and the base's rows against the base."""
    base = write_checkpoint(folder / "base")
    paths = [folder / f"adapter{n}" for n in range(3)]
    with LLM(str(base), enable_lora=True, max_logprobs=-1, max_num_seqs=64, **SETTINGS) as llm:
        for number, path in enumerate(paths):
            llm.collective_rpc("write_random_adapter", args=(str(path), (8, 16, 100)[number], number, [], 0.5))
        requests = [None, *(LoRARequest(path.name, number + 1, str(path)) for number, path in enumerate(paths))]
        mixed = [requests[index % 4] for index in range(len(PROMPTS))]
        for _ in range(3):  # eager, captured, replayed
            ours = logprobs_of(llm, mixed)
        alone = {each: logprobs_of(llm, [each] * len(PROMPTS)) for each in requests}
        without = logprobs_of(llm, [None] * len(PROMPTS))
        one_row = max(_one_row_against_many(llm, each) for each in requests)
    worst: dict[str, float] = {"mixed against alone": 0.0, "adapter against base": 1e9, "one row against many": one_row}
    for index, each in enumerate(mixed):
        worst["mixed against alone"] = max(worst["mixed against alone"], _distance(ours[index], alone[each][index]))
        if each is not None:
            worst["adapter against base"] = min(worst["adapter against base"], _distance(ours[index], without[index]))
    for number, path in enumerate([None, *paths]):
        merged = base if path is None else merge(base, path, folder / f"merged{number}")
        with LLM(str(merged), max_logprobs=-1, max_num_seqs=64, **SETTINGS) as llm:
            expected = logprobs_of(llm, [None] * len(PROMPTS))
        rows = [index for index in range(len(PROMPTS)) if index % 4 == number]
        worst[f"merged {number}"] = max(_distance(ours[index], expected[index]) for index in rows)
    print(json.dumps(worst, indent=1), flush=True)
    return worst


def _one_row_against_many(llm: LLM, adapter: LoRARequest | None) -> float:
    """How far a step is from a prompt that has its tokens: products of a row or two take another way. Logprobs."""
    worst = 0.0
    for batch in (1, 2):
        params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=-1, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:batch]]
        for _ in range(3):  # eager, captured, replayed
            outputs = llm.generate(prompts, params, lora_request=[adapter] * batch, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=False):
            tokens, logprobs = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            longer = [{"prompt_token_ids": [*prompt, *tokens[:5]]}]
            (again,) = llm.generate(longer, params, lora_request=[adapter], use_tqdm=False)
            ours, expected = (
                torch.tensor([each[token].logprob for token in range(4096)])
                for each in (logprobs[5], again.outputs[0].logprobs[0])
            )
            worst = max(worst, _distance(ours, expected))
    return worst


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean difference of probabilities' logarithms."""
    return float((ours - expected).abs().mean())


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    from quire.benchmarks import lora
    from quire.entrypoints.cli.bench import build_parser

    model = write_config(folder / "8b", LLAMA_8B)
    flags = ["--model", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "1024"]
    flags += ["--max-num-seqs", "256", "--disable-log-stats", "--gpu-memory-utilization", "0.7"]
    flags += ["--batch-sizes", *(("1", "32") if quick else ("1", "32", "256")), "--adapters", "1", "32"]
    flags += ["--ranks", *(("16",) if quick else ("16", "64"))]
    return lora.run_command(build_parser("lora").parse_args(flags))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("kernels", "engine", "times"))
    args = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"}
    with tempfile.TemporaryDirectory() as place:
        if args.only in (None, "kernels"):
            found["kernels"] = check_kernels()
        if args.only in (None, "engine"):
            found["engine"] = check_engine(Path(place))
        if args.only in (None, "times"):
            found["times"] = measure(Path(place), args.quick)
    Path(os.environ.get("OUT", "/tmp"), "lora.json").write_text(json.dumps(found, indent=1))
    for row in found.get("times", {}).get("rows", []):
        limit = 1.08 if row["batch_size"] == 1 else 1.12
        print(json.dumps(row | {"within": row["ratio"] <= limit}))
    engine = found.get("engine")
    if engine is not None and (max(v for k, v in engine.items() if k != "adapter against base") > 0.05):
        raise SystemExit("logprobs differ")
    if any("off by" not in told for told in found.get("kernels", {}).values()):
        raise SystemExit("kernels differ")


if __name__ == "__main__":
    main()
