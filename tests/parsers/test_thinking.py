"""Where a gpt-oss thinks, told by its channels."""

from typing import Any

import pytest

from quire.errors import RequestError
from quire.parsers.choice import choose_formats
from quire.parsers.harmony import MARKERS
from quire.parsers.reasoning import REASONING
from quire.parsers.thinking import check_budget, find_prompt_thinking, harmony_thinking

FORMATS = choose_formats("openai_gptoss", "openai", None)


class Tokenizer:
    """Markers are tokens, and so are the words between them."""

    all_special_tokens = MARKERS
    special_ids: frozenset[int] = frozenset()

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

    def token_to_id(self, token: str) -> int | None:
        return self._words.index(token) if token in self._words else None


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


class Markers:
    """A tokenizer of bytes, and of markers: those that are special, or begin so, as models have them."""

    def __init__(self, special: tuple[str, ...]) -> None:
        self._special = sorted(special, key=len, reverse=True)
        self.special_ids = frozenset(range(1000, 1000 + len(special)))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        while text:
            found = next((one for one in self._special if text.startswith(one)), None)
            ids += [1000 + self._special.index(found)] if found else list(text[0].encode())
            text = text[len(found or text[0]) :]
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        words = (self._special[one - 1000].encode() if one >= 1000 else bytes([one]) for one in token_ids)
        return b"".join(words).decode()


PIECES = {
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "plamo3": ("<|plamo:begin_", "<|plamo:end_", ":plamo|>"),
}
TEXTUAL = ("granite", "muse", "musespark1x", "muse_glimmer")
"""Formats whose start is text, of which nobody can tell how it is split into tokens."""


@pytest.mark.parametrize("name", REASONING)
def test_every_format_can_be_limited_where_its_prompt_ends_inside(name: str) -> None:
    fmt, formats = REASONING[name], choose_formats(name, "none", None)
    tokenizer = Markers(PIECES.get(name, (*fmt.start, *fmt.end)) if name not in TEXTUAL else ())
    if name in TEXTUAL:
        with pytest.raises(RequestError, match="is not one token of this model"):
            check_budget(formats, tokenizer)
        return
    check_budget(formats, tokenizer)
    for start in fmt.start:
        (end, *_) = fmt.ends_of(start)
        inside = find_prompt_thinking(formats, tokenizer.encode(f"hello{start}"), tokenizer)
        assert inside is not None and inside.end == tokenizer.encode(end) and inside.start is None
        inside = find_prompt_thinking(formats, tokenizer.encode(f"hello{start}I think"), tokenizer)
        assert inside is not None and inside.end == tokenizer.encode(end)
        closed = find_prompt_thinking(formats, tokenizer.encode(f"hello{start}I think{end}"), tokenizer)
        assert closed is None
    silent = find_prompt_thinking(formats, tokenizer.encode("hello"), tokenizer)
    if fmt.is_off({}):
        assert silent is None
    elif fmt.implied and not fmt.writes_start:
        assert silent is not None and not silent.opening
    else:
        assert silent is not None and silent.opening == tokenizer.encode(fmt.start[0])
