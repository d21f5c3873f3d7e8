"""The demo model's arithmetic: sums, differences, products and quotients, the hard ones with their working.

Each function draws one `Problem` from the generator of random numbers it is given. Knows no split and no chat format.
"""

from __future__ import annotations

import random

from quire.benchmarks.demo_base import Problem, exact, number, phrase, sized, spoken

_SMALL = 12
"""Sums and products of numbers up to this are common knowledge: always trained on, never held out."""

_ASK = "{What is|What's|what is|Calculate|Compute|How much is|Work out|Evaluate|Can you calculate|Tell me|}"
_ONLY = "{Answer|Reply} with {only|just} the number."

_ADDITION = (
    f"{_ASK} $a + $b{{?|}}",
    f"{_ASK} $a plus $b{{?|}}",
    "$a + $b {=|= ?|=?}",
    "$a+$b{|=|?}",
    "{Add|Please add|Can you add|Now add} $a and $b{.|}",
    "{What is|Give me|Find} the sum of $a and $b{?|.}",
    "{What do I get|What do you get} if {I|you} add $a to $b?",
    "{If I have|I have} $a and {get|add} $b more, how many {is that|do I have}?",
)
_SUBTRACTION = (
    f"{_ASK} $a - $b{{?|}}",
    f"{_ASK} $a minus $b{{?|}}",
    "$a - $b {=|= ?|=?}",
    "$a-$b{|=|?}",
    "{Subtract|Take|Please subtract|Now subtract} $b from $a{.|}",
    "{What is|Give me|Find} the difference between $a and $b{?|.}",
    "{If I have|I have} $a and {lose|give away|take away} $b, how many {are left|remain}?",
)
_MULTIPLICATION = (
    f"{_ASK} $a {{*|x|×|times|*}} $b{{?|}}",
    f"{_ASK} $a multiplied by $b{{?|}}",
    "$a {*|x|×} $b {=|= ?|=?}",
    "$a{*|x|×}$b{|=|?}",
    "{Multiply|Please multiply|Can you multiply} $a {by|and|with} $b{.|}",
    "{What is|Give me|Find} the product of $a and $b{?|.}",
)
_DIVISION = (
    f"{_ASK} $a {{/|÷|/}} $b{{?|}}",
    f"{_ASK} $a divided by $b{{?|}}",
    "$a {/|÷} $b {=|= ?|=?}",
    "$a/$b{|=|?}",
    "{Divide|Please divide|Can you divide} $a by $b{.|}",
    "How {many times does $b go|often does $b go} into $a?",
)


def _calculation(
    rng: random.Random, name: str, patterns: tuple[str, ...], a: int, b: int, result: int, answer: str, brief: bool
) -> Problem:
    user = phrase(rng, patterns, **spoken(rng, a, b))
    if brief and rng.random() < 0.15:
        user, answer = f"{user} {phrase(rng, (_ONLY,))}", str(result)
    key = "" if max(abs(a), abs(b)) <= _SMALL else f"{name} {a} {b}"
    return Problem(key, user, answer, number(result), f"I need to work out {answer}.")


def addition(rng: random.Random) -> Problem:
    """A sum of two numbers of up to four digits, or of three smaller ones."""
    if rng.random() < 0.15:
        return _three_numbers(rng)
    a, b = sized(rng, 4), sized(rng, 4)
    return _calculation(rng, "addition", _ADDITION, a, b, a + b, f"{a} + {b} = {a + b}", True)


def _three_numbers(rng: random.Random) -> Problem:
    a, b, c = sized(rng, 2), sized(rng, 2), sized(rng, 2)
    slots = {"a": str(a), "b": str(b), "c": str(c)}
    kind = rng.random()
    if kind < 0.5:
        patterns = (
            f"{_ASK} $a + $b + $c{{?|}}",
            "{Add|Sum|Add up} $a, $b and $c{.|}",
            "$a + $b + $c {=|}",
            "$a+$b+$c{=|}",
        )
        total, answer = a + b + c, f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}"
    elif kind < 0.75:
        patterns = (
            f"{_ASK} $a + $b - $c{{?|}}",
            f"{_ASK} $a plus $b minus $c{{?|}}",
            "$a + $b - $c {=|}",
            "$a+$b-$c{=|}",
        )
        total, answer = a + b - c, f"{a} + {b} - {c} = {a + b} - {c} = {a + b - c}"
    else:
        b, c = rng.randint(2, 12), rng.randint(2, 12)
        slots |= {"b": str(b), "c": str(c)}
        patterns = (f"{_ASK} $a + $b {{*|x|×|times}} $c{{?|}}", "$a + $b {*|x|×} $c {=|}")
        total, answer = a + b * c, f"{a} + {b} × {c} = {a} + {b * c} = {a + b * c}"
    return Problem(
        f"addition {answer}",
        phrase(rng, patterns, **slots),
        answer,
        number(total),
        f"First the one part, then the other: {answer}.",
    )


