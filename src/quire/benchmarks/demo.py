"""`quire bench demo`: what the built-in demo model gets right, task by task, with greedy decoding.

An end-to-end gate: a kernel, a cache or a quantization that spoils the numbers shows here.
"""

import argparse
from typing import Any

from quire.benchmarks import common
from quire.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many questions, and the engine's flags."""
    from quire.engine.arg_utils import EngineArgs

    parser.add_argument("--num-examples", type=common.positive, default=100, help="questions a task (100)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only these tasks")
    parser.add_argument("--bench-seed", type=int, default=0, help="seed of the questions (0)")
    parser.add_argument("--max-tokens", type=common.positive, default=384, help="most tokens of an answer (384)")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print up to N wrong answers a task")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON too")
    EngineArgs.add_cli_args(parser)


def run_command(args: argparse.Namespace) -> dict[str, Any]:
    """Ask, judge, print the table, give the figures."""
    from quire.benchmarks.demo_tasks import TASKS

    tasks = list(args.tasks or TASKS)
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown:
        raise ConfigError(f"tasks: {unknown[0]!r} is unknown; there are {', '.join(TASKS)}.", setting="tasks")
    llm = common.load_engine(args)
    figures: dict[str, Any] = {"model": common.model_name(llm.llm_engine.config.model.model), "tasks": {}}
    rows: list[list[Any]] = []
    for task in tasks:
        right, count, wrong = _one_task(llm, args, task)
        figures["tasks"][task] = {"correct": right, "examples": count, "accuracy": right / count}
        rows.append([task, f"{right / count:.1%}", right, count])
        for question, answer in wrong[: args.show_wrong]:
            print(f"[{task}] {question!r}\n    -> {answer!r}")
    total = sum(row[3] for row in rows)
    correct = sum(row[2] for row in rows)
    figures["accuracy"] = correct / total
    rows.append(["all", f"{correct / total:.1%}", correct, total])
    common.print_columns(f"Demo tasks: {figures['model']}", ("task", "accuracy", "right", "asked"), rows)
    return figures


def _one_task(llm: Any, args: argparse.Namespace, task: str) -> tuple[int, int, list[tuple[str, str]]]:
    from quire import SamplingParams
    from quire.benchmarks.demo_tasks import eval_examples, is_correct

    examples = list(eval_examples(task, args.num_examples, args.bench_seed))
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, skip_special_tokens=False)
    outputs = ask(llm, examples, params, not args.no_progress)
    right = 0
    wrong: list[tuple[str, str]] = []
    for example, text in zip(examples, outputs, strict=True):
        if is_correct(example, text):
            right += 1
        else:
            wrong.append((str(example.messages[-1].get("content")), text))
    return right, len(examples), wrong


def ask(llm: Any, examples: list[Any], params: Any, progress: bool) -> list[str]:
    """Answers in order. One batch, though each example has its own tools and its own say on thinking."""
    tokenizer = llm.get_tokenizer()
    prompts = [
        {
            "prompt_token_ids": tokenizer.apply_chat_template(
                example.messages,
                tools=example.tools,
                add_generation_prompt=True,
                enable_thinking=example.thinking,
                tokenize=True,
            )
        }
        for example in examples
    ]
    outputs = llm.generate(prompts, params, use_tqdm=progress)
    return [output.outputs[0].text for output in outputs]
