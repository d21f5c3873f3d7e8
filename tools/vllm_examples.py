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
TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""By parts of paths: `needs` that are not here, `arguments` of the command line, in how many `ranks` torchrun starts a script.
By names at the hub what stands in for a model: `poolers` (as in `servers.POOLING`), `others` (who makes them, of `tests.oracles`,
their architecture, and how they mark an image), `adapters` (the model that each is for; none: the demo model), `stored` (the demo
model in a number format, of `tests.oracles.quantized_models`). And the names of samples: `pictures`, `sounds`."""
NEEDS, ARGUMENTS, RANKS = TABLES["needs"], TABLES["arguments"], TABLES["ranks"]
POOLERS, OTHERS, ADAPTERS, STORED = TABLES["poolers"], TABLES["others"], TABLES["adapters"], TABLES["stored"]
LONGER = {"max_position_embeddings": 32768}
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
    if repository in OTHERS:
        maker, name, mark = OTHERS[repository]
        module, function = maker.split(":")
        longer = f"dict(text_config=CONFIGS[{name!r}]['text_config'] | {LONGER!r})"
        more = "dict(max_target_positions=448)" if "decoder" in maker else longer
        words = f"from tests.oracles.{module} import CONFIGS, {function} as make; "
        run_python(f"{words}make({name!r}, {str(here)!r}, **{more})")
        for file in here.glob("tokenizer*.json") if mark else ():
            file.write_text(file.read_text("utf-8").replace("<image>", mark), encoding="utf-8")
    elif repository in ADAPTERS:
        base = checkpoint(ADAPTERS[repository])
        task = "SEQ_CLS" if base else "CAUSAL_LM"
        words = "from pathlib import Path as P; from tests.oracles.peft_adapters import make_adapter as make; "
        made = f"make(P({base or str(DEMO)!r}), P({str(here)!r}), r=4, task_type={task!r}, target_modules=['q_proj', 'v_proj'])"
        run_python(words + made)
    elif repository in STORED:
        words = f"from pathlib import Path as P; from tests.oracles.quantized_models import *; form = {STORED[repository]}; "
        run_python(f"{words}store(P({str(DEMO)!r}), P({str(here)!r}), form)")
    else:
        shutil.copytree(checkpoint(repository) or str(DEMO), here)
    if repository == "Qwen/Qwen3-Reranker-0.6B":
        from tokenizers import Tokenizer

        words = Tokenizer.from_file(str(here / "tokenizer.json"))
        words.add_tokens(["yes", "no"])
        words.save(str(here / "tokenizer.json"))
    if repository not in ADAPTERS:
        lengthen(here, is_demo=repository not in {**POOLING, **OTHERS})


def lengthen(folder: Path, *, is_demo: bool) -> None:
    """Let a stand-in be as long as scripts want it; the others are made so."""
    fields = {"tokenizer_config.json": "model_max_length"} | (
        {"config.json": "max_position_embeddings"} if is_demo else {}
    )
    for name, field in fields.items():
        known = json.loads((folder / name).read_text("utf-8"))
        (folder / name).write_text(json.dumps(known | {field: LONGER["max_position_embeddings"]}), encoding="utf-8")


def run_python(text: str) -> None:
    """Run a line that makes a stand-in. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=True, capture_output=True)


def draw_samples(folder: Path) -> None:
    """Pictures and sounds in place of those that vLLM's examples fetch."""
    import numpy as np
    import soundfile
    from PIL import Image

    for number, name in enumerate(TABLES["pictures"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").rotate(90 * number).convert("RGB").save(folder / f"{name}.jpg")
    for number, name in enumerate(TABLES["sounds"]):
        wave = np.sin(np.arange(8000) * (0.05 + 0.02 * number)).astype(np.float32)
        soundfile.write(folder / f"multimodal_asset/{name}.ogg", wave, 16000)


def run_script(path: Path, root: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """What became of one script."""
    name = str(path.relative_to(root / "examples"))
    need = next((why for part, why in NEEDS.items() if part in name), None)
    if need is not None:
        return {"script": name, "outcome": "needs", "why": need}
    text = path.read_text("utf-8")
    for repository in hub_ids(text):
        fill_cache(folder / "hub", repository)
    ranks = next((number for part, number in RANKS.items() if part in name), 0)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(ranks)] if ranks else []
    words = ["-m", "quire.as_vllm", *torchrun, str(path)]
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
    command = [sys.executable, *(word.format(folder=folder, demo=DEMO) for word in words)]
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
    last = next(
        (line for line in reversed(lines) if line.startswith("quire.errors.")), last
    )  # torchrun's own is behind it
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
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one script")
    parser.add_argument("--json", type=Path, help="write every outcome to this file")
    parser.add_argument("--show", action="store_true", help="print the last words of those that fail")
    arguments = parser.parse_args()
    root = arguments.root.resolve()
    for name, (architecture, config) in (POOLING | POOLERS).items():
        POOLING[name] = (architecture, {"max_position_embeddings": 4096, **config})
    with tempfile.TemporaryDirectory() as folder:
        draw_samples(Path(folder) / "quire/assets")
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
