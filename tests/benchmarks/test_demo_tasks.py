"""The demo tasks are deterministic, keep their splits apart, judge rightly, and are rendered by the shipped template."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from quire.benchmarks.demo_base import Check, split_of
from quire.benchmarks.demo_tasks import TASKS, Example, eval_examples, generate, is_correct, training_example

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "src" / "quire" / "assets" / "demo"


def load_rendering() -> ModuleType:
    """`tools/demo_model/rendering.py`, which is no package."""
    spec = importlib.util.spec_from_file_location("demo_rendering", ROOT / "tools" / "demo_model" / "rendering.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judged_by(check: Check) -> Example:
    return Example("chat", [], None, False, {}, "", check, "")


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_gives_the_same_example_every_time(task: str) -> None:
    assert [generate(task, seed, "eval") for seed in range(5)] == [generate(task, seed, "eval") for seed in range(5)]


@pytest.mark.parametrize("task", TASKS)
def test_the_splits_share_no_problem(task: str) -> None:
    held_out = {example.key for example in eval_examples(task, 30)}
    trained = {generate(task, seed, "train").key for seed in range(300)}
    assert "" not in held_out
    assert all(split_of(key) == "eval" for key in held_out)
    assert all(split_of(key) == "train" for key in trained)


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_examples_differ_from_each_other(task: str) -> None:
    examples = eval_examples(task, 30)
    assert len({json.dumps(example.messages) for example in examples}) == 30
    assert eval_examples(task, 10) == examples[:10]


@pytest.mark.parametrize("task", TASKS)
def test_the_reference_answer_is_correct_and_another_is_not(task: str) -> None:
    for example in eval_examples(task, 30):
        assert is_correct(example, example.answer)
        assert is_correct(example, f"<think>\nLet me see: 1, 2, 3.\n</think>\n\n{example.answer}<|im_end|>")
        assert not is_correct(example, "")
        assert not is_correct(example, "I would rather not say: -1")


def test_a_number_is_judged_by_the_last_one_in_the_text() -> None:
    example = judged_by(Check("number", ("42",)))
    assert is_correct(example, "12 + 30 = 42.")
    assert not is_correct(example, "42 or 43")


def test_json_is_judged_by_its_value() -> None:
    example = judged_by(Check("json", ('{"name": "Ana", "age": 31}',)))
    assert is_correct(example, '{"age":31,"name":"Ana"}')
    assert not is_correct(example, '{"name": "Ana", "age": "31"}')
    assert not is_correct(example, '{"name": "Ana"')


def test_tool_calls_are_judged_by_name_and_arguments() -> None:
    example = judged_by(Check("tool_call", ('[{"name": "get_time", "arguments": {"city": "Oslo"}}]',)))
    assert is_correct(example, '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_time"}\n</tool_call>')
    assert not is_correct(example, '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>')
    assert not is_correct(example, '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}\n</tool_call>')


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="addition"):
        generate("cooking", 0)


def test_training_covers_every_task() -> None:
    assert {training_example(seed).task for seed in range(300)} == set(TASKS)


def test_the_shipped_template_is_the_one_that_training_renders() -> None:
    rendering = load_rendering()
    config = json.loads((ASSETS / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == rendering.template_source()


@pytest.mark.parametrize("task", TASKS)
def test_a_training_document_is_the_prompt_followed_by_the_answer(task: str) -> None:
    rendering = load_rendering()
    template = rendering.compile_template(rendering.template_source())
    for example in eval_examples(task, 20):
        document = rendering.render_document(template, example)
        assert document == f"{rendering.render_prompt(template, example)}{example.answer}<|im_end|>\n"
