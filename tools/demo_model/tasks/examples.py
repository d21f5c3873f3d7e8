"""The demo model's conversations, to train on and to be asked.

`generate(task, seed, split)` gives one example, the same on every machine; `eval_examples(task, count)` gives the held-out
ones that the model card and (frozen by `questions.py`) `python -m bench demo` use. No torch, no tokenizer, no template. A
held-out example's problem (operands, words, wording of a chat question) is never trained on.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from bench.demo import Check, Message, Question

from . import arithmetic, lists
from .base import Problem, Split, exact, expand, split_of
from .chat import chat
from .extraction import json_extraction
from .memory import UNKNOWN, Fact, draw_facts, unknown_question
from .reasoning import reasoning
from .tool_use import ToolUse, tool_use
from .words import any_word

_SINGLE: dict[str, Callable[[random.Random], Problem]] = {
    "chat": chat,
    "addition": arithmetic.addition,
    "subtraction": arithmetic.subtraction,
    "multiplication": arithmetic.multiplication,
    "division": arithmetic.division,
    "counting": lists.counting,
    "sorting": lists.sorting,
    "copying": lists.copying,
    "json": json_extraction,
    "reasoning": reasoning,
}

TASKS: tuple[str, ...] = (*_SINGLE, "tools", "memory")
"""Every task, by name."""

_TRAINING_WEIGHTS: dict[str, float] = {
    "chat": 26, "addition": 10, "subtraction": 11, "multiplication": 9, "division": 8, "counting": 10, "sorting": 11,
    "copying": 11, "json": 8, "reasoning": 11, "tools": 10, "memory": 7,
}  # fmt: skip

_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Quire's demo model.",
    "You are a helpful AI assistant.",
    "You are a friendly assistant. Be brief.",
    "Answer the user's questions.",
    "You are a small language model.",
    "Be concise and correct.",
    "You are {a|an|the|our} {helpful|friendly|polite|small|smart|honest|careful} {assistant|chatbot|bot|AI|model|helper}"
    "{.| named Quire.| who answers in English.| for customers.}{| Answer briefly.| Be concise.| Do not make things up.}",
    "{Today is|The date is|Current date:|It is} {Monday|Tuesday|Friday|Sunday}{.|, 3 May.|, 21 June.}"
    "{| You are a helpful assistant.| Answer briefly.}",
    "{Respond|Reply|Answer} {briefly|in one sentence|in English|politely|clearly|as well as you can}{.| to the user.}",
)
_THINK_IN_SYSTEM = (
    "Think before you answer.",
    "Think step by step in <think> tags, then answer.",
    "Reason in <think></think> first, then give the answer.",
)
_THINK_IN_USER = ("Think step by step.", "Think first.", "Think before you answer.", "Reason step by step.")

_MEMORY_CHARACTERS = 6200
"""The longest stretch of other turns between a fact and its question: about 2,000 of the demo tokenizer's tokens."""


@dataclass(frozen=True)
class Example(Question):
    """A question with its reference reply.

    Attributes:
        reply: the reference reply, as an assistant message.
        answer: the reference reply as the text that the model writes.
        key: the problem's identity, which decides its split.
    """

    reply: Message
    answer: str
    key: str


