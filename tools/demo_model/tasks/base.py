"""What every demo task is built from: a problem, and phrases with natural variety. Knows no task."""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

from bench.demo import Check

from .words import number_words

Split = Literal["train", "eval"]

EVAL_ONE_IN = 16
"""One problem in this many is held out: never trained on, only evaluated."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One user turn with its reference answer.

    Attributes:
        key: what identifies the problem whatever its wording; its hash decides the split. Empty: common knowledge
            (2 + 2, "count to ten"), which is only ever trained on.
        user: what the user says.
        answer: the reference reply.
        check: how another reply is judged.
        thought: the reasoning that leads to `answer`, for a conversation that asks for it.
        conclusion: the reply after the thought, where it is shorter than `answer`.
    """

    key: str
    user: str
    answer: str
    check: Check
    thought: str
    conclusion: str = ""


def exact(*answers: str) -> Check:
    """A check that accepts any of `answers`, word for word."""
    return Check("exact", answers)


def number(value: int) -> Check:
    """A check that accepts any text whose last number is `value`."""
    return Check("number", (str(value),))


def split_of(key: str) -> Split:
    """The split a problem belongs to, by a hash of its key; the same on every machine."""
    return "eval" if key and zlib.crc32(key.encode()) % EVAL_ONE_IN == 0 else "train"


_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")


@cache
def _parts(pattern: str) -> tuple[tuple[str, ...], ...]:
    pieces = _ALTERNATIVES.split(pattern)
    return tuple(tuple(piece.split("|")) if index % 2 else (piece,) for index, piece in enumerate(pieces))


def expand(rng: random.Random, pattern: str) -> str:
    """`pattern` with each `{one|two}` replaced by one of its alternatives."""
    return "".join(part[0] if len(part) == 1 else rng.choice(part) for part in _parts(pattern)).strip()


@cache
def _slot_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(r"\$(" + "|".join(sorted(names, key=len, reverse=True)) + ")")


def fill(text: str, slots: dict[str, str]) -> str:
    """`text` with each `$name` replaced by its value."""
    if "$" not in text:
        return text
    return _slot_pattern(tuple(slots)).sub(lambda match: slots[match.group(1)], text)


def roughen(rng: random.Random, text: str) -> str:
    """`text` as people type it: at times in lower case, without the last mark, with a greeting or a please."""
    chance = rng.random()
    if chance < 0.18:
        text = text.lower()
    elif chance < 0.22 and text[:1].isupper():
        text = (
            rng.choice(("Hi, ", "Hello! ", "Hey, ", "Ok, ", "Now, ", "And now: ", "So, ")) + text[0].lower() + text[1:]
        )
    if text.endswith(("?", ".", "!")) and rng.random() < 0.2:
        text = text[:-1]
    if rng.random() < 0.04 and "please" not in text.lower() and not text.endswith(":") and "$" not in text[-4:]:
        text = text[:-1] + ", please" + text[-1] if text.endswith(("?", ".", "!")) else text + " please"
    return text


def misspell(rng: random.Random, text: str) -> str:
    """`text` with one slip of the fingers: a letter dropped, doubled, or swapped with the next."""
    places = [index for index in range(1, len(text) - 1) if text[index].isalpha() and text[index + 1].isalpha()]
    if not places:
        return text
    at = rng.choice(places)
    slip = rng.randrange(3)
    if slip == 0:
        return text[:at] + text[at + 1 :]
    if slip == 1:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def phrase(rng: random.Random, patterns: tuple[str, ...], **slots: str) -> str:
    """One of `patterns`, expanded and roughened, with its slots filled (the slots' own text is never altered)."""
    return fill(roughen(rng, expand(rng, rng.choice(patterns))), slots)


def sized(rng: random.Random, most: int) -> int:
    """A number of 1 to `most` digits, each length as likely."""
    digits = rng.randint(1, most)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def spoken(rng: random.Random, a: int, b: int) -> dict[str, str]:
    """The slots `a` and `b`: in digits, or small ones at times in words."""
    if a < 100 and b < 100 and rng.random() < 0.15:
        return {"a": number_words(a), "b": number_words(b)}
    return {"a": str(a), "b": str(b)}


def listing(items: list[str]) -> str:
    """`items` in one line, as answers give them."""
    return ", ".join(items)


def typed_list(rng: random.Random, items: list[str]) -> str:
    """`items` as a user may type them: with commas mostly, or spaces, an "and", or one a line."""
    style = rng.random()
    if style < 0.5:
        return ", ".join(items)
    if style < 0.55:
        return ", ".join(items) + "."
    if style < 0.62:
        return "[" + ", ".join(items) + "]"
    if style < 0.75:
        return " ".join(items)
    if style < 0.85 and len(items) > 1:
        return ", ".join(items[:-1]) + " and " + items[-1]
    if style < 0.93:
        return ",".join(items)
    return "\n" + "\n".join(items)
