"""The demo tasks are deterministic, keep their splits apart, judge rightly, and are rendered by the shipped template."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from bench.demo import is_correct
from tools.demo_model import questions, rendering
from tools.demo_model.tasks.base import split_of
from tools.demo_model.tasks.examples import TASKS, eval_examples, generate, training_example

ASSETS = Path(__file__).resolve().parents[2] / "src" / "quire" / "assets" / "demo"


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


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="addition"):
        generate("cooking", 0)


def test_training_covers_every_task() -> None:
    assert {training_example(seed).task for seed in range(300)} == set(TASKS)


def test_the_shipped_template_is_the_one_that_training_renders() -> None:
    config = json.loads((ASSETS / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == rendering.template_source()


@pytest.mark.parametrize("task", TASKS)
def test_a_training_document_is_the_prompt_followed_by_the_answer(task: str) -> None:
    template = rendering.compile_template(rendering.template_source())
    for example in eval_examples(task, 20):
        document = rendering.render_document(template, example)
        assert document == f"{rendering.render_prompt(template, example)}{example.answer}<|im_end|>\n"


def test_the_packages_questions_are_the_ones_that_the_tasks_give() -> None:
    lines = gzip.decompress(questions.FILE.read_bytes()).decode().splitlines()
    assert len(lines) == 200 * len(TASKS)
    for place, task in enumerate(TASKS):
        assert lines[200 * place :][:10] == questions.frozen(task, 10)
    assert questions.FILE.stat().st_size < 300 << 10
