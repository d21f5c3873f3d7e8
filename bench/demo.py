"""`python -m bench demo`: what the built-in demo model gets right, task by task, with greedy decoding.

An end-to-end gate: a kernel, a cache or a quantization that spoils the numbers shows here. The questions are held out: training
never saw them (`questions.jsonl.gz`, which `tools/demo_model/questions.py` writes).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from quire.benchmarks import common
from quire.engine.arg_parser import flag
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
    packed = Path(__file__).with_name("questions.jsonl.gz").read_bytes()
    tasks: dict[str, list[Question]] = {}
    for line in gzip.decompress(packed).splitlines():
        fields = json.loads(line)
        kind, *expected = fields.pop("check")
        question = Question(**fields, check=Check(kind, tuple(expected)))
        tasks.setdefault(question.task, []).append(question)
    return tasks


def draw(task: str, count: int, seed: int) -> list[Question]:
    """`count` different questions of `task`: the first ones for seed 0, else drawn by the seed.
    Raises ConfigError: there are fewer."""
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--num-examples", 100, "questions a task")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks")
    flag(parser, "--bench-seed", 0, "draws the questions (0: the first)")
    flag(parser, "--max-tokens", 384, "most tokens of an answer")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print up to N wrong answers a task")
    flag(parser, "--no-progress", False, "no progress bar")
    common.add_engine_arguments(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    known = held_out()
    tasks = args.tasks or list(known)
    unknown = sorted(set(tasks) - set(known))
    if unknown:
        raise ConfigError.of("tasks", f"{unknown[0]!r} is unknown; there are {', '.join(known)}.")
    drawn = {task: draw(task, args.num_examples, args.bench_seed) for task in tasks}
    llm = common.load_engine(args)
    figures: dict[str, Any] = {"model": common.model_name(llm.llm_engine.config.model.model), "tasks": {}}
    rows: list[list[Any]] = []
    for task, questions in drawn.items():
        wrong = _wrong_answers(llm, args, questions)
        count = len(questions)
        right = count - len(wrong)
        figures["tasks"][task] = {"correct": right, "examples": count, "accuracy": right / count}
        rows.append([task, f"{right / count:.1%}", right, count])
        for question, answer in wrong[: args.show_wrong]:
            print(f"[{task}] {str(question.messages[-1].get('content'))!r}\n    -> {answer!r}")
    total = sum(row[3] for row in rows)
    correct = sum(row[2] for row in rows)
    figures["accuracy"] = correct / total
    rows.append(["all", f"{correct / total:.1%}", correct, total])
    common.print_columns(f"Demo tasks: {figures['model']}", ("task", "accuracy", "right", "asked"), rows)
    return figures


def _wrong_answers(llm: Any, args: argparse.Namespace, questions: list[Question]) -> list[tuple[Question, str]]:
    from quire import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, skip_special_tokens=False)
    answers = ask(llm, questions, params, not args.no_progress)
    pairs = zip(questions, answers, strict=True)
    return [(question, answer) for question, answer in pairs if not is_correct(question, answer)]


def ask(llm: Any, questions: list[Question], params: Any, progress: bool) -> list[str]:
    """Answers in order. One batch, though each question has its own tools and its own say on thinking."""
    tokenizer = llm.get_tokenizer()
    prompts = [
        {
            "prompt_token_ids": tokenizer.apply_chat_template(
                question.messages,
                tools=question.tools,
                add_generation_prompt=True,
                enable_thinking=question.thinking,
                tokenize=True,
            )
        }
        for question in questions
    ]
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    return [output.outputs[0].text for output in outputs]
