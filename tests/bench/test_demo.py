"""`python -m bench demo`: which of the frozen questions are asked, and how an answer is judged."""

from __future__ import annotations

import pytest
from bench.__main__ import main
from bench.demo import Check, Question, draw, held_out, is_correct


def asked(check: Check) -> Question:
    return Question("chat", [], None, False, check)


def test_a_number_is_judged_by_the_last_one_in_the_text() -> None:
    example = asked(Check("number", ("42",)))
    assert is_correct(example, "12 + 30 = 42.")
    assert not is_correct(example, "42 or 43")


def test_json_is_judged_by_its_value() -> None:
    example = asked(Check("json", ('{"name": "Ana", "age": 31}',)))
    assert is_correct(example, '{"age":31,"name":"Ana"}')
    assert not is_correct(example, '{"name": "Ana", "age": "31"}')
    assert not is_correct(example, '{"name": "Ana"')


def test_tool_calls_are_judged_by_name_and_arguments() -> None:
    example = asked(Check("tool_call", ('[{"name": "get_time", "arguments": {"city": "Oslo"}}]',)))
    assert is_correct(example, '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_time"}\n</tool_call>')
    assert not is_correct(example, '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>')
    assert not is_correct(example, '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo"}\n</tool_call>')


def test_each_task_has_different_questions_that_can_be_judged() -> None:
    for task, questions in held_out().items():
        assert len(questions) == len({str(question.messages) for question in questions}) == 200
        assert all(question.task == task and question.check.expected for question in questions)
        assert not any(is_correct(question, "I would rather not say: -1") for question in questions)


def test_the_seed_draws_which_questions_are_asked() -> None:
    everything = held_out()["sorting"]
    assert draw("sorting", 5, seed=0) == everything[:5]
    assert draw("sorting", 5, seed=1) == draw("sorting", 5, seed=1) != draw("sorting", 5, seed=2)
    drawn = [everything.index(question) for question in draw("sorting", 200, seed=7)]
    assert drawn != sorted(drawn) == list(range(200))


def test_more_questions_than_there_are_is_refused_with_the_most(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--num-examples", "201"]) == 2
    assert "num_examples: 201 is more than there are; at most 200 a task." in capsys.readouterr().err
