"""The demo model's skills with lists and words: counting, sorting and copying.

Each function draws one `Problem` from the generator of random numbers it is given. Knows no split and no chat format.
"""

# ruff: noqa: E501  (a pattern reads best on one line)

from __future__ import annotations

import random

from .base import Problem, exact, listing, number, phrase, sized, spoken, typed_list
from .words import ANIMALS, FIRST_NAMES, FRUITS, OBJECTS, WORDS, any_name, any_word, invented_word, number_words


def counting(rng: random.Random) -> Problem:
    """Counting up, down or in steps; counting the items of a list, the letters of a word, the words of a text."""
    return rng.choice((_count_range, _count_range, _count_step, _count_items, _count_letters, _count_words, _sequence))(
        rng
    )


def _count_range(rng: random.Random) -> Problem:
    length = rng.randint(3, 25)
    if rng.random() < 0.25:
        first, last = (1, length) if rng.random() < 0.7 else (length, rng.randint(0, 1))
        key = ""
    else:
        first = rng.randint(0, 200) if rng.random() < 0.8 else rng.randint(200, 990)
        last = first + length
        if rng.random() < 0.4:
            first, last = last, first
        key = f"count {first} {last}"
    if first <= last:
        numbers = list(range(first, last + 1))
        patterns = [
            "{Count|Please count|Can you count|Count up|List the numbers} from $a to $b{.|}",
            "Count $a to $b{.|}",
        ]
        if first == 1:
            patterns += ["{Count|Please count|Can you count|Count up|Count for me} to $b{.|}"] * 2
    else:
        numbers = list(range(first, last - 1, -1))
        patterns = ["Count {down|backwards|back|down backwards} from $a to $b{.|}"]
        if last in (0, 1):
            patterns += ["Count down from $a to $b.", "Count down to $b from $a."]
        if last == 1:
            patterns += ["Count {down|backwards} from $a{.|}"]
    user = phrase(rng, tuple(patterns), **spoken(rng, first, last))
    answer = listing([str(value) for value in numbers])
    return Problem(key, user, answer, exact(answer), f"I start at {first} and stop at {last}.")


def _count_step(rng: random.Random) -> Problem:
    step = rng.choice((2, 2, 3, 4, 5, 5, 10, 10, 20, 25, 100))
    first = step * rng.randint(0, 20) if rng.random() < 0.5 else rng.randint(0, 60)
    last = first + step * rng.randint(3, 14)
    answer = listing([str(value) for value in range(first, last + 1, step)])
    plain = number_words(step) + ("es" if step == 6 else "s") if step < 20 else f"{step}s"
    patterns = (
        "Count {|up }{in steps of|by} $s from $a to $b{.|}",
        "Count from $a to $b {in steps of|by} $s{.|}",
        "Count {by|in} $p from $a to $b{.|}",
    )
    user = phrase(rng, patterns, s=str(step), p=plain.replace("tys", "ties"), a=str(first), b=str(last))
    return Problem(f"step {first} {last} {step}", user, answer, exact(answer), f"I add {step} each time.")


def _sequence(rng: random.Random) -> Problem:
    """What comes next in a row of numbers with equal steps, or that double."""
    step, first, shown = (
        rng.choice((1, 1, 2, 2, 3, 4, 5, 5, 10, 10, -1, -2, 100)),
        rng.randint(0, 60),
        rng.randint(3, 6),
    )
    if rng.random() < 0.15:
        first = rng.randint(1, 9)
        row = [first * 2**place for place in range(shown + 3)]
    else:
        row = [first + 40 * (step < 0) + step * place for place in range(shown + 3)]
    typed = ", ".join(str(value) for value in row[:shown])
    key = f"sequence {typed}"
    if rng.random() < 0.5:
        patterns = (
            "{What comes next|What is next|What is the next number|Which number comes next|Next number}: $l{?|, ...|...|}",
            "$l, {what comes next|what is next|next}?",
            "{What is the next number in|Find the next number of} {this sequence|the sequence}: $l{?|}",
            "What comes {next|after that} in $l?",
        )
        return Problem(
            key, phrase(rng, patterns, l=typed), f"{row[shown]}", number(row[shown]), f"The step is {row[1] - row[0]}."
        )
    patterns = (
        "{Continue|Go on with|Complete|Extend} {the sequence|this sequence|the series|this|the row}: $l{|...|, ...}",
        "Continue {counting|}: $l{|...|, ...}",
        "Continue $l{|...|, ...}",
    )
    answer = listing([str(value) for value in row[shown:]])
    return Problem(key, phrase(rng, patterns, l=typed), answer, exact(answer), f"The step is {row[1] - row[0]}.")


