"""Freeze the held-out questions that `python -m bench demo` asks.

    PYTHONPATH=src python -m tools.demo_model.questions

They are the ones of `evaluate.py` with as large a count, in the same order.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from .tasks.examples import TASKS, eval_examples

FILE = Path(__file__).resolve().parents[2] / "bench" / "questions.jsonl.gz"


def frozen(task: str, count: int) -> list[str]:
    """The first `count` held-out questions of `task`, each a line of JSON."""
    return [
        json.dumps(
            {
                "task": task,
                "messages": example.messages,
                "tools": example.tools,
                "thinking": example.thinking,
                "check": [example.check.kind, *example.check.expected],
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )
        for example in eval_examples(task, count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="questions a task (200)")
    count = parser.parse_args().count
    text = "".join(f"{line}\n" for task in TASKS for line in frozen(task, count))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(f"{count * len(TASKS)} questions, {FILE.stat().st_size} bytes: {FILE}")


if __name__ == "__main__":
    main()
