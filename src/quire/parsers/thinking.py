"""Where an answer is still thinking, as token ids: for what is asked of the answer alone, and for budgets of thoughts.

Knows formats and tokenizers. Whether a request thinks at all is its reader's business.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from quire.errors import RequestError
from quire.parsers.choice import AnswerFormats, reasoning_of_request
from quire.parsers.reasoning import Reasoning
from quire.sampling_params import Thinking

_TURN, _ANALYSIS, _ANSWER = "<|end|><|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
_OTHER_CHANNELS = ("<|channel|>final", "<|channel|>commentary")

PROMPT_END = 24
"""Tokens of a prompt's end that are looked at: a template's opening of an answer is shorter."""


class _Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class _Decoder(_Tokenizer, Protocol):
    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str: ...


def marker_ids(marker: str, tokenizer: _Tokenizer) -> list[int] | None:
    """The tokens of a marker that a model writes as the same tokens everywhere: one, or several of which the first is
    special. None for other markers: their tokens depend on the text around them."""
    found = tokenizer.encode(marker, add_special_tokens=False)
    special = getattr(tokenizer, "special_ids", ())
    return found if len(found) == 1 or (found and found[0] in special) else None


def build_thinking(reasoning: Reasoning, inside: bool | None, tokenizer: _Tokenizer) -> Thinking | None:
    """Where an answer thinks that begins inside its reasoning, or outside, or (None) as the format says; None where it does
    not, or where its beginning is no token of its own."""
    if inside is False:
        return None
    end = tokenizer.encode(reasoning.end[0], add_special_tokens=False)
    close = tokenizer.encode(reasoning.forced, add_special_tokens=False) if reasoning.forced else []
    if inside or reasoning.implied:
        return Thinking(end, close=close)
    start = marker_ids(reasoning.start[0], tokenizer)
    return None if start is None else Thinking(end, start[0], close, rest=start[1:])


def harmony_thinking(tokenizer: _Tokenizer, inside: bool = False, may_call: bool = False) -> Thinking:
    """Where a gpt-oss thinks: on its analysis channel, until a message begins on another.

    Args:
        inside: the output begins behind the header of such a message.
        may_call: where a budget is spent, the model chooses between an answer and a call; else its answer begins.
    """

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return Thinking(
        ids(_ANSWER),
        close=ids(_TURN + ("<|channel|>" if may_call else _OTHER_CHANNELS[0])),
        lead=[] if inside else ids(_ANALYSIS),
        over=[ids(channel) for channel in _OTHER_CHANNELS],
    )


def find_harmony_thinking(prompt_ids: Sequence[int], tokenizer: _Decoder, may_call: bool = False) -> Thinking | None:
    """The same, told by the prompt; None where the answer begins on another channel."""
    end = tokenizer.decode(list(prompt_ids[-PROMPT_END:]), skip_special_tokens=False)
    header = end.rpartition("<|start|>assistant")[2]
    if header == "":
        return harmony_thinking(tokenizer, may_call=may_call)
    inside = header.rpartition("<|channel|>")[2].startswith("analysis<|message|>") and "<|end|>" not in header
    return harmony_thinking(tokenizer, True, may_call) if inside else None


def check_budget(formats: AnswerFormats, tokenizer: _Tokenizer | None) -> None:
    """Whether a `thinking_token_budget` can be kept.

    Raises:
        RequestError: the model has none, or none that can be told by its tokens.
    """
    why = ""
    if tokenizer is None:
        why = "there is no tokenizer"
    elif formats.is_harmony:
        markers = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
        long = [marker for marker in markers if len(tokenizer.encode(marker, add_special_tokens=False)) != 1]
        why = f"{long[0]!r} is not one token of this model" if long else ""
    elif formats.reasoning is None:
        why = "no reasoning format is known for this model (--reasoning-parser)"
    elif marker_ids(formats.reasoning.start[0], tokenizer) is None:
        why = f"{formats.reasoning.start[0]!r} is not one token of this model"
    if why:
        raise RequestError(f"thinking_token_budget cannot be kept: {why}", param="thinking_token_budget")


def find_prompt_thinking(formats: AnswerFormats, prompt_ids: Sequence[int], tokenizer: _Decoder) -> Thinking | None:
    """Where the answer to a prompt thinks, told by the prompt alone.

    Raises:
        RequestError: as `check_budget`.
    """
    check_budget(formats, tokenizer)
    if formats.is_harmony or formats.reasoning is None:
        return find_harmony_thinking(prompt_ids, tokenizer)
    reasoning = formats.reasoning
    starts, ends = (
        [tokenizer.encode(marker, add_special_tokens=False) for marker in markers]
        for markers in (reasoning.start, reasoning.end)
    )
    started = [_last_place(prompt_ids, start) for start in starts]
    if max(started) > max(_last_place(prompt_ids, end) for end in ends):
        return build_thinking(reasoning.only(reasoning.start[started.index(max(started))]), True, tokenizer)
    prompt_end = tokenizer.decode(list(prompt_ids[-PROMPT_END:]), skip_special_tokens=False)
    reasoning, inside = reasoning_of_request(reasoning, prompt_end, {})
    return build_thinking(reasoning, inside, tokenizer)


def _last_place(token_ids: Sequence[int], wanted: list[int]) -> int:
    """The last place of some tokens; -1 where there is none."""
    count = len(wanted)
    places = (at for at in range(len(token_ids) - count, -1, -1) if token_ids[at] == wanted[0])
    return next((at for at in places if list(token_ids[at : at + count]) == wanted), -1)