def _count_items(rng: random.Random) -> Problem:
    items = [any_word(rng) for _ in range(rng.randint(1, 10))]
    count = len(items)
    patterns = (
        "How many {items|things|words|entries} are {in this list|here|listed here}: $l{?|}",
        "How many {words|items} {are there|do you see} in: $l",
        "Count {these|the|the following} {items|words|things}: $l",
    )
    answer = f"There {'is 1 item' if count == 1 else f'are {count} items'}."
    user = phrase(rng, patterns, l=", ".join(items))
    return Problem(
        f"items {items}", user, answer, number(count), f"{listing([f'{i} {w}' for i, w in enumerate(items, 1)])}."
    )


def _count_letters(rng: random.Random) -> Problem:
    word = any_word(rng)
    spelled = "-".join(word)
    shown = word.capitalize() if rng.random() < 0.12 else word
    if rng.random() < 0.12:
        patterns = (
            "How many vowels {are in|are there in} {the word |}$w{?|}",
            "How many vowels does {the word |}$w have?",
            "Count the vowels {in|of} {the word |}$w{.|}",
        )
        found = [letter for letter in word if letter in "aeiou"]
        ending = "1 vowel" if len(found) == 1 else f"{len(found)} vowels"
        answer = f"{spelled}: {listing(found)}: {ending}."
        return Problem(
            f"vowels {word}", phrase(rng, patterns, w=shown), answer, number(len(found)), f"I spell it: {spelled}."
        )
    if rng.random() < 0.4:
        patterns = (
            "How many letters {are in|are there in} {the word |}$w{?|}",
            'How many letters {are in|are there in} {the word |}"$w"{?|}',
            "How many letters does {the word |}$w have?",
            "Number of letters in $w{?|}",
            "Count the letters {in|of} {the word |}$w{.|}",
            "How long is the word $w?",
        )
        user = phrase(rng, patterns, w=shown)
        steps = listing([f"{letter} {place}" for place, letter in enumerate(word, 1)])
        answer = f"{steps}: {len(word)} letters."
        return Problem(f"letters {word}", user, answer, number(len(word)), f"I spell it: {spelled}.")
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("abcdefghijklmnopqrstuvwxyz")
    count = word.count(letter)
    patterns = (
        "How many {times does the letter $c appear|times does $c appear|times is $c} in {the word |}$w?",
        "How many {|letters }{|letter }$cs {are in|are there in} {the word |}$w?",
        "Count the {|letter }$cs in $w{.|}",
        "How many {\"$c\"|$u|$us|$u's|$c|$c's|letters $c} {are in|are there in|in|does it take to write} {the word |}$w{?|}",
        "How {many times|often} {is there a|does the letter} $c {in|appear in|occur in} {the word |}$w?",
    )
    slots = {"c": letter, "w": shown, "cs": f"{letter}s", "u": letter.upper(), "us": f"{letter.upper()}s"}
    user = phrase(rng, patterns, **slots)
    times = "time" if count == 1 else "times"
    answer = f"{spelled}: {letter} appears {count} {times}."
    return Problem(f"letter {letter} {word}", user, answer, number(count), f"I spell it and look for {letter}.")


def _count_words(rng: random.Random) -> Problem:
    words = [any_word(rng) for _ in range(rng.randint(2, 9))]
    user = phrase(
        rng,
        (
            "How many words are in {this sentence|this text|the sentence}: $t",
            "Count the words{| in this}: $t",
            "How many words {does this have|are there}: $t",
        ),
        t=" ".join(words),
    )
    answer = f"There are {len(words)} words."
    return Problem(
        f"words {words}", user, answer, number(len(words)), f"{listing([f'{i} {w}' for i, w in enumerate(words, 1)])}."
    )


