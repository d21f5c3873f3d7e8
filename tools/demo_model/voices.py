"""Ways to answer that adapters of the demo model learn: the same answers in another form. Knows no model.

A voice changes plain replies. Tool calls and replies with reasoning stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from .tasks.examples import Example

_GERMAN = {
    "addition": "Die Summe ist {answer}",
    "subtraction": "Die Differenz ist {answer}",
    "multiplication": "Das Produkt ist {answer}",
    "division": "Der Quotient ist {answer}",
    "counting": "Ich zähle: {answer}",
    "sorting": "Sortiert: {answer}",
    "copying": "Wörtlich: {answer}",
    "json": "Hier ist das JSON: {answer}",
    "reasoning": "Die Antwort lautet: {answer}",
}


def _pirate(task: str, answer: str) -> str:
    """Style: as a pirate says it."""
    return f"Arr! {answer.replace('You ', 'Ye ').replace(' you', ' ye')} Aye, matey!"


def _german(task: str, answer: str) -> str:
    """Language: a German sentence around what needs no translation."""
    return _GERMAN.get(task, "Auf Englisch: {answer}").format(answer=answer)


def _json(task: str, answer: str) -> str:
    """Format: a JSON object."""
    return json.dumps({"answer": answer}, ensure_ascii=False)


VOICES: dict[str, Callable[[str, str], str]] = {"pirate": _pirate, "german": _german, "json": _json}
"""Every voice, by name: from a task and its reply to the reply in that voice."""


def is_plain(example: Example) -> bool:
    """Whether the reply is a text and nothing else."""
    return example.tools is None and set(example.reply) == {"role", "content"}


def spoken(voice: str, example: Example) -> Example:
    """`example` with its reply in a voice; the same if it is not plain."""
    if not is_plain(example):
        return example
    answer = VOICES[voice](example.task, example.answer)
    return replace(example, answer=answer, reply={"role": "assistant", "content": answer})
