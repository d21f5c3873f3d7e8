"""Measure the demo models that see and hear with Quire: greedy answers about held-out pictures, transcripts of held-out sounds.

    PYTHONPATH=src python -m tools.demo_model.evaluate_parts vision
    PYTHONPATH=src python -m tools.demo_model.evaluate_parts speech

Writes the accuracies as JSON to `bench/results`, and the model's card.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from quire import LLM, SamplingParams

from .drawings import KINDS, draw
from .evaluate import ASSETS, device_name, write_card
from .sounds import RATE, dial

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
TRANSCRIBE = "<|startoftranscript|><|notimestamps|>"

Answer = tuple[str, str, str, str]
"""The task, the question, what should have been said, and what was said."""


def seen(llm: LLM, count: int) -> Iterator[Answer]:
    """All questions about so many pictures of each kind."""
    scenes = [draw(kind, 10**9 + seed, "eval") for kind in KINDS for seed in range(count)]
    asked = [(scene, one) for scene in scenes for one in scene.asked]
    messages = [
        [{"role": "user", "content": [{"type": "image", "image": scene.image}, {"type": "text", "text": one.user}]}]
        for scene, one in asked
    ]
    outputs = llm.chat(messages, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    for (_, one), output in zip(asked, outputs, strict=True):
        yield one.task, one.user, one.answer, output.outputs[0].text


def heard(llm: LLM, count: int) -> Iterator[Answer]:
    """So many sounds."""
    sounds = [dial(10**9 + seed, "eval") for seed in range(count)]
    prompts = [{"prompt": TRANSCRIBE, "multi_modal_data": {"audio": (sound.samples, RATE)}} for sound in sounds]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    for sound, output in zip(sounds, outputs, strict=True):
        keys = sum(len(group) for _, group, _ in sound.groups)
        size = "1 to 4 keys" if keys < 5 else "5 to 8 keys"
        yield size, "", sound.text, output.outputs[0].text.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["vision", "speech"])
    parser.add_argument("--count", type=int, default=400, help="pictures of each kind, or sounds")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print so many wrong answers")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    answers = list(
        {"vision": seen, "speech": heard}[arguments.part](LLM(f"quire-demo-{arguments.part}"), arguments.count)
    )
    tasks = {}
    for task in dict.fromkeys(answer[0] for answer in answers):
        right = [wanted == said for of, _, wanted, said in answers if of == task]
        tasks[task] = {"n": len(right), "accuracy": round(sum(right) / len(right), 4)}
        print(f"{task:20s} {len(right):6d} {sum(right) / len(right):7.1%}")
    for answer in [each for each in answers if each[2] != each[3]][: arguments.show_wrong]:
        print(*answer, sep=" | ")
    results = {
        "date": datetime.date.today().isoformat(),
        "model": f"demo-{arguments.part}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "tasks": tasks,
    }
    if not arguments.dry:
        text = json.dumps(results, indent=2) + "\n"
        (RESULTS / f"demo-{arguments.part}.json").write_text(text, encoding="utf-8")
        card = Path(__file__).with_name(f"{arguments.part}_card.md")
        write_card(card, ASSETS.with_name(f"demo_{arguments.part}") / "README.md", results)


if __name__ == "__main__":
    main()