_SORT_WORDS = (
    "Sort {these|these words|the following words|the words|them|this list}{| alphabetically| in alphabetical order| from A to Z}: $l",
    "{Put|Arrange|Order} {these words|these|the words} in alphabetical order: $l",
    "{Alphabetize|Alphabetise|Sort alphabetically|Alphabetical order please}: $l",
    "{Can you sort|Please sort|Could you sort} {these|these words|this list}: $l{?|}",
    "sort $l{| alphabetically}",
    "{Sort|Please sort|Order} {the words|these words|words|the names|the list} $l{| alphabetically| in alphabetical order}",
)
_SORT_NUMBERS = (
    "Sort {these|these numbers|the following numbers|the numbers|this list}{| from smallest to largest| in ascending order| ascending}: $l",
    "{Put|Arrange} {these numbers|these|the numbers} in {ascending |increasing |}order: $l",
    "{Order|Please sort|Can you sort|Sort} {these numbers|these|the numbers} {from smallest to largest|from low to high}: $l",
    "sort $l",
    "{Sort|Please sort|Order|Can you sort|Arrange} {the numbers|these numbers|numbers|the list} $l{| from smallest to largest| in ascending order|}",
)
_SORT_NUMBERS_DOWN = (
    "Sort {these|these numbers|the numbers} {from largest to smallest|in descending order|descending|from high to low}: $l",
    "{Put|Arrange} {these numbers|these} in {descending|decreasing} order: $l",
    "Sort in {descending|reverse} order: $l",
    "{Sort|Order} {the numbers |these numbers |}$l {in descending order|from largest to smallest|descending}",
)


def sorting(rng: random.Random) -> Problem:
    """Words into alphabetical order, numbers into ascending or descending order, the largest or smallest of a few."""
    kind = rng.random()
    if kind > 0.94:
        return _compare(rng)
    if kind < 0.4:
        pool = rng.choice((FRUITS, ANIMALS, OBJECTS, FIRST_NAMES, list(WORDS), list(WORDS)))
        words = rng.sample(pool, rng.randint(2, 7))
        if rng.random() < 0.06:
            user = phrase(
                rng,
                ("Sort {these|these words} in reverse alphabetical order: $l", "Sort from Z to A: $l"),
                l=typed_list(rng, words),
            )
            answer = listing(sorted(words, key=str.lower, reverse=True))
        else:
            user, answer = phrase(rng, _SORT_WORDS, l=typed_list(rng, words)), listing(sorted(words, key=str.lower))
        return Problem(
            f"sort {sorted(words)}", user, answer, exact(answer), "I compare the first letters, then the next ones."
        )
    digits = rng.choice((1, 2, 2, 3))
    values = [sized(rng, digits) if rng.random() < 0.3 else rng.randrange(10**digits) for _ in range(rng.randint(2, 8))]
    typed = typed_list(rng, [str(value) for value in values])
    if kind > 0.83:
        biggest = rng.random() < 0.5
        patterns = (
            "{Which|What} is the {$k|$k number}{| here| of these| in this list}: $l{?|}",
            "Find the $k {of|in}: $l",
            "{Which of these|Which number} is $k: $l{?|}",
        )
        word = rng.choice(("largest", "biggest", "greatest", "highest") if biggest else ("smallest", "lowest", "least"))
        best = max(values) if biggest else min(values)
        user = phrase(rng, patterns, k=word, l=typed)
        return Problem(
            f"extreme {sorted(values)}", user, f"{best}", number(best), f"I compare them all; the {word} is {best}."
        )
    down = rng.random() < 0.25
    answer = listing([str(value) for value in sorted(values, reverse=down)])
    user = phrase(rng, _SORT_NUMBERS_DOWN if down else _SORT_NUMBERS, l=typed)
    return Problem(f"sort {sorted(values)}", user, answer, exact(answer), "I compare the numbers one by one.")


