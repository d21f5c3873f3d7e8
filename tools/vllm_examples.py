"""Runs vLLM's own examples of offline use on Quire, unchanged, and says which run.

    python -m tools.vllm_examples PATH               of an unpacked source distribution of vLLM; prints a table
    python -m tools.vllm_examples PATH --only lora   scripts whose paths contain it (also: --json FILE, --show, --timeout S)
    python -m tools.vllm_examples PATH --rename      not `python -m quire.as_vllm`: `vllm` in the script's text becomes `quire`

The scripts stay where they are. Models that they name come from a cache of the hub that this tool makes: a tiny random checkpoint
for a pooling model, the demo model for every other. A script *runs* if it ends with code 0. It is *refused* if Quire says in
words what is missing, and *needs* something that neither has here: a machine, a package, a file from the network.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tools.vllm_faces.servers import POOLING, checkpoint

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "src/quire/assets/demo"
ENGINES = {"LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine"}
NEEDS: dict[str, str] = {
    "disaggregated/lmcache": "the package lmcache",
    "disaggregated/flexkv": "the package flexkv",
    "kv_load_failure_recovery": "a connector of vLLM's own that fails on purpose",
    "ray_serving": "the package ray",
    "multimodal/audio_language": "a model that hears",
    "multimodal/encoder_decoder": "a model that hears",
    "omni/only_thinker": "a model that hears and reads video",
    "vision_language_multi_image": "pictures from the network",
    "pooling/embed/vision": "a pooling model that sees",
    "pooling/score/vision": "a pooling model that sees",
    "pooling/plugin": "a model of satellite pictures (Prithvi)",
    "jina_embeddings_v4": "a pooling model that sees",
    "qwen_1m": "a file from the network",
    "features/torchrun": "torchrun with several ranks",
    "data_parallel": "several GPUs",
    "rl/rlhf": "several GPUs, Ray and a trainer",
    "rl/routed_experts": "several GPUs",
    "tensorize_vllm_model": "the package tensorizer",
    "api_server/server": "the package fastapi",
    "forced_alignment": "a model that hears",
    "qwen3_reranker": "a tokenizer with the words yes and no, and weights of Qwen3",
    "chat_with_tools": "a tokenizer of Mistral's",
}
"""Parts of paths, and what those scripts need."""
ARGUMENTS: dict[str, list[str]] = {
    "save_sharded_state": ["--model", str(DEMO), "--output", "{folder}/sharded"],
    "load_sharded_state": ["--model", "{folder}/sharded"],
    "spec_decode_offline": ["--method", "ngram", "--num-prompts", "4", "--dataset-name", "random"],
    "multimodal/vision_language_offline": ["--model-type", "llava"],
    "multimodal/mistral-small": ["simple", "--format", "hf"],
}
"""What scripts want on their command line."""
POOLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BAAI/bge-reranker-v2-m3": ("XLMRobertaForSequenceClassification", {"num_labels": 1}),
    "jinaai/jina-embeddings-v3": ("XLMRobertaModel", {"matryoshka_dimensions": [16, 32]}),
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": ("Qwen3ForSequenceClassification", {"num_labels": 1}),
    "nvidia/llama-nemotron-rerank-1b-v2": ("LlamaForSequenceClassification", {"num_labels": 1}),
    "BAAI/bge-m3": ("XLMRobertaModel", {}),
    "jinaai/jina-reranker-v3": ("Qwen3Model", {}),
}
"""Stand-ins of models that only examples name, as in `servers.POOLING`."""
SEERS: dict[str, str] = {
    "llava-hf/llava-1.5-7b-hf": "LlavaForConditionalGeneration",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "Mistral3ForConditionalGeneration",
}
"""Stand-ins of models that see."""
ADAPTERS: dict[str, str] = {"AmirMohseni/skywork-qwen3-0.6b-reward-lora": "Skywork/Skywork-Reward-V2-Qwen3-0.6B"}
"""Stand-ins of adapters, and the model that each is for."""
LONGER = {"max_position_embeddings": 4096}
SAMPLES = ("cherry_blossom",)
LATER = ("decode_example", "load_sharded_state")
"""Parts of paths of scripts that read what another one writes."""
_HUB_ID = re.compile(r"[A-Za-z][\w.-]*/[\w.-]*[A-Za-z][\w.-]*")


def engine_scripts(root: Path, only: str = "") -> list[Path]:
    """The examples that make an engine in their own process."""
    found: list[Path] = []
    for path in sorted((root / "examples").rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        names = {each.name for node in nodes if (node.module or "").split(".")[0] == "vllm" for each in node.names}
        if names & ENGINES and only in str(path):
            found.append(path)
    return sorted(found, key=lambda path: any(part in path.name for part in LATER))


def hub_ids(text: str) -> list[str]:
    """The texts of a script that could be a model's name at the hub."""
    constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return sorted({each for each in constants if isinstance(each, str) and _HUB_ID.fullmatch(each)})


