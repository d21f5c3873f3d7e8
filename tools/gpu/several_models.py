"""Two models of 8B parameters in memory for one: each request wakes its model, the other sleeps. Correct first, then seconds.

    PYTHONPATH=src python3 tools/gpu/several_models.py [--rounds 6] [--model PATH --memory 30G --total 45G]

Prints a table and writes $OUT/several-models.json. A model gives the same tokens each time that it was woken, or this fails.
The weights are dummies unless a model is given.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
PROMPT = list(range(100, 228))


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=200) as answer:
        return json.load(answer)


def generate(url: str, name: str) -> tuple[list[int], float]:
    began = time.perf_counter()
    sampling = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = ask(url, "/inference/v1/generate", {"model": name, "token_ids": PROMPT, "sampling_params": sampling})
    return answer["choices"][0]["token_ids"], time.perf_counter() - began


def start(arguments: argparse.Namespace, folder: Path) -> tuple["subprocess.Popen[str]", str]:
    """The server, and its address once it has one."""
    model, flags = arguments.model, ["--skip-tokenizer-init", "--max-model-len", "4096"]
    if model is None:
        (folder / "config.json").write_text(json.dumps(CONFIG))
        model, flags = str(folder), [*flags, "--load-format", "dummy"]
    entries = [{"model": model, "name": name, "memory": arguments.memory, "flags": flags} for name in "ab"]
    (folder / "models.yaml").write_text(json.dumps({"memory": arguments.total, "models": entries}))
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", "--port", "0"]
    server = subprocess.Popen([*command, "--models", str(folder / "models.yaml")], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    line = next(line for line in server.stdout if " is ready after " in line)
    return server, line.rsplit(" at ", 1)[1].strip()


def measure(url: str, rounds: int) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    first: dict[str, list[int]] = {}
    for number in range(rounds):
        for name in "ab":
            tokens, seconds = generate(url, name)
            if first.setdefault(name, tokens) != tokens:
                sys.exit(f"{name} gives other tokens in round {number}: {tokens} and {first[name]}")
            states = {row["name"]: row for row in ask(url, "/models")["models"]}
            other = states["b" if name == "a" else "a"]["state"]
            rows.append({"round": number, "model": name, "request_s": round(seconds, 3), "other": other})
            rows[-1]["wake_s"] = states[name]["last_wake_seconds"]
            print(f"{number:>5}  {name}  {seconds:>9.3f}  {rows[-1]['wake_s']:>6.3f}  {other}", flush=True)
    woken = [row["wake_s"] for row in rows if row["round"]]
    return {"rows": rows, "slowest_wake_s": max(woken), "mean_wake_s": round(sum(woken) / len(woken), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--model")
    parser.add_argument("--memory", default="30G")
    parser.add_argument("--total", default="45G")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start(arguments, Path(folder))
        try:
            print("round  model  request_s  wake_s  the other")
            result = measure(url, arguments.rounds)
        finally:
            server.terminate()
            server.wait(60)
    print(f"woken in {result['mean_wake_s']} s on average, {result['slowest_wake_s']} s at most")
    path = Path(os.environ.get("OUT", "/tmp")) / "several-models.json"
    path.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
