"""The demo model's held-out questions, and the judge of an answer.

They stand in `assets/demo/questions.jsonl.gz`, which `tools/demo_model/questions.py` writes: training never saw them.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from quire.errors import ConfigError

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """How an answer is judged.

    Attributes:
        kind: `exact` (the text is one of `expected`), `number` (its last number is), `json` (it parses to the same
            value), `tool_call` (its `<tool_call>` blocks parse to the same calls).
        expected: the accepted texts; for `json` and `tool_call` one JSON text.
    """

    kind: Literal["exact", "number", "json", "tool_call"]
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """One conversation that ends where the assistant is to speak.

    Attributes:
        task: the skill that is asked for.
        messages: the conversation so far, in the OpenAI format.
        tools: the tools offered, in the OpenAI format; None for none.
        thinking: whether the template is to be rendered with `enable_thinking`.
        check: how the answer is judged.
    """

    task: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    thinking: bool
    check: Check


@cache
def held_out() -> dict[str, list[Question]]:
    """Every frozen question, by task."""
    packed = files("quire").joinpath("assets", "demo", "questions.jsonl.gz").read_bytes()
    tasks: dict[str, list[Question]] = {}
    for line in gzip.decompress(packed).splitlines():
        fields = json.loads(line)
        kind, *expected = fields.pop("check")
        question = Question(**fields, check=Check(kind, tuple(expected)))
        tasks.setdefault(question.task, []).append(question)
    return tasks


def draw(task: str, count: int, seed: int) -> list[Question]:
    """`count` different questions of `task`: the first ones for seed 0, else drawn by the seed.

    Raises:
        ConfigError: there are fewer.
    """
    questions = held_out()[task]
    if count > len(questions):
        raise ConfigError.of("num_examples", f"{count} is more than there are; at most {len(questions)} a task.")
    return random.Random(seed).sample(questions, count) if seed else questions[:count]


def is_correct(question: Question, text: str) -> bool:
    """Whether `text` (with or without its `<think>` part) answers `question`."""
    text = text.replace("<|im_end|>", "").rpartition("</think>")[2].strip()
    kind, expected = question.check.kind, question.check.expected
    if kind == "exact":
        return text in expected
    if kind == "number":
        return re.findall(r"-?\d+", text)[-1:] == [expected[0]]
    if kind == "json":
        return _parsed(text) == json.loads(expected[0])
    calls = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    return [_parsed(call) for call in calls] == json.loads(expected[0])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
