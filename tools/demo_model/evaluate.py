"""Measure the demo model with the `transformers` library: greedy answers to held-out examples of each task.

    PYTHONPATH=src python -m tools.demo_model.evaluate --count 200 --results bench/results/demo-transformers.json

Writes the accuracy of each task as JSON, the wrong answers beside it if asked, and the model card from `card.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from bench.demo import is_correct

from tokenizers import Tokenizer

from .rendering import compile_template, render_prompt, template_source
from .tasks.examples import TASKS, Example, eval_examples

ASSETS = Path(__file__).resolve().parents[2] / "src" / "quire" / "assets" / "demo"
PAD = 0
END = 2


@torch.inference_mode()
def complete(model: Any, tokenizer: Tokenizer, prompts: list[str], limit: int) -> list[str]:
    """The greedy completion of each prompt; one padded batch."""
    ids = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    width = max(len(row) for row in ids)
    rows = torch.tensor([[PAD] * (width - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=model.device)
    out = model.generate(
        rows, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=END, pad_token_id=PAD
    )
    return [tokenizer.decode(row[width:].tolist(), skip_special_tokens=True) for row in out]


def evaluate(
    model_folder: Path, count: int, batch: int, device: str, limit: int
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Accuracy for each task, and the wrong answers."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    template = compile_template(template_source())
    model = transformers.LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(device).eval()
    tasks: dict[str, Any] = {}
    wrong: list[dict[str, str]] = []
    for task in TASKS:
        started = time.monotonic()
        examples = sorted(eval_examples(task, count), key=lambda example: len(json.dumps(example.messages)))
        completions: list[str] = []
        for first in range(0, count, batch):
            prompts = [render_prompt(template, example) for example in examples[first : first + batch]]
            completions += complete(model, tokenizer, prompts, limit)
        right = [is_correct(example, text) for example, text in zip(examples, completions, strict=True)]
        wrong += [
            _miss(example, text) for example, text, good in zip(examples, completions, right, strict=True) if not good
        ]
        tasks[task] = {"n": count, "accuracy": round(sum(right) / count, 4)}
        print(f"{task:16s} {sum(right) / count:7.1%}  ({time.monotonic() - started:.1f} s)", flush=True)
    return tasks, wrong


def _miss(example: Example, text: str) -> dict[str, str]:
    return {
        "task": example.task,
        "asked": str(example.messages[-1]["content"]),
        "expected": example.answer,
        "given": text,
    }


def device_name(device: str) -> str:
    """What the hardware calls itself, for an accelerator."""
    return "CPU" if device == "cpu" else torch.get_device_module(device).get_device_name()


def write_card(template_file: Path, out: Path, results: dict[str, Any]) -> None:
    """The model card: `template_file` with the accuracy table put in."""
    rows = "\n".join(f"| {task} | {row['n']} | {row['accuracy']:.1%} |" for task, row in results["tasks"].items())
    text = template_file.read_text(encoding="utf-8")
    for name in ("date", "torch", "transformers", "device"):
        text = text.replace("{" + name + "}", str(results[name]))
    out.write_text(text.replace("{rows}", rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ASSETS, help="folder with the checkpoint and tokenizer.json")
    parser.add_argument("--count", type=int, default=200, help="held-out examples a task")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--limit", type=int, default=256, help="new tokens at most")
    parser.add_argument("--device", default="cuda" if torch.accelerator.is_available() else "cpu")
    parser.add_argument("--results", type=Path, help="write the accuracies here, as JSON")
    parser.add_argument("--wrong", type=Path, help="write the wrong answers here, as JSON lines")
    parser.add_argument("--card", type=Path, help="write the model card here")
    arguments = parser.parse_args()
    tasks, wrong = evaluate(arguments.model, arguments.count, arguments.batch, arguments.device, arguments.limit)
    results = {
        "date": datetime.date.today().isoformat(),
        "model": "demo",
        "engine": "transformers greedy generate, bfloat16",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(arguments.device),
        "tasks": tasks,
    }
    if arguments.results:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if arguments.wrong:
        lines = [json.dumps(miss, ensure_ascii=False) for miss in wrong]
        arguments.wrong.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if arguments.card:
        write_card(Path(__file__).with_name("card.md"), arguments.card, results)


if __name__ == "__main__":
    main()
