"""The demo model's memory: facts told early in a conversation and asked for later.

Draws facts with their wordings; `examples` puts other turns between the telling and the asking. Knows no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import random
from dataclasses import dataclass

from .base import phrase
from .words import ANIMALS, COLOURS, DAYS, FOODS, JOBS, MONTHS, OBJECTS, any_city, any_name, any_word


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that the user tells.

    Attributes:
        topic: what it is about; one conversation has each topic once.
        value: the told value.
        told: the user's sentence.
        noted: the reply to it.
        asked: the later question.
        recalled: the reply to that question.
    """

    topic: str
    value: str
    told: str
    noted: str
    asked: str
    recalled: str


UNKNOWN = "You have not told me that yet."

_PERSONAL: dict[str, tuple[tuple[str, ...], str, tuple[str, ...], str]] = {
    "name": (
        (
            "{My name is|I am called|I'm called|Call me|You can call me|The name is} $v{.|!|}",
            "{Hello|Hi|Hey}{, |! }{my name is|I am called|call me} $v{.|!|}",
            "{I am|I'm} $v, {nice to meet you|pleased to meet you}{.|!}",
        ),
        "Nice to meet you, $v!",
        (
            "{What is|What's|Tell me|Do you remember|Do you know|Say} my name{?|}",
            "{What am I called|Who am I|How am I called}{?|}",
            "{Do you still know|Can you tell me} {my name|who I am}{?|}",
        ),
        "Your name is $v.",
    ),
    "city": (
        ("{I live in|My home is in|I come from|I am from|My city is|I'm from} $v{.|}",),
        "I will remember that you live in $v.",
        (
            "{Where do I live|Where am I from|Which city do I live in|In which city do I live|Where is my home|Where do I come from}{?|}",
        ),
        "You live in $v.",
    ),
    "job": (
        ("{I work as a|I am a|My job is|By profession I am a} $v{.|}",),
        "I will remember that your job is $v.",
        (
            "{What is my job|What's my job|What do I do for a living|What do I work as|What is my profession|Do you remember my job}{?|}",
        ),
        "Your job is $v.",
    ),
    "age": (
        ("{I am|I'm} $v years old{.|}", "My age is $v{.|}"),
        "I will remember that you are $v years old.",
        ("{How old am I|What is my age|Do you remember my age|Do you know how old I am}{?|}",),
        "You are $v years old.",
    ),
    "colour": (
        ("{My favourite colour is|My favorite color is|The colour I like best is} $v{.|}",),
        "I will remember that your favourite colour is $v.",
        (
            "{What is|What's|Do you remember|Tell me} my {favourite colour|favorite color}{?|}",
            "Which {colour|color} do I like best?",
        ),
        "Your favourite colour is $v.",
    ),
    "food": (
        ("{My favourite food is|My favorite food is|I like to eat|I love to eat} $v{.|}",),
        "I will remember that your favourite food is $v.",
        ("{What is|What's|Do you remember|Tell me} my {favourite|favorite} food{?|}", "What do I {like|love} to eat?"),
        "Your favourite food is $v.",
    ),
    "animal": (
        ("{My favourite animal is|My favorite animal is|The animal I like best is} the $v{.|}",),
        "I will remember that your favourite animal is the $v.",
        ("{What is|What's|Do you remember|Tell me} my {favourite|favorite} animal{?|}",),
        "Your favourite animal is the $v.",
    ),
    "dog": (
        ("{My dog is called|My dog's name is|I have a dog called|I have a dog named} $v{.|}",),
        "I will remember that your dog is called $v.",
        (
            "{What is|What's|Do you remember} my dog's name{?|}",
            "{What is my dog called|How is my dog called|What do I call my dog}{?|}",
        ),
        "Your dog is called $v.",
    ),
    "cat": (
        ("{My cat is called|My cat's name is|I have a cat called|I have a cat named} $v{.|}",),
        "I will remember that your cat is called $v.",
        (
            "{What is|What's|Do you remember} my cat's name{?|}",
            "{What is my cat called|How is my cat called|What do I call my cat}{?|}",
        ),
        "Your cat is called $v.",
    ),
    "sister": (
        ("{My sister is called|My sister's name is|I have a sister called|I have a sister named} $v{.|}",),
        "I will remember that your sister is called $v.",
        (
            "{What is|What's|Do you remember} my sister's name{?|}",
            "{What is my sister called|How is my sister called|Who is my sister}{?|}",
        ),
        "Your sister is called $v.",
    ),
    "brother": (
        ("{My brother is called|My brother's name is|I have a brother called|I have a brother named} $v{.|}",),
        "I will remember that your brother is called $v.",
        (
            "{What is|What's|Do you remember} my brother's name{?|}",
            "{What is my brother called|How is my brother called|Who is my brother}{?|}",
        ),
        "Your brother is called $v.",
    ),
    "birthday": (
        ("{My birthday is in|I was born in|My birthday falls in} $v{.|}",),
        "I will remember that your birthday is in $v.",
        (
            "{When is my birthday|In which month is my birthday|In which month was I born|Do you remember when my birthday is}{?|}",
        ),
        "Your birthday is in $v.",
    ),
    "number": (
        ("{My lucky number is|My favourite number is|My number is|Remember the number} $v{.|}",),
        "I will remember that your number is $v.",
        (
            "{What is|What's|Do you remember|Tell me} my {lucky number|favourite number|number}{?|}",
            "Which number did I {tell you|give you}?",
        ),
        "Your number is $v.",
    ),
    "code": (
        (
            "{The secret code is|The password is|The code is|Remember this code:|My password is|The secret word is} $v{.|}",
        ),
        "I will remember that the code is $v.",
        (
            "{What is|What's|Do you remember|Tell me|Repeat} the {secret code|password|code|secret word}{?|}",
            "Which {code|password} did I {tell you|give you}?",
        ),
        "The code is $v.",
    ),
    "meeting": (
        ("{My meeting is on|I have a meeting on|The meeting is on|My appointment is on} $v{.|}",),
        "I will remember that your meeting is on $v.",
        (
            "{When is my meeting|On which day is my meeting|When do I have a meeting|What day is my appointment|When is my appointment}{?|}",
        ),
        "Your meeting is on $v.",
    ),
}

