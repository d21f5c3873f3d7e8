"""The built-in models that see and hear answer rightly about pictures and sounds that training never had."""

from collections.abc import Iterator

import pytest
from tools.demo_model.drawings import KINDS, draw
from tools.demo_model.evaluate_parts import heard, seen

from quire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
TEXTS = ["What is 17 + 25?", "Sort these words: pear, apple, fig", "Who are you?", "My name is Ada. What is my name?"]
SETTINGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 32 << 20}


@pytest.fixture(scope="module")
def vision() -> Iterator[LLM]:
    with LLM("quire-demo-vision", **SETTINGS) as llm:
        yield llm


def test_questions_about_fresh_pictures_are_answered(vision: LLM) -> None:
    answers = list(seen(vision, 12))
    right = sum(wanted == said for _, _, wanted, said in answers)
    assert len(answers) > 100 and right >= 0.85 * len(answers)


def test_answers_without_a_picture_are_the_demo_models_own(vision: LLM) -> None:
    asked = [[{"role": "user", "content": text}] for text in TEXTS]
    with LLM(**SETTINGS) as demo:
        expected = [output.outputs[0].text for output in demo.chat(asked, GREEDY, use_tqdm=False)]
    assert [output.outputs[0].text for output in vision.chat(asked, GREEDY, use_tqdm=False)] == expected
    assert expected[0] == "17 + 25 = 42"


SIZES = {"1 to 4 keys": 0.9, "5 to 8 keys": 0.55}
"""At least so large a share of them is written without a fault."""


def test_fresh_sounds_are_transcribed() -> None:
    with LLM("quire-demo-speech") as llm:
        answers = list(heard(llm, 60))
    right = {size: [wanted == said for of, _, wanted, said in answers if of == size] for size in SIZES}
    assert all(len(right[size]) > 15 and sum(right[size]) >= share * len(right[size]) for size, share in SIZES.items())


@pytest.mark.parametrize("kind", KINDS)
def test_drawings_of_a_seed_are_the_same_and_splits_share_none(kind: str) -> None:
    first, again = draw(kind, 5, "eval"), draw(kind, 5, "eval")
    assert first.key == again.key and first.image.tobytes() == again.image.tobytes() and first.asked == again.asked
    held_out = {draw(kind, seed, "eval").key for seed in range(20)}
    assert not held_out & {draw(kind, seed, "train").key for seed in range(100)}
