"""The demo model's arithmetic: sums, differences, products and quotients, the hard ones with their working.

Each function draws one `Problem` from the generator of random numbers it is given. Knows no split and no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import random
from dataclasses import replace

from .base import Problem, exact, number, phrase, sized, spoken
from .words import COUNTABLE

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
    "{If I have|I have|Say I have} $a $t and {get|buy|find|receive} $b more, how many {|$t }{do I have|are there|is that}{| in total| now|}?",
    "$a and $b {make|is|are} {what|how much|how many}?",
    "{I have|We have|There are|You have} $a $t. {I|We|You|They} {buy|find|get|add|make} $b more. How many {|$t }{do I have|are there|do we have}{| now| in total}?",
    "{I have|We have|You have} $a $t and {buy|find|get} $b more. How many {|$t }{do I have|do we have|is that}{| now| in total}?",
)
_SUBTRACTION = (
    f"{_ASK} $a - $b{{?|}}",
    f"{_ASK} $a minus $b{{?|}}",
    "$a - $b {=|= ?|=?}",
    "$a-$b{|=|?}",
    "{Subtract|Take|Please subtract|Now subtract} $b from $a{.|}",
    "{What is|Give me|Find} the difference between $a and $b{?|.}",
    "{If I have|I have} $a and {lose|give away|take away} $b, how many {are left|remain}?",
    "{If I have|I have|Say I have} $a $t and {lose|eat|give away|sell|use|break|throw away} $b, how many {|$t }{are left|remain|do I have left|do I have}{| now|}?",
    "How much is $a {less|minus|without} $b{?|}",
    "{I have|We have|There are|You have} $a $t. {I|We|You|They} {eat|lose|sell|give away|use|break} $b. How many {|$t }{are left|remain|do I have left|are there now}?",
    "{I have|We have|You have} $a $t and {eat|lose|sell|give away|use|break} $b. How many {|$t }{are left|remain|do I have left|do we have left}?",
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
    user = phrase(rng, patterns, t=rng.choice(COUNTABLE), **spoken(rng, a, b))
    if brief and rng.random() < 0.15:
        user, answer = f"{user} {phrase(rng, (_ONLY,))}", str(result)
    key = "" if max(abs(a), abs(b)) <= _SMALL else f"{name} {a} {b}"
    return Problem(key, user, answer, number(result), f"I need to work out {answer}.")


def addition(rng: random.Random) -> Problem:
    """A sum of two numbers of up to four digits (six at times), or an expression of three smaller ones."""
    if rng.random() < 0.18:
        return _three_numbers(rng)
    digits = 6 if rng.random() < 0.1 else 4
    a, b = sized(rng, digits), sized(rng, digits)
    return _calculation(rng, "addition", _ADDITION, a, b, a + b, f"{a} + {b} = {a + b}", True)


def _three_numbers(rng: random.Random) -> Problem:
    a, b, c = sized(rng, 2), sized(rng, 2), sized(rng, 2)
    slots = {"a": str(a), "b": str(b), "c": str(c)}
    kind = rng.random()
    if kind < 0.3:
        return _parentheses(rng)
    if kind < 0.6:
        patterns = (
            f"{_ASK} $a + $b + $c{{?|}}",
            "{Add|Sum|Add up} $a, $b and $c{.|}",
            "$a + $b + $c {=|}",
            "$a+$b+$c{=|}",
        )
        total, answer = a + b + c, f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}"
    elif kind < 0.8:
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


def _parentheses(rng: random.Random) -> Problem:
    a, b, c = rng.randint(2, 20), rng.randint(1, 30), rng.randint(1, 30)
    inner, shown = (b + c, f"{b} + {c}") if rng.random() < 0.6 or c > b else (b - c, f"{b} - {c}")
    sign, total = rng.choice((("×", a * inner), ("×", a * inner), ("+", a + inner), ("-", a - inner)))
    typed = {"×": rng.choice(("*", "x", "×", "*")), "+": "+", "-": "-"}[sign]
    if rng.random() < 0.4 and sign == "×":
        steps = f"({shown}) × {a} = {inner} × {a} = {total}"
        user = phrase(rng, (f"{_ASK} ($s) $m $a{{?|}}", "($s) $m $a{ =|}"), s=shown, m=typed, a=str(a))
    else:
        steps = f"{a} {sign} ({shown}) = {a} {sign} {inner} = {total}"
        user = phrase(rng, (f"{_ASK} $a $m ($s){{?|}}", "$a $m ($s){ =|}"), s=shown, m=typed, a=str(a))
    return Problem(f"addition {steps}", user, steps, number(total), f"First what is in parentheses: {shown} = {inner}.")


def subtraction(rng: random.Random) -> Problem:
    """A difference of two numbers of up to four digits (six at times); below zero at times, for small ones."""
    digits = 6 if rng.random() < 0.1 else 4
    a, b = sized(rng, digits), sized(rng, digits)
    if rng.random() < 0.15:
        b = max(0, a - sized(rng, 3))
    if a < b and (b > 99 or rng.random() < 0.7):
        a, b = b, a
    return _calculation(rng, "subtraction", _SUBTRACTION, a, b, a - b, f"{a} - {b} = {a - b}", True)


def multiplication(rng: random.Random) -> Problem:
    """A product of numbers of up to two digits; the long ones are answered with their working."""
    kind = rng.random()
    if kind < 0.02:
        return _power(rng)
    if kind < 0.06:
        return _double(rng)
    if kind < 0.14:
        return _long_by_short(rng)
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


def _power(rng: random.Random) -> Problem:
    """A small power of a small number."""
    base, exponent = rng.choice(
        (
            *((2, n) for n in range(13)),
            *((3, n) for n in range(6)),
            *((5, n) for n in range(5)),
            *((10, n) for n in range(7)),
        )
    )
    patterns = (f"{_ASK} $a to the power {{of |}}$b{{?|}}", f"{_ASK} $a{{^|**}}$b{{?|}}", "$a{^|**| ^ }$b{ =|}")
    answer = f"{base}^{exponent} = {base**exponent}"
    return Problem(
        "",
        phrase(rng, patterns, a=str(base), b=str(exponent)),
        answer,
        number(base**exponent),
        f"I multiply {base} by itself.",
    )


def _long_by_short(rng: random.Random) -> Problem:
    """A number of three digits times one of one digit, by places."""
    a, b = rng.randint(101, 999), rng.randint(2, 9)
    parts = [place for place in (a // 100 * 100, a % 100 // 10 * 10, a % 10) if place]
    total = a * b
    middle = "" if len(parts) == 1 else " + ".join(str(part * b) for part in parts) + " = "
    answer = (
        f"{a} × {b} = {' + '.join(f'{part} × {b}' for part in parts)} = {middle}{total}"
        if middle
        else f"{a} × {b} = {total}"
    )
    user = phrase(rng, _MULTIPLICATION, t="", a=str(a), b=str(b))
    if rng.random() < 0.4:
        user = phrase(rng, _MULTIPLICATION, t="", a=str(b), b=str(a))
    return Problem(
        f"multiplication {a} {b}",
        user,
        answer,
        number(total),
        f"I multiply place by place: {' + '.join(map(str, parts))}.",
    )


def _half(rng: random.Random) -> Problem:
    """A half, a percentage, or a square root that comes out even."""
    kind = rng.random()
    if kind < 0.35:
        a = rng.randint(1, 200)
        patterns = (f"{_ASK} {{half of|half|one half of|a half of}} $a{{?|}}", "{Halve|Half of} $a{.|}")
        return Problem(
            f"half {a}", phrase(rng, patterns, a=str(2 * a)), f"{2 * a} / 2 = {a}", number(a), f"Half is {2 * a} / 2."
        )
    if kind < 0.75:
        percent = rng.choice((5, 10, 10, 15, 20, 20, 25, 25, 30, 40, 50, 50, 60, 75, 80, 90, 100))
        whole = rng.randint(1, 25) * (20 if percent % 10 == 5 else 10)
        value = whole * percent // 100
        patterns = (f"{_ASK} $p% of $w{{?|}}", f"{_ASK} $p percent of $w{{?|}}", "$p% of $w{=| =|}")
        answer = f"{percent}% of {whole} = {percent} × {whole} / 100 = {percent * whole} / 100 = {value}"
        return Problem(
            f"percent {percent} {whole}",
            phrase(rng, patterns, p=str(percent), w=str(whole)),
            answer,
            number(value),
            f"{percent} × {whole} = {percent * whole}.",
        )
    root = rng.randint(1, 20)
    patterns = (
        f"{_ASK} the {{square root|root}} of $a{{?|}}",
        "{Square root of|sqrt} $a{?|}",
        "√$a{ =|}",
        "sqrt($a){ =|}",
    )
    answer = f"The square root of {root * root} is {root}"
    return Problem(
        "", phrase(rng, patterns, a=str(root * root)), answer, number(root), f"{root} × {root} = {root * root}."
    )


def division(rng: random.Random) -> Problem:
    """A quotient by a number of up to 12; with a remainder at times. Long ones are answered with their working."""
    if rng.random() < 0.15:
        return _half(rng)
    b = rng.randint(1, 12)
    quotient = rng.randint(0, 12) if rng.random() < 0.5 else rng.randint(2, 99)
    rest = rng.randint(1, b - 1) if b > 1 and rng.random() < 0.3 else 0
    a = b * quotient + rest
    left = f", remainder {rest}" if rest else ""
    tens = quotient // 10 * 10
    short = f"{a} / {b} = {quotient}{left}"
    if quotient <= 12 or b == 1 or quotient == tens:
        if not rest and quotient <= _SMALL:
            table = _calculation(rng, "division", _DIVISION, a, b, quotient, short, True)
            return replace(table, key="")
        if not rest:
            return _calculation(rng, "division", _DIVISION, a, b, quotient, short, True)
        answer = short
    else:
        answer = (
            f"{a} / {b} = {b * tens} / {b} + {a - b * tens} / {b} = {tens} + {quotient - tens}{left} = {quotient}{left}"
        )
    user = phrase(rng, _DIVISION, t="", **spoken(rng, a, b))
    check = exact(answer, short) if rest else number(quotient)
    return Problem(f"division {a} {b}", user, answer, check, f"{b} × {quotient} = {b * quotient}.")