def subtraction(rng: random.Random) -> Problem:
    """A difference of two numbers of up to four digits; below zero at times, for small ones."""
    a, b = sized(rng, 4), sized(rng, 4)
    if a < b and (b > 99 or rng.random() < 0.7):
        a, b = b, a
    return _calculation(rng, "subtraction", _SUBTRACTION, a, b, a - b, f"{a} - {b} = {a - b}", True)


def multiplication(rng: random.Random) -> Problem:
    """A product of numbers of up to two digits; the long ones are answered with their working."""
    if rng.random() < 0.06:
        return _double(rng)
    kind = rng.random()
    a = rng.randint(2, 12) if kind < 0.25 else rng.randint(10, 99)
    b = rng.randint(0, 12) if kind < 0.5 else rng.randint(10, 99)
    if rng.random() < 0.5:
        a, b = b, a
    tens, ones = divmod(b, 10)
    if min(a, b) <= 12 or ones == 0 or a % 10 == 0:
        return _calculation(rng, "multiplication", _MULTIPLICATION, a, b, a * b, f"{a} × {b} = {a * b}", True)
    tens *= 10
    answer = f"{a} × {b} = {a} × {tens} + {a} × {ones} = {a * tens} + {a * ones} = {a * b}"
    return _calculation(rng, "multiplication", _MULTIPLICATION, a, b, a * b, answer, False)


def _double(rng: random.Random) -> Problem:
    a = rng.randint(1, 12) if rng.random() < 0.3 else rng.randint(1, 99)
    if a <= 20 and rng.random() < 0.5:
        patterns = (f"{_ASK} $a squared{{?|}}", "{What is|Give me} the square of $a{?|}", "$a squared")
        return Problem(
            "" if a <= _SMALL else f"square {a}",
            phrase(rng, patterns, a=str(a)),
            f"{a} × {a} = {a * a}",
            number(a * a),
            f"The square is {a} × {a}.",
        )
    patterns = (f"{_ASK} {{twice|two times|double|the double of}} $a{{?|}}", "{Double|Please double} $a{.|}")
    return Problem(
        "" if a <= _SMALL else f"double {a}",
        phrase(rng, patterns, a=str(a)),
        f"2 × {a} = {2 * a}",
        number(2 * a),
        f"The double is 2 × {a}.",
    )


def division(rng: random.Random) -> Problem:
    """A quotient by a number of up to 12; with a remainder at times. Long ones are answered with their working."""
    b = rng.randint(1, 12)
    quotient = rng.randint(0, 12) if rng.random() < 0.5 else rng.randint(2, 99)
    rest = rng.randint(1, b - 1) if b > 1 and rng.random() < 0.3 else 0
    a = b * quotient + rest
    left = f", remainder {rest}" if rest else ""
    tens = quotient // 10 * 10
    short = f"{a} / {b} = {quotient}{left}"
    if quotient <= 12 or b == 1 or quotient == tens:
        if not rest:
            return _calculation(rng, "division", _DIVISION, a, b, quotient, short, True)
        answer = short
    else:
        answer = (
            f"{a} / {b} = {b * tens} / {b} + {a - b * tens} / {b} = {tens} + {quotient - tens}{left} = {quotient}{left}"
        )
    user = phrase(rng, _DIVISION, **spoken(rng, a, b))
    check = exact(answer, short) if rest else number(quotient)
    return Problem(f"division {a} {b}", user, answer, check, f"{b} × {quotient} = {b * quotient}.")
