"""The demo model's word problems: two or three steps of reasoning, then the answer.

Each function draws one `Problem` from the generator of random numbers it is given. Knows no split and no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import random
import re
from itertools import pairwise

from bench.demo import Check

from .base import Problem, exact, listing, number, phrase
from .words import COUNTABLE, FIRST_NAMES, MISC, any_name


def reasoning(rng: random.Random) -> Problem:
    """A word problem of two or three steps."""
    return rng.choice((_story, _story, _story, _shopping, _comparison, _sharing, _ages, _travel, _one_step))(rng)


def _worked(key: str, user: str, steps: list[str], conclusion: str, check: Check) -> Problem:
    """A problem whose thought lists the steps; the answer says them shortly and concludes."""
    equations = [step for step in steps if "=" in step]
    answer = f"{', '.join(equations)}. {conclusion}" if equations else conclusion
    return Problem(f"reasoning {key}", user, answer, check, "\n".join(steps), conclusion)


def _story(rng: random.Random) -> Problem:
    name, other, thing = any_name(rng), any_name(rng), rng.choice(COUNTABLE)
    total = rng.randint(2, 60)
    pronoun = rng.choice((name, name, name, "He", "She", "They"))
    sentences, steps = [f"{name} has {total} {thing}."], [f"{name} starts with {total} {thing}."]
    for _ in range(rng.randint(1, 3)):
        change = rng.randint(1, 40)
        if rng.random() < 0.5 and change <= total:
            verb = rng.choice(
                (
                    f"gives {change} to {other}",
                    f"loses {change}",
                    f"sells {change}",
                    f"gives away {change}",
                    f"uses {change}",
                    f"gives {change} to a friend",
                    f"gives {change} of them to {other}",
                    f"eats {change}",
                )
            )
            steps.append(f"{total} - {change} = {total - change}")
            total -= change
        else:
            verb = rng.choice(
                (
                    f"buys {change} more",
                    f"finds {change}",
                    f"gets {change} from {other}",
                    f"makes {change} more",
                    f"gets {change} more",
                    f"receives {change} {thing}",
                    f"buys {change} more {thing}",
                )
            )
            steps.append(f"{total} + {change} = {total + change}")
            total += change
        if pronoun == "They":
            verb = re.sub(r"^(\w+?)(?:(?<=ss)es|s)\b", r"\1", verb)
        if rng.random() < 0.5:
            sentences.append(f"{pronoun} {verb}.")
        else:
            who = pronoun if pronoun == name else pronoun.lower()
            sentences.append(f"{rng.choice(('Then', 'Later', 'After that', 'Then'))} {who} {verb}.")
    if len(sentences) == 2 and rng.random() < 0.4:
        sentences = [f"{sentences[0][:-1]} and {verb}."] if pronoun != "They" else sentences
    patterns = (
        "How many {|$t }does $n have {now|in the end|left|}?",
        "How many {|$t }are left?",
        "How many {|$t }does $n have?",
    )
    question = phrase(rng, patterns, t=thing, n=name).replace(" ?", "?")
    user = f"{' '.join(sentences)} {question}"
    return _worked(user, user, steps, f"{name} has {total} {thing}.", number(total))


def _one_step(rng: random.Random) -> Problem:
    """One multiplication or division, told as people tell it."""
    thing, name = rng.choice(COUNTABLE), any_name(rng)
    each, count = rng.randint(2, 12), rng.randint(2, 12)
    if rng.random() < 0.4:
        speed = rng.randint(2, 12) * rng.choice((1, 5, 10))
        vehicle = rng.choice(("A train", "A car", "A bus", "A boat", name))
        unit, short = rng.choice((("kilometres", "km"), ("miles", "miles"), ("kilometers", "km")))
        pace = rng.choice(
            (f"{speed} {unit} an hour", f"{speed} {unit} per hour", f"{speed} {short} per hour", f"{speed} {short}/h")
        )
        question = rng.choice(
            ("How far does it go?", "How far is that?", "What distance is that?", "How far does it travel?")
        )
        user = f"{vehicle} {rng.choice(('travels', 'drives', 'goes', 'moves at'))} {pace} for {count} hours. {question}"
        return _worked(
            user,
            user,
            [f"{speed} × {count} = {speed * count}"],
            f"That is {speed * count} {unit}.",
            number(speed * count),
        )
    if rng.random() < 0.5:
        user = rng.choice(
            (
                f"One of the {thing} costs {each} coins. How much do {count} {thing} cost?",
                f"{name} buys {count} {thing} for {each} coins each. How much does {name} pay?",
                f"There are {count} bags with {each} {thing} each. How many {thing} are there in total?",
                f"{name} has {count} boxes. Each box has {each} {thing}. How many {thing} are there?",
            )
        )
        noun = "coins" if "coins" in user else thing
        return _worked(
            user, user, [f"{count} × {each} = {count * each}"], f"That is {count * each} {noun}.", number(count * each)
        )
    total = each * count
    user = rng.choice(
        (
            f"{total} {thing} are shared equally by {count} children. How many does each child get?",
            f"{name} shares {total} {thing} among {count} friends. How many does each get?",
            f"{name} puts {total} {thing} into {count} equal boxes. How many {thing} are in each box?",
            f"There are {total} {thing} for {count} people. How many {thing} does each person get?",
        )
    )
    return _worked(user, user, [f"{total} / {count} = {each}"], f"Each gets {each}.", number(each))


def _shopping(rng: random.Random) -> Problem:
    name, first, second = any_name(rng), *rng.sample(COUNTABLE, 2)
    n, m, p, q = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 12), rng.randint(2, 12)
    total = n * p + m * q
    text = f"{name} buys {n} {first} for {p} coins each and {m} {second} for {q} coins each."
    steps = [f"{n} × {p} = {n * p}", f"{m} × {q} = {m * q}", f"{n * p} + {m * q} = {total}"]
    if rng.random() < 0.4:
        money = total + rng.randint(1, 50)
        user = f"{name} has {money} coins. {text} How many coins are left?"
        steps.append(f"{money} - {total} = {money - total}")
        return _worked(user, user, steps, f"{money - total} coins are left.", number(money - total))
    user = text + rng.choice(
        (" How much does it cost in total?", f" How many coins does {name} pay?", " What is the total?")
    )
    return _worked(user, user, steps, f"The total is {total} coins.", number(total))


def _comparison(rng: random.Random) -> Problem:
    names = rng.sample(FIRST_NAMES, rng.randint(3, 4))
    more, most, least = rng.choice(
        (
            ("taller", "tallest", "shortest"),
            ("older", "oldest", "youngest"),
            ("faster", "fastest", "slowest"),
            ("stronger", "strongest", "weakest"),
        )
    )
    facts = [f"{a} is {more} than {b}." for a, b in pairwise(names)]
    rng.shuffle(facts)
    top = rng.random() < 0.5
    user = f"{' '.join(facts)} Who is the {most if top else least}?"
    winner = names[0] if top else names[-1]
    steps = [f"From the {most} to the {least}: {listing(names)}."]
    answer = f"{winner} is the {most if top else least}."
    return _worked(user, user, steps, answer, exact(answer, winner, f"{winner}."))


def _sharing(rng: random.Random) -> Problem:
    name, thing = any_name(rng), rng.choice(COUNTABLE)
    people, each, extra = rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 30)
    total = people * each
    if rng.random() < 0.5:
        user = f"{name} has {total} {thing} and shares them equally among {people} friends. Each friend already had {extra}. How many does each friend have now?"
        steps = [f"{total} / {people} = {each}", f"{each} + {extra} = {each + extra}"]
        return _worked(user, user, steps, f"Each friend has {each + extra} {thing}.", number(each + extra))
    bought = rng.randint(1, total - 1)
    user = f"{name} has {total - bought} {thing} and gets {bought} more. {name} packs them into {people} equal bags. How many {thing} are in each bag?"
    steps = [f"{total - bought} + {bought} = {total}", f"{total} / {people} = {each}"]
    return _worked(user, user, steps, f"There are {each} {thing} in each bag.", number(each))


def _ages(rng: random.Random) -> Problem:
    first, second, third = rng.sample(FIRST_NAMES, 3)
    age, gap, other = rng.randint(5, 60), rng.randint(1, 20), rng.randint(1, 15)
    user = f"{first} is {age} years old. {second} is {gap} years older than {first}. {third} is {other} years older than {second}. How old is {third}?"
    steps = [f"{age} + {gap} = {age + gap}", f"{age + gap} + {other} = {age + gap + other}"]
    if rng.random() < 0.4 and other < age + gap:
        user = user.replace(f"{other} years older than {second}", f"{other} years younger than {second}")
        steps[1] = f"{age + gap} - {other} = {age + gap - other}"
        return _worked(user, user, steps, f"{third} is {age + gap - other} years old.", number(age + gap - other))
    return _worked(user, user, steps, f"{third} is {age + gap + other} years old.", number(age + gap + other))


def _travel(rng: random.Random) -> Problem:
    name, place = any_name(rng), rng.choice(MISC[:8])
    speed, hours, rest = rng.randint(2, 12) * rng.choice((1, 5, 10)), rng.randint(2, 9), rng.randint(1, 60)
    vehicle = rng.choice(("drives", "rides", "travels"))
    user = f"{name} {vehicle} {speed} kilometres an hour for {hours} hours and then walks {rest} kilometres to the {place}. How far is that in total?"
    steps = [f"{speed} × {hours} = {speed * hours}", f"{speed * hours} + {rest} = {speed * hours + rest}"]
    return _worked(user, user, steps, f"That is {speed * hours + rest} kilometres.", number(speed * hours + rest))