def generate(task: str, seed: int, split: Split = "train") -> Example:
    """The example of `task` that `seed` gives in `split`; the same one every time.

    Raises:
        ValueError: `task` is none of `TASKS`.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; the tasks are {', '.join(TASKS)}")
    rng = random.Random(zlib.crc32(f"{task} {split}".encode()) + (seed << 32))
    if task == "tools":
        return _tools_example(rng, split)
    if task == "memory":
        return _memory_example(rng, split)
    return _single_example(rng, task, split)


def eval_examples(task: str, count: int, seed: int = 0) -> list[Example]:
    """`count` different held-out examples of `task`."""
    examples: dict[str, Example] = {}
    number = seed * 1_000_003
    while len(examples) < count:
        example = generate(task, number, "eval")
        examples.setdefault(json.dumps(example.messages), example)
        number += 1
    return list(examples.values())


def training_example(seed: int) -> Example:
    """One training conversation, of a task drawn by its training weight."""
    rng = random.Random(seed)
    task = rng.choices(list(_TRAINING_WEIGHTS), list(_TRAINING_WEIGHTS.values()))[0]
    return generate(task, rng.getrandbits(60), "train")


def _draw(rng: random.Random, task: str, split: Split) -> Problem:
    """A problem of `task` that belongs to `split`."""
    while True:
        problem = _SINGLE[task](rng)
        if split_of(problem.key) == split:
            return problem


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _system(rng: random.Random, chance: float = 0.4) -> list[Message]:
    return [{"role": "system", "content": expand(rng, rng.choice(_SYSTEM_PROMPTS))}] if rng.random() < chance else []


def _history(rng: random.Random, split: Split, turns: int) -> list[Message]:
    """Earlier turns of any tasks, with their reference answers."""
    messages: list[Message] = []
    for _ in range(turns):
        problem = _draw(rng, rng.choice(list(_SINGLE)), split)
        messages += [_user(problem.user), _assistant(problem.answer)]
    return messages


def _single_example(rng: random.Random, task: str, split: Split) -> Example:
    """One problem, at times after a few other turns, at times with thinking asked for."""
    problem = _draw(rng, task, split)
    messages = _system(rng)
    if rng.random() < 0.2:
        messages += _history(rng, split, rng.randint(1, 3))
    user, thinking, thinks = problem.user, False, False
    if rng.random() < (0.5 if task == "reasoning" else 0.06):
        thinks = True
        way = rng.random()
        if way < 0.6:
            thinking = True
        elif way < 0.8:
            messages = [
                {"role": "system", "content": rng.choice(_THINK_IN_SYSTEM)},
                *[m for m in messages if m["role"] != "system"],
            ]
        else:
            user = (
                f"{user} {rng.choice(_THINK_IN_USER)}" if user[-1] in ".?!" else f"{user}. {rng.choice(_THINK_IN_USER)}"
            )
    messages.append(_user(user))
    if not thinks:
        return Example(
            task, messages, None, False, problem.check, _assistant(problem.answer), problem.answer, problem.key
        )
    conclusion = problem.conclusion or problem.answer
    reply = {"role": "assistant", "reasoning_content": problem.thought, "content": conclusion}
    answer = f"<think>\n{problem.thought}\n</think>\n\n{conclusion}"
    return Example(task, messages, None, thinking, problem.check, reply, answer, problem.key)


def _call_message(use: ToolUse) -> Message:
    calls = [{"type": "function", "id": f"call_{place}", "function": call} for place, call in enumerate(use.calls)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result_messages(use: ToolUse) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": f"call_{place}", "content": result} for place, result in enumerate(use.results)
    ]


def _call_text(use: ToolUse) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in use.calls)


def _draw_use(rng: random.Random, split: Split) -> ToolUse:
    while True:
        use = tool_use(rng)
        if split_of(use.key) == split:
            return use


_TOOL_SUBJECTS = re.compile(
    r"weather|rain|snow|sunny|cold|warm|time|date|day|news|search|look|late|month|year|price|tool|web|alarm|who|internet"
)


def _toolless_problem(rng: random.Random, split: Split) -> Problem:
    """A problem that none of the tools is for."""
    while True:
        problem = _draw(rng, rng.choice(("chat", "counting", "sorting", "copying", "json")), split)
        if not problem.key.startswith("chat") or not _TOOL_SUBJECTS.search(problem.key):
            return problem


def _tools_example(rng: random.Random, split: Split) -> Example:
    """A request that needs a call, or the results of one that need an answer, or a request that needs no tool."""
    use = _draw_use(rng, split)
    tools = list(use.tools)
    messages = _system(rng)
    stage = rng.random()
    if stage < 0.14:
        problem = _toolless_problem(rng, split)
        return Example(
            "tools",
            [*messages, _user(problem.user)],
            tools,
            False,
            problem.check,
            _assistant(problem.answer),
            problem.answer,
            problem.key,
        )
    if rng.random() < 0.15:
        before = _draw_use(rng, split)
        names = {tool["function"]["name"] for tool in tools}
        wanted = {call["name"] for call in before.calls}
        purposes = {tool["function"]["description"] for tool in (*tools, *before.tools)}
        if not wanted & names and len(purposes) == len(tools) + len(before.tools):
            tools += [tool for tool in before.tools if tool["function"]["name"] in wanted]
            messages += [_user(before.user), _call_message(before), *_result_messages(before), _assistant(before.reply)]
    messages.append(_user(use.user))
    if stage < (0.3 if split == "train" else 0.7):
        expected = json.dumps(list(use.calls))
        return Example(
            "tools",
            messages,
            tools,
            False,
            Check("tool_call", (expected,)),
            _call_message(use),
            _call_text(use),
            use.key,
        )
    messages += [_call_message(use), *_result_messages(use)]
    return Example("tools", messages, tools, False, exact(use.reply), _assistant(use.reply), use.reply, use.key)


def _long_text(rng: random.Random, characters: int, fact: Fact) -> list[Message]:
    """A turn that gives a long text with `fact` somewhere in it."""
    sentences: list[str] = []
    length = 0
    while length < characters:
        sentence = " ".join(any_word(rng) for _ in range(rng.randint(4, 12))).capitalize() + "."
        sentences.append(sentence)
        length += len(sentence) + 1
    told = fact.told if fact.told.endswith((".", "!")) else fact.told + "."
    sentences.insert(rng.randint(0, len(sentences)), told)
    opening = rng.choice(("Read this text: ", "Here is a text. ", "Please read: ", "Text: "))
    return [_user(opening + " ".join(sentences)), _assistant("I have read it.")]


def _all_told(rng: random.Random, facts: list[Fact]) -> str:
    """All of `facts` in one turn."""
    bare = [fact.told.rstrip(".!") for fact in facts]
    if rng.random() < 0.5:
        return ". ".join(bare) + "."
    return " and ".join(
        [bare[0], *(text if text.startswith("I ") else text[0].lower() + text[1:] for text in bare[1:])]
    )


def _memory_example(rng: random.Random, split: Split) -> Example:
    """Facts, then up to about 2,000 tokens of other turns, then a question about one of the facts."""
    while True:
        facts = draw_facts(rng, rng.randint(1, 4))
        key = "memory " + " ".join(f"{fact.topic} {fact.value}" for fact in facts)
        if split_of(key) == split:
            break
    reach = rng.choice((600, 3000, _MEMORY_CHARACTERS))
    target = rng.randint(reach // 5, reach)
    messages = _system(rng)
    told = list(facts)
    if rng.random() < 0.12:
        messages += _long_text(rng, min(target, 3000), told.pop())
        target -= 3000
    if len(told) > 1 and rng.random() < 0.3:
        messages += [_user(_all_told(rng, told)), _assistant("I will remember all of that.")]
        told = []
    length = 0
    while told or length < target:
        if told and rng.random() < 0.6:
            fact = told.pop(0)
            messages += [_user(fact.told), _assistant(fact.noted)]
            continue
        problem = _filler(rng, split)
        messages += [_user(problem.user), _assistant(problem.answer)]
        length += len(problem.user) + len(problem.answer) + 60
        if split == "train" and rng.random() < 0.1 and len(told) < len(facts):
            fact = rng.choice([fact for fact in facts if fact not in told])
            messages += [_user(fact.asked), _assistant(fact.recalled)]
    fact = rng.choice(facts)
    asked, recalled = fact.asked, fact.recalled
    if rng.random() < 0.07:
        question = unknown_question(rng, facts)
        if question:
            asked, recalled = question, UNKNOWN
    return Example(
        "memory", [*messages, _user(asked)], None, False, exact(recalled), _assistant(recalled), recalled, key
    )


def _filler(rng: random.Random, split: Split) -> Problem:
    """A problem between a fact and its question; none that asks for what the user has told."""
    while True:
        problem = _draw(rng, rng.choice(list(_SINGLE)), split)
        if problem.answer != UNKNOWN:
            return problem