_ATTRIBUTES = (
    "favourite colour",
    "favourite food",
    "city",
    "job",
    "dog",
    "number",
    "favourite word",
    "locker",
    "seat",
    "team",
)


def _code(rng: random.Random) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    return "".join(rng.choice(letters) for _ in range(rng.randint(4, 7))) if rng.random() < 0.5 else any_word(rng)


def _value(rng: random.Random, topic: str) -> str:
    if topic in ("name", "dog", "cat", "sister", "brother"):
        return any_name(rng)
    if topic == "city":
        return any_city(rng)
    if topic in ("number", "locker", "seat"):
        return str(rng.randint(1, 99999 if rng.random() < 0.5 else 99))
    if topic == "age":
        return str(rng.randint(5, 99))
    if topic == "code":
        return str(rng.randint(100, 999999)) if rng.random() < 0.4 else _code(rng)
    pools = {
        "job": JOBS,
        "colour": COLOURS,
        "favourite colour": COLOURS,
        "food": FOODS,
        "favourite food": FOODS,
        "animal": ANIMALS,
        "birthday": MONTHS,
        "meeting": DAYS,
    }
    return rng.choice(pools[topic]) if topic in pools else any_word(rng)


def personal_fact(rng: random.Random, topic: str) -> Fact:
    """A fact about the user, on `topic`."""
    told, noted, asked, recalled = _PERSONAL[topic]
    value = _value(rng, topic)
    return Fact(
        topic,
        value,
        phrase(rng, told, v=value),
        noted.replace("$v", value),
        phrase(rng, asked),
        recalled.replace("$v", value),
    )


def other_fact(rng: random.Random) -> Fact:
    """A fact about somebody or something else."""
    if rng.random() < 0.7:
        name, attribute = any_name(rng), rng.choice(_ATTRIBUTES)
        topic, value = f"{name}'s {attribute}", _value(rng, attribute)
    else:
        thing = rng.choice(OBJECTS)
        attribute = rng.choice(("colour", "number", "owner"))
        value = (
            rng.choice(COLOURS)
            if attribute == "colour"
            else any_name(rng)
            if attribute == "owner"
            else str(rng.randint(1, 9999))
        )
        topic = f"the {thing}'s {attribute}"
    capital = topic[0].upper() + topic[1:]
    told = phrase(
        rng,
        ("{Remember|Please remember|Note|Keep in mind} that $t is $v{.|}", "$c is $v{.|}"),
        t=topic,
        c=capital,
        v=value,
    )
    asked = phrase(rng, ("{What is|What's|Tell me|Do you remember} $t{?|}",), t=topic)
    return Fact(topic, value, told, f"I will remember that {topic} is {value}.", asked, f"{capital} is {value}.")


def draw_facts(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts on different topics."""
    facts: list[Fact] = []
    topics: set[str] = set()
    while len(facts) < count:
        fact = personal_fact(rng, rng.choice(list(_PERSONAL))) if rng.random() < 0.75 else other_fact(rng)
        if fact.topic not in topics:
            topics.add(fact.topic)
            facts.append(fact)
    return facts


def unknown_question(rng: random.Random, known: list[Fact]) -> str | None:
    """A question about a topic that none of `known` covers; the right reply is `UNKNOWN`."""
    open_topics = [topic for topic in _PERSONAL if topic not in {fact.topic for fact in known}]
    return phrase(rng, _PERSONAL[rng.choice(open_topics)][2]) if open_topics else None
