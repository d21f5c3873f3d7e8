"""Where a gpt-oss thinks, told by its channels."""

from typing import Any

import pytest

from quire.errors import RequestError
from quire.parsers.choice import choose_formats
from quire.parsers.harmony import MARKERS
from quire.parsers.thinking import check_budget, find_prompt_thinking, harmony_thinking

FORMATS = choose_formats("openai_gptoss", "openai", None)


class Tokenizer:
    """Markers are tokens, and so are the words between them."""

    all_special_tokens = MARKERS

    def __init__(self, *long: str) -> None:
        self._words: list[str] = []
        self._long = long

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        words: list[str] = []
        while text:
            marker = next((one for one in MARKERS if text.startswith(one)), None)
            end = min((at for one in MARKERS if (at := text.find(one)) > 0), default=len(text))
            word = marker or text[:end]
            words += list(word) if word in self._long else [word]
            text = text[len(word) :]
        self._words += [word for word in words if word not in self._words]
        return [self._words.index(word) for word in words]

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(self._words[token_id] for token_id in token_ids)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|start|>user<|message|>hi<|end|><|start|>assistant", False),
        ("<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>analysis<|message|>I think", True),
        ("<|start|>assistant<|channel|>analysis<|message|>I think<|end|><|start|>assistant", False),
        ("<|start|>assistant<|channel|>analysis<|message|>I think<|end|>", None),
        ("<|start|>assistant<|channel|>final<|message|>", None),
        ("no chat at all", None),
    ],
)
def test_a_prompt_tells_whether_the_output_begins_inside_its_thoughts(prompt: str, inside: bool | None) -> None:
    tokenizer = Tokenizer()
    found = find_prompt_thinking(FORMATS, tokenizer.encode(prompt), tokenizer)
    assert found == (None if inside is None else harmony_thinking(tokenizer, inside))


def test_what_closes_thoughts_is_what_the_model_would_write() -> None:
    tokenizer = Tokenizer()
    answer, call = harmony_thinking(tokenizer), harmony_thinking(tokenizer, may_call=True)
    turn = "<|end|><|start|>assistant<|channel|>"
    assert [tokenizer.decode(one.close) for one in (answer, call)] == [f"{turn}final", turn]
    assert tokenizer.decode(answer.lead) == "<|channel|>analysis<|message|>"
    assert [tokenizer.decode(one) for one in answer.over] == ["<|channel|>final", "<|channel|>commentary"]


def test_a_budget_needs_markers_that_are_tokens() -> None:
    check_budget(FORMATS, Tokenizer())
    with pytest.raises(RequestError, match=r"'<\|message\|>' is not one token"):
        check_budget(FORMATS, Tokenizer("<|message|>"))
