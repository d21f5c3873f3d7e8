"""The demo model's word problems: two or three steps of reasoning, then the answer.

Each function draws one `Problem` from the generator of random numbers it is given. Knows no split and no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import random
from itertools import pairwise

from quire.benchmarks.demo_base import Check, Problem, exact, listing, number, phrase
from quire.benchmarks.demo_words import FIRST_NAMES, FRUITS, MISC, OBJECTS, any_name, plural

_THINGS = tuple(
    plural(noun) for noun in FRUITS[:20] + OBJECTS[:60] if noun not in ("glass", "scissors", "knife", "box")
)


def reasoning(rng: random.Random) -> Problem:
    """A word problem of two or three steps."""
    return rng.choice((_story, _story, _shopping, _comparison, _sharing, _ages, _travel))(rng)


def _worked(key: str, user: str, steps: list[str], conclusion: str, check: Check) -> Problem:
    """A problem whose thought lists the steps; the answer says them shortly and concludes."""
    equations = [step for step in steps if "=" in step]
    answer = f"{', '.join(equations)}. {conclusion}" if equations else conclusion
    return Problem(f"reasoning {key}", user, answer, check, "\n".join(steps), conclusion)


def _story(rng: random.Random) -> Problem:
    name, other, thing = any_name(rng), any_name(rng), rng.choice(_THINGS)
    total = rng.randint(2, 60)
    sentences, steps = [f"{name} has {total} {thing}."], [f"{name} starts with {total} {thing}."]
    for _ in range(rng.randint(1, 3)):
        change = rng.randint(1, 40)
        if rng.random() < 0.5 and change <= total:
            verb = rng.choice((f"gives {change} to {other}", f"loses {change}", f"sells {change}", f"breaks {change}"))
            steps.append(f"{total} - {change} = {total - change}")
            total -= change
        else:
            verb = rng.choice(
                (f"buys {change} more", f"finds {change}", f"gets {change} from {other}", f"makes {change} more")
            )
            steps.append(f"{total} + {change} = {total + change}")
            total += change
        sentences.append(f"{rng.choice(('Then', 'Later', 'After that', 'Then'))} {name} {verb}.")
    question = phrase(rng, ("How many {$t|} does $n have {now|in the end|left}?",), t=thing, n=name).replace("  ", " ")
    user = f"{' '.join(sentences)} {question}"
    return _worked(user, user, steps, f"{name} has {total} {thing}.", number(total))


def _shopping(rng: random.Random) -> Problem:
    name, first, second = any_name(rng), *rng.sample(_THINGS, 2)
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
    name, thing = any_name(rng), rng.choice(_THINGS)
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
