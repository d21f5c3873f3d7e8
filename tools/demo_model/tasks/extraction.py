"""The demo model's extraction into JSON: a sentence, labelled values or a list in; an object or an array out.

Draws one `Problem` from the generator of random numbers it is given. Knows no split and no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import json
import random
from typing import Any

from bench.demo import Check

from .base import Problem, phrase
from .words import COLOURS, DAYS, FOODS, JOBS, OBJECTS, any_city, any_code, any_email, any_name, any_time, any_word

Json = dict[str, Any]


def _person(rng: random.Random) -> tuple[Json, tuple[str, ...]]:
    values: Json = {"name": any_name(rng), "age": rng.randint(5, 98), "city": any_city(rng), "job": rng.choice(JOBS)}
    return values, (
        "$name is a $age-year-old $job from $city.",
        "$name, $age, lives in $city and works as a $job.",
        "My name is $name, I am $age years old, I live in $city and I work as a $job.",
        "The $job $name is $age years old and lives in $city.",
        "I met $name in $city: a $job, $age years old.",
        "$name works as a $job in $city. $name is $age.",
        "From $city comes $name, a $job of $age years.",
    )


def _product(rng: random.Random) -> tuple[Json, tuple[str, ...]]:
    values: Json = {
        "product": rng.choice(OBJECTS),
        "price": rng.randint(1, 999),
        "colour": rng.choice(COLOURS),
        "quantity": rng.randint(1, 60),
    }
    return values, (
        "We ordered $quantity pieces of the $product in $colour for $price euros.",
        "The $colour $product costs $price euros and we need $quantity.",
        "Please send $quantity of the $colour $product at $price euros each.",
        "In stock: $quantity of the $product, $colour, $price euros.",
        "For $price euros you get the $colour $product; there are $quantity left.",
    )


def _event(rng: random.Random) -> tuple[Json, tuple[str, ...]]:
    values: Json = {
        "event": rng.choice(
            ("meeting", "concert", "lesson", "party", "workshop", "race", "dinner", "lecture", "reading")
        ),
        "day": rng.choice(DAYS),
        "time": any_time(rng),
        "place": any_city(rng),
    }
    return values, (
        "The $event is on $day at $time in $place.",
        "On $day at $time there is a $event in $place.",
        "Come to $place for the $event on $day, $time.",
        "We moved the $event to $day, $time, in $place.",
        "There will be a $event in $place; it starts at $time on $day.",
    )


def _contact(rng: random.Random) -> tuple[Json, tuple[str, ...]]:
    name = any_name(rng)
    values: Json = {
        "name": name,
        "email": any_email(rng, name),
        "phone": "".join(str(rng.randrange(10)) for _ in range(rng.randint(6, 9))),
    }
    return values, (
        "You can reach $name at $email or by phone under $phone.",
        "$name: phone $phone, mail $email.",
        "Write to $name ($email) or call $phone.",
        "My name is $name, my number is $phone and my email is $email.",
        "Contact $name at $phone or $email.",
    )


def _order(rng: random.Random) -> tuple[Json, tuple[str, ...]]:
    values: Json = {
        "order": any_code(rng),
        "customer": any_name(rng),
        "item": rng.choice(FOODS + OBJECTS),
        "amount": rng.randint(2, 90),
    }
    return values, (
        "Order $order: $customer wants $amount units of $item.",
        "$customer ordered $amount units of $item under the number $order.",
        "The order $order by $customer is for $amount units of $item.",
        "$amount units of $item go to $customer (order $order).",
    )


_EXTRACT = (
    "{Extract|Get|Pull out|Find} {the |}$k {from|out of} {this|the text|this text|the sentence|the following} {as|into|in} JSON: $t",
    "{Extract|Return|Give me|Write} {the |}$k as {JSON|a JSON object|json}: $t",
    "$t {Extract|Give me|Return} {the |}$k {as|in} JSON.",
    "{Turn|Convert} this into JSON with {the keys |keys |the fields |fields }$k: $t",
    "{Text|Sentence}: $t {Return|Give|Write} a JSON object with {the keys |keys |the fields |}$k.",
    "{Read this and answer|Answer} in JSON with $k: $t",
    "{Return|Answer with|Give me|Fill in} {JSON like|this JSON:|a JSON object like} $j {for|from|for this text:|for:} $t",
    "$t {Fill in|Return|Answer as} $j",
    '{Extract|Get} {the |}$k {as|in} JSON: "$t"',
)
_EXTRACT_ALL = (
    "{Extract|Convert|Turn} {this|the data|everything|the information} {into|to} JSON: $t",
    "{Extract|Convert|Turn} {this sentence|this text} {into|to} {JSON|a JSON object}: $t",
)


def _pairs(rng: random.Random) -> Problem:
    """Labels and values of any kind, as lines or in one line, to be made one object."""
    found: Json = {}
    for _ in range(rng.randint(1, 5)):
        value: Any = (
            rng.randint(0, 9999) if rng.random() < 0.4 else any_word(rng) if rng.random() < 0.7 else any_name(rng)
        )
        found[any_word(rng)] = value
    between, after = rng.choice(((": ", ", "), (" = ", ", "), (" is ", " and "), (": ", "\n"), ("=", "; ")))
    typed = after.join(f"{key}{between}{value}" for key, value in found.items())
    patterns = (
        "{Turn|Convert|Make|Put} this into {JSON|a JSON object|json}: $t",
        "{Write|Give me|Format} {this|the following} as {JSON|a JSON object|json}: $t",
        "{JSON|As JSON|To JSON}: $t",
        "$t{. |, }{As JSON, please.|Give me that as JSON.|Turn that into JSON.}",
    )
    answer = json.dumps(found)
    return Problem(
        f"json {answer}",
        phrase(rng, patterns, t=typed),
        answer,
        Check("json", (answer,)),
        f"The keys are {', '.join(found)}.",
    )


def _shape(rng: random.Random, found: Json) -> str:
    """What the wanted object looks like, with a type or dots for each value."""
    dots = rng.random() < 0.4
    blanks = {key: "..." if dots else "number" if isinstance(value, int) else "string" for key, value in found.items()}
    return "{" + ", ".join(f'"{key}": {blank}' for key, blank in blanks.items()) + "}"


def json_extraction(rng: random.Random) -> Problem:
    """A sentence to turn into a JSON object, or a list to turn into a JSON array."""
    kind = rng.random()
    if kind < 0.15:
        return _pairs(rng)
    if kind < 0.25:
        items = [any_word(rng) for _ in range(rng.randint(1, 7))]
        patterns = (
            "{Turn|Convert} this {list |}into a JSON {array|list}: $l",
            "{Write|Give me} {this|these} as a JSON {array|list}: $l",
        )
        answer = json.dumps(items)
        user = phrase(rng, patterns, l=", ".join(items))
        return Problem(f"json {items}", user, answer, Check("json", (answer,)), f"There are {len(items)} items.")
    values, sentences = rng.choice((_person, _person, _product, _event, _contact, _order))(rng)
    keys = list(values)
    if rng.random() < 0.15:
        patterns = _EXTRACT_ALL
    else:
        patterns = _EXTRACT
        keys = rng.sample(keys, rng.randint(1, len(keys)))
    found = {key: values[key] for key in keys}
    sentence = rng.choice(sentences)
    for key, value in values.items():
        sentence = sentence.replace(f"${key}", str(value))
    listed = ", ".join(keys) if len(keys) == 1 or rng.random() < 0.5 else ", ".join(keys[:-1]) + " and " + keys[-1]
    shape = _shape(rng, found)
    answer = json.dumps(found)
    thought = "\n".join(f"{key}: {value}" for key, value in found.items())
    key = f"json {sorted(str(value) for value in values.values())}"
    return Problem(key, phrase(rng, patterns, k=listed, t=sentence, j=shape), answer, Check("json", (answer,)), thought)
