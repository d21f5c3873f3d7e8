"""Logprobs in the protocol's two layouts: chat's objects and completions' four parallel lists.

Knows the engine's `{token id: Logprob}` positions, whose first entry is the token itself; the tokens' texts are in them. Asks
the tokenizer for a token's bytes, and which tokens are special.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from quire.entrypoints.http.long_bodies import Made
from quire.entrypoints.openai.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TokenTopLogprob
from quire.logprobs import Logprob, LogprobsOnePosition
from quire.tokenizers.interface import Tokenizer
from quire.tokenizers.token_texts import bytes_of, texts_at

FEW_TOKENS = 64
"""Entries of so many tokens are made at once."""
LOWEST = -9999.0
"""JSON has no infinity; OpenAI and others write this for a token that cannot be sampled."""


def finite(logprob: float) -> float:
    """The logprob as a number that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST


def token_text(token_id: int, entry: Logprob, as_ids: bool) -> str:
    """How a token is written in an answer: its text, or `token_id:ID`."""
    if as_ids or entry.decoded_token is None:
        return f"token_id:{token_id}"
    return entry.decoded_token


def top_entries(position: LogprobsOnePosition, top: int) -> list[tuple[int, Logprob]]:
    """The `top` likeliest entries of a position, best first; all of them when `top` is -1.

    The sampled token is in a position whether or not it is among the likeliest, so that entries are ranked again here.
    """
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if top < 0 else ranked[:top]


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[LogprobsOnePosition],
    top: int | None,
    as_ids: bool,
    tokenizer: Tokenizer | None = None,
) -> ChatLogprobs:
    """Logprobs of chat tokens. `top`: how many of the likeliest tokens are shown; None: all of a position, sampled one first."""

    def write(pair: tuple[int, LogprobsOnePosition]) -> TokenLogprob:
        token_id, position = pair
        token, logprob, raw = _chat_token(token_id, position[token_id], as_ids, tokenizer)
        entries = top_entries(position, top) if top is not None else list(position.items())
        best = [TokenTopLogprob(*_chat_token(other, entry, as_ids, tokenizer)) for other, entry in entries]
        return TokenLogprob(token, logprob, raw, best)

    pairs = list(zip(token_ids, positions, strict=False))
    if len(pairs) <= FEW_TOKENS:
        return ChatLogprobs([write(pair) for pair in pairs])
    content: Any = Made(pairs, write)  # while the answer is written
    return ChatLogprobs(content)


def _chat_token(
    token_id: int, entry: Logprob, as_ids: bool, tokenizer: Tokenizer | None
) -> tuple[str, float, list[int]]:
    text = token_text(token_id, entry, as_ids)
    return text, finite(entry.logprob), list(bytes_of(tokenizer, token_id, entry.decoded_token or text))


class CompletionTokens:
    """Writes the logprobs of one choice of a completion, whose tokens may come in several parts.

    Args:
        top: how many of the likeliest tokens are shown beside a position's own; None: all that the position has.
        as_ids: tokens are written as `token_id:ID`.
        skips_special: special tokens leave no text in the choice.
    """

    def __init__(self, top: int | None, as_ids: bool, tokenizer: Tokenizer | None, skips_special: bool) -> None:
        self._top = top
        self._as_ids = as_ids
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skips_special and tokenizer is not None else frozenset[int]()
        self._offset = 0

    def write_prompt(
        self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None], prompt: str
    ) -> CompletionLogprobs:
        """Logprobs of an echoed prompt; there are none of its first token."""
        texts = list(self._texts(token_ids, positions))
        self._offset = len(prompt)
        return self._write(token_ids, positions, texts, _offsets(texts, prompt))

    def _texts(self, token_ids: Sequence[int], positions: Sequence[LogprobsOnePosition | None]) -> Iterator[str]:
        for token_id, position in zip(token_ids, positions, strict=False):
            entry = position.get(token_id) if position else None
            if entry is not None:
                yield entry.decoded_token or ""
            else:
                yield "" if self._tokenizer is None else texts_at(self._tokenizer, (), (token_id,))[0]

    def write(self, token_ids: Sequence[int], positions: Iterable[LogprobsOnePosition]) -> CompletionLogprobs:
        """Logprobs of the next tokens of the answer."""
        kept = list(positions)
        texts = list(self._texts(token_ids, kept))
        shown = [0 if token_id in self._hidden else len(text) for token_id, text in zip(token_ids, texts, strict=False)]
        *offsets, self._offset = itertools.accumulate(shown, initial=self._offset)
        return self._write(token_ids, kept, texts, offsets)

    def _write(
        self,
        token_ids: Sequence[int],
        positions: Sequence[LogprobsOnePosition | None],
        texts: Sequence[str],
        offsets: Sequence[int],
    ) -> CompletionLogprobs:
        """Of many tokens the lists are made when they are read: a long prompt's take many times what the engine keeps of it."""

        def entry_at(at: int) -> Logprob | None:
            return (positions[at] or {}).get(token_ids[at])

        def token_at(at: int) -> str:
            plain = Logprob(0.0, None, None if self._tokenizer is None else texts[at])
            return token_text(token_ids[at], entry_at(at) or plain, self._as_ids)

        def logprob_at(at: int) -> float | None:
            entry = entry_at(at)
            return None if entry is None else finite(entry.logprob)

        def best_at(at: int) -> dict[str, float] | None:
            return self._best(token_ids[at], positions[at])

        lists: list[Any] = [Made(range(len(texts)), make) for make in (token_at, logprob_at, best_at)]
        tokens, logprobs, best = lists if len(texts) > FEW_TOKENS else map(list, lists)
        return CompletionLogprobs(tokens, logprobs, best, [*offsets])

    def _best(self, token_id: int, position: LogprobsOnePosition | None) -> dict[str, float] | None:
        """The token's own logprob, and those of the alternatives that are shown; None where the model gave none."""
        if not position or token_id not in position:
            return None
        top = self._top
        others = position.items() if top is None else top_entries(position, top)
        best: dict[str, float] = {}
        for other, entry in ((token_id, position[token_id]), *others):
            best.setdefault(token_text(other, entry, self._as_ids), finite(entry.logprob))
        return best


def _offsets(texts: Sequence[str], whole: str) -> list[int]:
    """Where each token of an echoed prompt begins in its text. A token that the text does not show (one that begins every
    sequence) takes no space, and the first shown one may have lost its leading space."""
    offsets: list[int] = []
    place = 0
    for text in texts:
        offsets.append(place)
        if whole.startswith(text, place):
            place += len(text)
        elif not place and text.startswith(" ") and whole.startswith(text[1:]):
            place += len(text) - 1
    return offsets


def prompt_logprobs_json(positions: Sequence[LogprobsOnePosition | None]) -> Any:
    """`prompt_logprobs` as vLLM writes them: one object a position, keyed by token id, each made when it is written."""
    return Made(positions, _prompt_position)


def _prompt_position(position: LogprobsOnePosition | None) -> dict[str, dict[str, float | int | str | None]] | None:
    if not position:
        return None
    return {
        str(token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token_id, entry in position.items()
    }
