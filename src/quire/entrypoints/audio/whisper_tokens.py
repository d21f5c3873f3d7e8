"""What Whisper's tokens mean: tasks, languages, times. A model writes what its prompt's special tokens ask for.

Robust Speech Recognition via Large-Scale Weak Supervision (https://arxiv.org/abs/2212.04356), section 2.3.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from quire.entrypoints.http.errors import bad_field, bad_request
from quire.tokenizers.interface import Tokenizer

STEP_S = 0.02
"""Seconds between two neighbouring timestamps."""
_LANGUAGE = re.compile(r"[a-z]{2,3}")
START, NO_TIMES, PREVIOUS, NO_SPEECH = "startoftranscript", "notimestamps", "startofprev", "nospeech"


class Span(NamedTuple):
    """Tokens of text between two times, in seconds of the part that was heard; `first`: the place of the first of them among
    all tokens. Without an end, the part ended first."""

    start: float
    end: float | None
    token_ids: list[int]
    first: int


class WhisperTokens:
    """The special tokens of one model.

    Raises:
        HTTPError: a 400; the model's tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        if self._id(START) is None or self._id(NO_TIMES) is None:
            raise bad_request("The model does not transcribe: its tokenizer has no tokens for it.", param="model")
        self.start, self.first_time = self._named(START), self._named(NO_TIMES) + 1
        self.no_speech = self._id(NO_SPEECH)
        if self.no_speech is None:
            self.no_speech = self._id("nocaptions")
        self.languages = self._find_languages()

    def _id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(f"<|{name}|>")

    def _named(self, name: str) -> int:
        found = self._id(name)
        if found is None:
            raise bad_request(f"The model has no token <|{name}|>.", param="model")
        return found

    def _find_languages(self) -> dict[str, int]:
        """By code: what stands between the start and the tasks. English models have none."""
        last = self._id("translate")
        found: dict[str, int] = {}
        for token_id in range(self.start + 1, self.start + 1 if last is None else last):
            name = (self._tokenizer.id_to_token(token_id) or "").removeprefix("<|").removesuffix("|>")
            if _LANGUAGE.fullmatch(name):
                found[name] = token_id
        return found

    def language_id(self, code: str, field: str = "language") -> int:
        """Raises HTTPError: a 400; the model does not know the language."""
        if code.lower() not in self.languages:
            known = ", ".join(sorted(self.languages)) or "none: the model knows English alone"
            raise bad_field(field, f"{code[:40]!r} is not known; known: {known}.")
        return self.languages[code.lower()]

    def prompt(self, language: str | None, task: str, before: str | None, *, has_times: bool) -> list[int]:
        """A decoder's prompt. `before`: text that is written as if it had come before."""
        token_ids: list[int] = []
        if before:
            token_ids += [self._named(PREVIOUS), *self._tokenizer.encode(" " + before.strip(), False)]
        token_ids.append(self.start)
        if self.languages and language is not None:
            token_ids += [self.language_id(language), self._named(task)]
        return [*token_ids, self.first_time if has_times else self.first_time - 1]

    def text(self, token_ids: Sequence[int]) -> str:
        """What is written, without times and other special tokens."""
        special = {self.start, *self.languages.values()}
        return self._tokenizer.decode(
            [token for token in token_ids if token < self.first_time and token not in special], skip_special_tokens=True
        )

    def spans(self, token_ids: Sequence[int]) -> list[Span]:
        """The parts between times. The prompt ends with the time 0."""
        spans: list[Span] = []
        start, open_ids, first = 0.0, list[int](), 0
        for place, token_id in enumerate(token_ids):
            if token_id < self.first_time:
                first = first if open_ids else place
                open_ids.append(token_id)
                continue
            time = (token_id - self.first_time) * STEP_S
            if open_ids:
                spans.append(Span(start, max(start, time), open_ids, first))
                open_ids = []
            start = max(start, time)
        return [*spans, Span(start, None, open_ids, first)] if open_ids else spans
