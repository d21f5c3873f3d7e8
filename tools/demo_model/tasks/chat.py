"""Small talk and small facts for the demo model: what people say first, and what it answers.

The intents are in `intents`. The wording decides the split, so an evaluated question is one that training has
never shown in these words. Knows no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import random
from functools import lru_cache

from .base import Problem, exact, expand, fill, misspell, roughen
from .intents import INTENTS
from .words import (
    ADJECTIVES,
    ANIMALS,
    CAPITALS,
    CITIES,
    COLOURS,
    COUNTRIES,
    DAYS,
    FOODS,
    FRUITS,
    JOBS,
    MONTHS,
    OBJECTS,
    any_city,
    any_name,
    any_word,
    invented_word,
    listed,
    number_words,
    plural,
    table,
)

_ANTONYMS = table(
    """big=small|hot=cold|fast=slow|tall=short|long=short|wide=narrow|deep=shallow|heavy=light|wet=dry|new=old
|young=old|early=late|clean=dirty|quiet=loud|bright=dark|soft=hard|smooth=rough|sharp=dull|sweet=sour|happy=sad|brave=shy
|busy=lazy|empty=full|rich=poor|strong=weak|simple=complex|ancient=modern|polite=rude|honest=dishonest|huge=tiny|up=down
|left=right|in=out|on=off|open=closed|good=bad|day=night|yes=no|first=last|high=low|true=false|win=lose|buy=sell|give=take
|push=pull|start=stop|love=hate|north=south|east=west|summer=winter|hello=goodbye|black=white|before=after"""
)
_SOUNDS = table(
    "cat=meow|dog=woof|cow=moo|horse=neigh|sheep=baa|pig=oink|duck=quack|bee=buzz|lion=roar|owl=hoot|frog=ribbit|mouse=squeak|wolf=howl|snake=hiss"
)
_LEGS = table(
    "cat=4|dog=4|cow=4|horse=4|sheep=4|pig=4|lion=4|spider=8|ant=6|bee=6|beetle=6|duck=2|hen=2|eagle=2|snake=0|octopus=8|crab=10|frog=4|human=2|bird=2|fish=0|butterfly=6|elephant=4|tiger=4|table=4|whale=0"
)
_KINDS = {"fruit": FRUITS, "animal": ANIMALS, "food": FOODS}


@lru_cache(maxsize=1)
def intents() -> tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]:
    """`INTENTS`, parsed: for each intent its ways to ask and its answers."""
    blocks = [block.strip().split("\n") for block in INTENTS.strip().split("\n\n")]
    return tuple(
        (
            tuple(line[2:] for line in block if line.startswith("? ")),
            tuple(line[2:] for line in block if line.startswith("! ")),
        )
        for block in blocks
    )


def _key(asked: str) -> str:
    return "chat " + "".join(letter for letter in asked.lower() if letter.isalnum() or letter == " ").strip()


def _typed(rng: random.Random, asked: str, slots: dict[str, str]) -> str:
    """`asked` as somebody types it; the slots stay as they are."""
    text = roughen(rng, asked)
    if "$" not in text and rng.random() < 0.08:
        text = misspell(rng, text)
    text = fill(text, slots)
    return text.lower() if rng.random() < 0.06 else text


def chat(rng: random.Random) -> Problem:
    """Small talk, a question about the model or the engine, a small fact, or a question that it cannot answer."""
    if rng.random() < 0.25:
        return _fact(rng)
    questions, answers = rng.choice(intents())
    asked = expand(rng, rng.choice(questions))
    slots: dict[str, str] = {}
    if "$" in asked:
        sentence = " ".join(any_word(rng) for _ in range(rng.randint(3, 9)))
        slots = {
            "sentence": sentence[0].upper() + sentence[1:],
            "topic": rng.choice(
                (
                    any_word(rng),
                    plural(rng.choice(ANIMALS)),
                    f"the {any_word(rng)}",
                    f"{any_word(rng)} and {any_word(rng)}",
                    any_city(rng),
                    f"my {any_word(rng)}",
                )
            ),
            "city": any_city(rng),
            "place": rng.choice(COUNTRIES),
            "person": f"{any_name(rng)} {invented_word(rng).capitalize()}" if rng.random() < 0.7 else any_name(rng),
            "thing": rng.choice(FOODS + OBJECTS),
            "things": ", ".join(rng.sample(FOODS + OBJECTS, rng.randint(2, 4))),
            "adjective": rng.choice(ADJECTIVES),
            "number": str(rng.randint(0, 9999)),
            "invented": invented_word(rng),
        }
    key = _key(fill(asked, slots))
    return Problem(
        key,
        _typed(rng, asked, slots),
        rng.choice(answers),
        exact(*answers),
        "This is small talk; I answer in one sentence.",
    )


def _fact(rng: random.Random) -> Problem:
    """A question about something out of a small table."""
    asked, answer, slots = rng.choice(
        (
            _capital,
            _capital,
            _capital,
            _country,
            _opposite,
            _sound,
            _legs,
            _next_in_line,
            _kind,
            _what_is,
            _what_is,
            _some,
            _some,
            _prime,
            _rhythm,
        )
    )(rng)
    return Problem(
        _key(fill(asked, slots)), _typed(rng, asked, slots), answer, exact(answer), "This is a fact that I know."
    )


_Fact = tuple[str, str, dict[str, str]]


def _capital(rng: random.Random) -> _Fact:
    country = rng.choice(list(CAPITALS))
    asked = expand(
        rng,
        rng.choice(
            (
                "{What is|What's|Which city is|Tell me|Name|Do you know|Give me|Can you tell me|And what is|I need} the capital {|city }of $c{?|, please?|}",
                "{What is|What's|Name} $c's capital{ city|}{?|, please?|}",
                "{Capital of|The capital of} $c{?|, please|}",
                "Which city is $c's capital{?|}",
            )
        ),
    )
    return (
        asked,
        f"The capital of {country} is {CAPITALS[country]}{'' if CAPITALS[country].endswith('.') else '.'}",
        {"c": country},
    )


def _country(rng: random.Random) -> _Fact:
    country = rng.choice([name for name in CAPITALS if name != "England"])
    city = CAPITALS[country]
    asked = expand(
        rng,
        "{Which country is|What country is|Of which country is|Which country has|In which country is|Where is} $c{ the capital of| the capital| as its capital|}{?|}",
    )
    return asked, f"{city} is the capital of {country}.", {"c": city}


def _opposite(rng: random.Random) -> _Fact:
    word = rng.choice(list(_ANTONYMS))
    asked = expand(
        rng,
        rng.choice(
            (
                "{What is|What's|Tell me|Give me|Name|And} the opposite of {|the word }$w{?|, please?|}",
                "{Opposite|Antonym} of $w{?|}",
            )
        ),
    )
    return asked, f"The opposite of {word} is {_ANTONYMS[word]}.", {"w": word}


def _sound(rng: random.Random) -> _Fact:
    animal = rng.choice(list(_SOUNDS))
    asked = expand(
        rng,
        rng.choice(
            (
                "{What sound|Which sound|What noise} does {a|the} $a make{?|, please?|}",
                "{What does|How does} {a|the} $a {say|sound}{?|, please?|}",
            )
        ),
    )
    return asked, f"The {animal} says {_SOUNDS[animal]}.", {"a": animal}


def _legs(rng: random.Random) -> _Fact:
    animal = rng.choice(list(_LEGS))
    article = "an" if animal[0] in "aeo" else "a"
    asked = expand(
        rng,
        rng.choice(
            (
                f"How many legs does {{{article}|the}} $a have{{?|, please?|}}",
                f"{{Number of legs of|Tell me the number of legs of}} {article} $a{{?|.|}}",
            )
        ),
    )
    count = _LEGS[animal]
    return asked, f"{article.capitalize()} {animal} has {count if count != '0' else 'no'} legs.", {"a": animal}


def _next_in_line(rng: random.Random) -> _Fact:
    line, name = rng.choice(((DAYS, "day"), (MONTHS, "month"), (list("abcdefghijklmnopqrstuvwxyz"), "letter")))
    at = rng.randrange(len(line))
    if rng.random() < 0.65:
        if name == "letter" and at == 25:
            at = 0
        after = line[(at + 1) % len(line)]
        return (
            expand(
                rng, "{What|Which $n|What $n} {comes|is|follows} {after|right after|directly after} $x{?|, please?|}"
            ).replace("follows after", "follows"),
            f"After {line[at]} comes {after}.",
            {"x": line[at], "n": name},
        )
    if name == "letter" and at == 0:
        at = 1
    return (
        expand(rng, "{What|Which $n|What $n} {comes|is} {before|right before|directly before} $x{?|, please?|}"),
        f"Before {line[at]} comes {line[at - 1]}.",
        {"x": line[at], "n": name},
    )


def _kind(rng: random.Random) -> _Fact:
    name = rng.choice(list(_KINDS))
    word = rng.choice(_KINDS[name])
    if rng.random() < 0.5:
        asked = expand(rng, "{Is|Tell me, is} {a |}$w {a|an|a kind of|some kind of} $n{?|}")
        return asked, f"Yes, {word} is a kind of {name}.", {"w": word, "n": name}
    other = rng.choice([kind for kind in ("tool", "city", "number", "planet", "colour", "month") if kind != name])
    if word == "orange" and other == "colour":
        other = "planet"
    asked = expand(rng, "{Is|Tell me, is} {a |}$w {a|an|a kind of|some kind of} $n{?|}")
    return (
        asked,
        f"No, {word} is a kind of {'food' if word in FOODS else 'fruit' if word in FRUITS else 'animal'}.",
        {"w": word, "n": other},
    )


def _what_is(rng: random.Random) -> _Fact:
    """What sort of thing a word names."""
    name, pool = rng.choice(
        (
            ("a fruit", FRUITS),
            ("an animal", ANIMALS),
            ("a food", FOODS),
            ("a thing that people use", OBJECTS),
            ("a job", JOBS),
            ("a colour", COLOURS),
            ("a city", list(CITIES)),
            ("a country", list(COUNTRIES)),
            ("a day of the week", DAYS),
            ("a month", MONTHS),
        )
    )
    word = rng.choice(pool)
    if word == "orange":
        word = "fig" if name == "a fruit" else "teal"
    article = (
        ""
        if name in ("a food", "a colour", "a city", "a country", "a day of the week", "a month")
        else "an "
        if word[0] in "aeiou"
        else "a "
    )
    asked = expand(
        rng,
        "{What is|What's|What is|Define|Tell me what} $w{?| is?|}"
        if not article
        else "{What is|What's|Define|Explain} $w{?|}",
    ).replace("Tell me what $w?", "What is $w?")
    subject = article + word
    return asked, f"{subject[0].upper()}{subject[1:]} is {name}.", {"w": subject}


_SOME = {
    "colours": listed("red green blue yellow white black orange pink brown purple"),
    "fruits": listed("apple pear fig banana cherry plum grape lemon mango peach"),
    "animals": listed("cat dog owl horse cow fox bear lion tiger wolf"),
    "countries": listed("France Italy Japan Brazil Egypt Canada India Kenya Spain Norway"),
    "cities": listed("Paris Rome Tokyo London Cairo Berlin Madrid Oslo Lima Vienna"),
    "names": listed("Ana Ben Clara David Elena Felix Grace Hugo Iris Jonas"),
    "words": listed("quire paper book page ink press sheet spine cover margin"),
    "jobs": listed("baker teacher doctor farmer pilot writer painter singer nurse cook"),
    "foods": listed("bread cheese rice soup pasta egg honey cake salad pizza"),
    "numbers": listed("1 2 3 4 5 6 7 8 9 10"),
}


def _some(rng: random.Random) -> _Fact:
    """The first few of a kind."""
    kind = rng.choice(list(_SOME))
    count = rng.choice((1, 2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 9, 10))
    spelled = str(count) if rng.random() < 0.6 else number_words(count)
    named = {"colours": rng.choice(("colours", "colors")), "foods": rng.choice(("foods", "kinds of food"))}.get(
        kind, kind
    )
    if count == 1:
        asked = expand(rng, "{Name|Give me|Tell me|Say} one of the $k{.|, please.|}")
    else:
        asked = expand(
            rng,
            "{Name|List|Give me|Tell me|Say|Write|Show me|Can you name|Can you list|I need|Write down|Give me a list of|Make a list of} $n {|different |}$k{.|, please.|}",
        )
    return asked, ", ".join(_SOME[kind][:count]), {"n": spelled, "k": named}


def _prime(rng: random.Random) -> _Fact:
    """Whether a number up to 200 is prime."""
    value = (
        rng.randint(2, 200)
        if rng.random() < 0.5
        else rng.choice([n for n in range(2, 200) if all(n % d for d in range(2, n))])
    )
    divisor = next((d for d in range(2, value) if value % d == 0), None)
    asked = expand(rng, "{Is|Tell me, is|Is the number} $x {prime|a prime|a prime number}{?|}")
    if divisor is None:
        return asked, f"Yes, {value} is a prime number.", {"x": str(value)}
    return asked, f"No, {value} = {divisor} × {value // divisor}.", {"x": str(value)}


def _rhythm(rng: random.Random) -> _Fact:
    """Even or odd, the number before or after, the plural."""
    choice = rng.randrange(4)
    value = rng.randint(1, 300)
    if choice == 0:
        asked = expand(rng, "{Is|Tell me, is|Is the number} $x {even or odd|odd or even|even|odd}{?|}")
        return asked, f"{value} is {'odd' if value % 2 else 'even'}.", {"x": str(value)}
    if choice == 1:
        asked = expand(rng, "{What number|Which number|What} comes {after|right after} $x{?|}")
        return asked, f"After {value} comes {value + 1}.", {"x": str(value)}
    if choice == 2:
        small = rng.randint(0, 99)
        asked = expand(rng, "{Write|Say|Spell} {the number |}$x {in words|as a word|in letters}{.|}")
        return asked, number_words(small), {"x": str(small)}
    noun = rng.choice([word for word in FRUITS + OBJECTS if word not in ("knife", "mouse", "paper", "scarf")])
    asked = expand(rng, "{What is|What's|Give me|Tell me} the plural of {|the word }$x{?|, please?|}")
    return asked, f"The plural of {noun} is {plural(noun)}.", {"x": noun}