def _compare_decimals(rng: random.Random) -> Problem:
    """Which of two decimal numbers is larger."""
    whole = rng.randint(0, 30)
    a, b = rng.sample([f"{whole}.{digits}" for digits in (*range(1, 10), *(d for d in range(11, 100) if d % 10))], 2)
    patterns = ("{Which is|What is|Which number is} {larger|bigger|greater|higher}{, |: }$a or $b{?|}",)
    best = max(a, b, key=float)
    return Problem(
        f"compare {sorted((a, b))}",
        phrase(rng, patterns, a=a, b=b),
        best,
        exact(best),
        f"I compare {a} and {b} digit by digit.",
    )


def _compare(rng: random.Random) -> Problem:
    """Two numbers: which is larger, or whether one is."""
    a, b = sized(rng, 4), sized(rng, 4)
    if rng.random() < 0.5:
        b = max(0, a + rng.choice((-20, -10, -9, -2, -1, 1, 2, 9, 10, 20)))
    if a == b:
        b += 1
    if rng.random() < 0.15:
        return _compare_decimals(rng)
    key = f"compare {min(a, b)} {max(a, b)}"
    more = rng.random() < 0.5
    word = rng.choice(("larger", "bigger", "greater", "higher", "more") if more else ("smaller", "lower", "less"))
    if rng.random() < 0.6:
        patterns = ("{Which is|What is|Which number is} $k{, |: }$a or $b{?|}", "{What is|Which is} $k, $a or $b?")
        best = max(a, b) if more else min(a, b)
        user = phrase(rng, patterns, k=word, a=str(a), b=str(b))
        return Problem(key, user, f"{best}", number(best), f"I compare {a} and {b}.")
    holds = (a > b) == more
    user = phrase(
        rng,
        ("Is $a $k than $b{?|}", "{Tell me, is|Is it true that} $a {is |}$k than $b{?|}"),
        k=word,
        a=str(a),
        b=str(b),
    )
    answer = f"{'Yes' if holds else 'No'}, {a} is {word if holds else 'not ' + word} than {b}."
    return Problem(key, user, answer, exact(answer), f"I compare {a} and {b}.")


