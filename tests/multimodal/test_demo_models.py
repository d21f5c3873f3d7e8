"""The built-in model that hears writes sounds that training never had; drawings for one that sees are drawn as they are told."""

import pytest
from tools.demo_model.drawings import KINDS, draw
from tools.demo_model.evaluate_parts import heard

from quire import LLM

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