def fill_cache(cache: Path, repository: str) -> None:
    """Put a model's stand-in where the hub's client looks for downloads."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    if folder.exists():
        return
    commit = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit, encoding="utf-8")
    here = folder / "snapshots" / commit
    if repository in SEERS:
        words = (
            f"from tests.oracles.tiny_vision import CONFIGS, make_tiny_vision as make; name = {SEERS[repository]!r}; "
        )
        run_python(
            words + f"text = CONFIGS[name]['text_config'] | {LONGER!r}; make(name, {str(here)!r}, text_config=text)"
        )
    elif repository in ADAPTERS:
        base = checkpoint(ADAPTERS[repository])
        words = f"from pathlib import Path as P; from tests.oracles.peft_adapters import make_adapter as make; base = {base!r}; "
        run_python(
            words + f"make(P(base), P({str(here)!r}), r=4, task_type='SEQ_CLS', target_modules=['q_proj', 'v_proj'])"
        )
    else:
        shutil.copytree(checkpoint(repository) or str(DEMO), here)
    if (tokenizer := here / "tokenizer_config.json").exists() and repository not in ADAPTERS:
        longer = json.loads(tokenizer.read_text("utf-8")) | {"model_max_length": LONGER["max_position_embeddings"]}
        tokenizer.write_text(json.dumps(longer), encoding="utf-8")


def run_python(text: str) -> None:
    """Run a line that makes a stand-in. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, capture_output=True)


def draw_samples(folder: Path) -> None:
    """Pictures in place of those that vLLM's examples fetch."""
    from PIL import Image

    folder.mkdir(parents=True)
    for number, name in enumerate(SAMPLES):
        Image.linear_gradient("L").rotate(90 * number).convert("RGB").save(folder / f"{name}.jpg")


def run_script(path: Path, root: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What became of one script."""
    name = str(path.relative_to(root / "examples"))
    need = next((why for part, why in NEEDS.items() if part in name), None)
    if need is not None:
        return {"script": name, "outcome": "needs", "why": need}
    text = path.read_text("utf-8")
    for repository in hub_ids(text):
        fill_cache(folder / "hub", repository)
    words = ["-m", "quire.as_vllm", str(path)]
    if arguments.rename:
        changed = folder / path.name
        changed.write_text(re.sub(r"\bvllm\b", "quire", text), encoding="utf-8")
        words = [str(changed)]
    words += next((given for part, given in ARGUMENTS.items() if part in name), [])
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "HF_HOME": str(folder),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "QUIRE_CACHE_ROOT": str(folder / "quire"),
    }
    command = [sys.executable, *(word.format(folder=folder) for word in words)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=arguments.timeout
        )
    except subprocess.TimeoutExpired:
        return {"script": name, "outcome": "fails", "why": f"not over after {arguments.timeout:g} s"}
    if done.returncode == 0:
        return {"script": name, "outcome": "runs", "why": ""}
    return {"script": name, **judge(done.stdout + done.stderr), "log": (done.stdout + done.stderr)[-4000:]}


def judge(log: str) -> dict[str, str]:
    """Whether a script that failed was told what is missing, and what it was told."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|error)\b", line)), lines[-1])
    absent = [line.partition("] ")[2] for line in lines if " is not in Quire: " in line]
    if absent:
        return {"outcome": "refused", "why": absent[-1]}
    is_told = re.match(r"quire\.errors\.|TypeError: \w+ has no parameter|[\w.-]+: error:", last)
    return {"outcome": "refused" if is_told else "fails", "why": re.sub(r"^quire\.errors\.\w+: ", "", last)}


def table(outcomes: list[dict[str, Any]]) -> str:
    """One line a script, and the counts."""
    width = max(len(each["script"]) for each in outcomes)
    lines = [f"{each['script']:{width}}  {each['outcome']:8} {each['why']}".rstrip() for each in outcomes]
    counts = Counter(each["outcome"] for each in outcomes)
    possible = len(outcomes) - counts["needs"]
    told = ", ".join(f"{counts[each]} {each}" for each in ("runs", "refused", "fails", "needs"))
    return "\n".join([*lines, "", f"{counts['runs']} of {possible} that need nothing absent run ({told})"])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="an unpacked source distribution of vLLM")
    parser.add_argument("--only", default="", help="only scripts whose paths contain this")
    parser.add_argument("--rename", action="store_true", help="run the scripts with `vllm` replaced by `quire`")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one script")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--show", action="store_true", help="print the last words of those that fail")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    for name, (architecture, config) in (POOLING | POOLERS).items():
        POOLING[name] = (architecture, {"max_position_embeddings": 4096, **config})
    with tempfile.TemporaryDirectory() as folder:
        draw_samples(Path(folder) / "quire/assets/vision_model_images")
        scripts = engine_scripts(root, arguments.only)
        if not scripts:
            sys.exit(f"{root}: no such examples; give the path of an unpacked source distribution of vLLM")
        outcomes = [run_script(path, root, Path(folder), arguments) for path in scripts]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    for each in outcomes if arguments.show else ():
        if each["outcome"] in ("fails", "refused") and "log" in each:
            print(f"--- {each['script']}\n{each['log']}\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