def _random_code(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijkmnpqrstuvwxyz23456789") for _ in range(rng.randint(3, 8)))


def _any_text(rng: random.Random) -> str:
    """A few words, names, numbers or codes to copy."""
    pieces: list[str] = []
    for _ in range(rng.randint(1, 10)):
        kind = rng.random()
        if kind < 0.6:
            pieces.append(any_word(rng))
        elif kind < 0.75:
            pieces.append(any_name(rng))
        elif kind < 0.88:
            pieces.append(str(sized(rng, 5)))
        else:
            pieces.append(_random_code(rng))
    return rng.choice((" ", " ", " ", ", ")).join(pieces)


def copying(rng: random.Random) -> Problem:
    """Repeating a text, reversing words or letters, changing case, spelling, and the first or last of a few."""
    return rng.choice(
        (_repeat, _repeat, _repeat, _reverse_words, _case, _case, _spell, _reverse_letters, _pick, _several)
    )(rng)


def _repeat(rng: random.Random) -> Problem:
    text = _any_text(rng)
    patterns = (
        "{Repeat|Please repeat|Copy|Echo|Say|Write} {after me|this|exactly this|the following|this text}: $t",
        "{Repeat|Copy|Say|Echo}: $t",
        '{Repeat|Say} "$t"{.|}',
        "Say {exactly |}this{ and nothing else|}: $t",
        '{Can you say|Please say|Can you repeat} "$t"{?|}',
    )
    return Problem(
        f"repeat {text}", phrase(rng, patterns, t=text), text, exact(text), "I give the text back unchanged."
    )


def _reverse_words(rng: random.Random) -> Problem:
    words = [any_word(rng) if rng.random() < 0.8 else str(sized(rng, 3)) for _ in range(rng.randint(2, 8))]
    patterns = (
        "{Reverse|Invert} the order of {these|these words|the words|this list|these items}: $l",
        "{Write|Say|Give me} {these|these words} {in reverse order|backwards|in reverse}: $l",
        "Reverse {this list|the list|these words|the words}: $l",
    )
    answer = listing(list(reversed(words)))
    return Problem(
        f"reverse {words}",
        phrase(rng, patterns, l=(", " if rng.random() < 0.75 else " ").join(words)),
        answer,
        exact(answer),
        "I start with the last one.",
    )


def _case(rng: random.Random) -> Problem:
    words = [any_word(rng) for _ in range(rng.randint(1, 5))]
    text = " ".join(words)
    if rng.random() < 0.6:
        patterns = (
            "{Write|Put|Say|Convert|Turn} {this|the following} {in upper case|in capital letters|in uppercase|in capitals|in all caps}: $t",
            "{Uppercase|Upper-case|Capitalise|To uppercase|All caps|In capitals}{| this}: $t",
            "Convert {|this }to uppercase: $t",
            "{Write|Spell} $t in {upper case|capital letters|uppercase|capitals}{.|}",
        )
        return Problem(
            f"upper {text}",
            phrase(rng, patterns, t=text),
            text.upper(),
            exact(text.upper()),
            "I make each letter a capital.",
        )
    patterns = (
        "{Write|Put|Say|Convert|Turn} {this|the following} {in|into} {lower case|small letters|lowercase}: $t",
        "{Lowercase|Lower-case|To lowercase|In small letters}{| this}: $t",
        "Convert {|this }to lowercase: $t",
    )
    return Problem(
        f"lower {text}", phrase(rng, patterns, t=text.upper()), text, exact(text), "I make each letter a small one."
    )


def _spell(rng: random.Random) -> Problem:
    word = any_word(rng)
    answer = "-".join(word)
    patterns = (
        "{Spell|Please spell|Can you spell|Spell out} {the word |}$w{.|}",
        '{Spell|Spell out} {the word |}"$w"{.|}',
        "How is {the word |}$w spelled?",
        "How do you spell {the word |}$w?",
        "{What is the spelling of|Give me the spelling of} $w{?|}",
    )
    user = phrase(rng, patterns, w=word)
    return Problem(f"spell {word}", user, answer, exact(answer), "I say its letters one by one.")


def _reverse_letters(rng: random.Random) -> Problem:
    word = any_word(rng) if rng.random() < 0.8 else f"{any_word(rng)} {any_word(rng)}"
    back = word[::-1]
    answer = f"{'-'.join(word)} becomes {'-'.join(back)}: {back}"
    patterns = (
        "{Reverse|Flip} the {letters of|word|letters in|string} $w{.|}",
        '{Reverse|Flip} {the word |the string |}"$w"{.|}',
        "{Write|Spell|Say} {the word |}$w backwards{.|}",
        "What is $w {backwards|spelled backwards|in reverse}?",
        "Reverse $w{.|}",
    )
    user = phrase(rng, patterns, w=word)
    return Problem(f"backwards {word}", user, answer, exact(answer, back), "I spell it, then read it from the end.")


def _pick(rng: random.Random) -> Problem:
    words = (
        rng.sample(WORDS, rng.randint(3, 7))
        if rng.random() < 0.8
        else [invented_word(rng) for _ in range(rng.randint(3, 6))]
    )
    place = rng.choice((0, len(words) - 1, rng.randrange(min(4, len(words)))))
    names = {0: "first", 1: "second", 2: "third", 3: "fourth"}
    name = "last" if place == len(words) - 1 else names.get(place, "last")
    if name == "last":
        place = len(words) - 1
    patterns = (
        "What is the $n {word|item}{| here| in this list| of this list}: $l{?|}",
        "{Give me|Tell me|Repeat} the $n {word|item}{| of this list}: $l",
    )
    return Problem(
        f"pick {name} {words}",
        phrase(rng, patterns, n=name, l=", ".join(words)),
        words[place],
        exact(words[place]),
        f"The list starts with {words[0]} and ends with {words[-1]}.",
    )


def _several(rng: random.Random) -> Problem:
    word, times = any_word(rng), rng.randint(2, 10)
    patterns = (
        "{Write|Say|Repeat} {the word |}$w $n times{.|}",
        "{Can you say|Please write|Please say} $w $n times{?|.}",
    )
    answer = " ".join([word] * times)
    spoken = str(times) if rng.random() < 0.6 else number_words(times)
    return Problem(
        f"several {word} {times}",
        phrase(rng, patterns, w=word, n=spoken),
        answer,
        exact(answer),
        f"I write {word} {times} times.",
    )
