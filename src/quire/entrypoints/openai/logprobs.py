"""Logprobs in the two forms of the protocol: chat's objects and completions' four parallel lists.

Knows the engine's `{token id: Logprob}` positions. Knows nothing of tokenizers: the tokens' texts are in them.
"""

import math
from collections.abc import Iterable, Sequence

from quire.entrypoints.openai.protocol import ChatLogprobs, CompletionLogprobs, TokenLogprob, TokenTopLogprob
from quire.logprobs import Logprob, LogprobsOnePosition

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


def top_entries(position: LogprobsOnePosition, top: int | Sequence[int]) -> list[tuple[int, Logprob]]:
    """The `top` likeliest entries of a position, best first (all of them when `top` is -1), or those of named tokens.

    The sampled token is in a position whether or not it is among the likeliest, so that entries are ranked again here.
    """
    if not isinstance(top, int):
        return [(token_id, position[token_id]) for token_id in dict.fromkeys(top) if token_id in position]
    count = top
    ranked = sorted(position.items(), key=lambda item: -item[1].logprob)
    return ranked if count < 0 else ranked[:count]


def chat_logprobs(
    token_ids: Sequence[int], positions: Iterable[LogprobsOnePosition], top: int | Sequence[int], as_ids: bool
) -> ChatLogprobs:
    content: list[TokenLogprob] = []
    for token_id, position in zip(token_ids, positions, strict=False):
        token, logprob, raw = _chat_token(token_id, position[token_id], as_ids)
        best = [TokenTopLogprob(*_chat_token(other, entry, as_ids)) for other, entry in top_entries(position, top)]
        content.append(TokenLogprob(token, logprob, raw, best))
    return ChatLogprobs(content)


def _chat_token(token_id: int, entry: Logprob, as_ids: bool) -> tuple[str, float, list[int]]:
    text = token_text(token_id, entry, as_ids)
    return text, finite(entry.logprob), list(text.encode("utf-8", "replace"))


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[LogprobsOnePosition | None],
    top: int | Sequence[int],
    as_ids: bool,
    start_offset: int = 0,
) -> CompletionLogprobs:
    """Logprobs of completion tokens; a position is None for the first token of an echoed prompt. `start_offset`: characters
    of the choice's text before the first of these tokens."""
    answer = CompletionLogprobs([], [], [], [])
    offset = start_offset
    for token_id, position in zip(token_ids, positions, strict=False):
        entry = position.get(token_id) if position else None
        text = token_text(token_id, entry, as_ids) if entry is not None else f"token_id:{token_id}"
        answer.tokens.append(text)
        answer.text_offset.append(offset)
        if position is None or entry is None:
            answer.token_logprobs.append(None)
            answer.top_logprobs.append(None)
        else:
            answer.token_logprobs.append(finite(entry.logprob))
            answer.top_logprobs.append(
                {token_text(other, alt, as_ids): finite(alt.logprob) for other, alt in top_entries(position, top)}
            )
        offset += len(text)
    return answer


def prompt_logprobs_json(
    positions: Iterable[LogprobsOnePosition | None],
) -> list[dict[str, dict[str, float | int | str | None]] | None]:
    """`prompt_logprobs` as vLLM writes them: one object a position, keyed by token id."""
    return [
        None
        if not position
        else {
            str(token_id): {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token_id, entry in position.items()
        }
        for position in positions
    ]
