"""`quire bench demo`: what the built-in demo model gets right, task by task, with greedy decoding.

An end-to-end gate: a kernel, a cache or a quantization that spoils the numbers shows here.
"""

import argparse
from typing import Any

from quire.benchmarks import common, demo_questions
from quire.benchmarks.demo_questions import Question
from quire.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many questions, and the engine's flags."""
    common.flag(parser, "--num-examples", 100, "questions a task")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks")
    common.flag(parser, "--bench-seed", 0, "draws the questions (0: the first)")
    common.flag(parser, "--max-tokens", 384, "most tokens of an answer")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print up to N wrong answers a task")
    common.flag(parser, "--no-progress", False, "no progress bar")
    common.add_engine_arguments(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Ask, judge, print the table, give the figures."""
    known = demo_questions.held_out()
    tasks = args.tasks or list(known)
    unknown = sorted(set(tasks) - set(known))
    if unknown:
        raise ConfigError.of("tasks", f"{unknown[0]!r} is unknown; there are {', '.join(known)}.")
    drawn = {task: demo_questions.draw(task, args.num_examples, args.bench_seed) for task in tasks}
    llm = common.load_engine(args)
    figures: dict[str, Any] = {"model": common.model_name(llm.llm_engine.config.model.model), "tasks": {}}
    rows: list[list[Any]] = []
    for task, questions in drawn.items():
        wrong = _wrong_answers(llm, args, questions)
        count = len(questions)
        right = count - len(wrong)
        figures["tasks"][task] = {"correct": right, "examples": count, "accuracy": right / count}
        rows.append([task, f"{right / count:.1%}", right, count])
        for question, answer in wrong[: args.show_wrong]:
            print(f"[{task}] {str(question.messages[-1].get('content'))!r}\n    -> {answer!r}")
    total = sum(row[3] for row in rows)
    correct = sum(row[2] for row in rows)
    figures["accuracy"] = correct / total
    rows.append(["all", f"{correct / total:.1%}", correct, total])
    common.print_columns(f"Demo tasks: {figures['model']}", ("task", "accuracy", "right", "asked"), rows)
    return figures


def _wrong_answers(llm: Any, args: argparse.Namespace, questions: list[Question]) -> list[tuple[Question, str]]:
    from quire import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, skip_special_tokens=False)
    answers = ask(llm, questions, params, not args.no_progress)
    pairs = zip(questions, answers, strict=True)
    return [(question, answer) for question, answer in pairs if not demo_questions.is_correct(question, answer)]


def ask(llm: Any, questions: list[Question], params: Any, progress: bool) -> list[str]:
    """Answers in order. One batch, though each question has its own tools and its own say on thinking."""
    tokenizer = llm.get_tokenizer()
    prompts = [
        {
            "prompt_token_ids": tokenizer.apply_chat_template(
                question.messages,
                tools=question.tools,
                add_generation_prompt=True,
                enable_thinking=question.thinking,
                tokenize=True,
            )
        }
        for question in questions
    ]
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    return [output.outputs[0].text for output in outputs]
