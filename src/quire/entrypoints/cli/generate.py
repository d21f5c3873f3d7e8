"""`quire generate`: answers for every prompt of a file, without a server.

Input: a text file with one prompt a line, or JSON lines: a string, `{"prompt": …}`, `{"prompt_token_ids": […]}` or
`{"messages": […]}`; a JSON object may carry an `id`. Output: JSON lines in the order of the input.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from quire.errors import ConfigError

SAMPLING = {
    "n": (int, "answers a prompt"),
    "temperature": (float, "sampling temperature; 0 is greedy"),
    "top_p": (float, "share of the probability to draw from"),
    "top_k": (int, "likeliest tokens to draw from"),
    "min_p": (float, "least probability, relative to the likeliest token's"),
    "presence_penalty": (float, "for tokens that were used"),
    "frequency_penalty": (float, "for each time a token was used"),
    "repetition_penalty": (float, "for tokens of the prompt and the answer"),
    "max_tokens": (int, "most tokens of an answer"),
    "min_tokens": (int, "least tokens of an answer"),
    "logprobs": (int, "logprobs of that many likeliest tokens"),
}
CHUNK = 1024
"""Prompts that are given to the engine at once; output is written after each chunk."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.engine.arg_utils import EngineArgs

    parser.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help="a local folder or a hub id; none: the demo model"
    )
    parser.add_argument(
        "-i", "--input", required=True, metavar="FILE", help="prompts: .txt or .jsonl; - is standard input"
    )
    parser.add_argument(
        "-o", "--output", default="-", metavar="FILE", help="answers as JSON lines; - is standard output"
    )
    parser.add_argument("--chat", action="store_true", help="take each text prompt as a user's message")
    parser.add_argument("--system-prompt", metavar="TEXT", help="with --chat, what the model is told first")
    sampling = parser.add_argument_group("Sampling", "the model's generation config decides what is not given")
    for name, (kind, text) in SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", dest=f"sampling_{name}", type=kind, help=text)
    sampling.add_argument("--sampling-seed", type=int, help="seed of each prompt's answers")
    sampling.add_argument("--stop", nargs="+", help="strings that end an answer")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end of sequence")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    from quire.engine.arg_utils import EngineArgs
    from quire.entrypoints.cli.serve import take_model

    take_model(args)
    rows = list(read_rows(args.input, args.chat, args.system_prompt))
    if not rows:
        raise ConfigError.of("input", f"{args.input!r} holds no prompt.")
    engine_args = EngineArgs.from_cli_args(args)

    from quire import LLM

    with _open_output(args.output) as sink:
        llm = LLM.from_engine_args(engine_args)
        params = _sampling_params(args, llm.get_default_sampling_params())
        if args.output != "-":
            sink.truncate(0)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            for row, output in zip(chunk, _answer(llm, chunk, params, not args.no_progress), strict=True):
                sink.write(json.dumps(_record(row, output), ensure_ascii=False) + "\n")
            sink.flush()
    return 0


def read_rows(path: str, as_chat: bool, system_prompt: str | None) -> Iterator[dict[str, Any]]:
    """The input's rows, each with exactly one of `prompt`, `prompt_token_ids` and `messages`.
    Raises ConfigError: the file, or the line, that cannot be read."""
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        is_json = path.endswith((".jsonl", ".json"))
        row: dict[str, Any] = _parse(line, f"input: line {number}") if is_json else {"prompt": line}
        if as_chat and "prompt" in row:
            system = [{"role": "system", "content": system_prompt}] if system_prompt else []
            row["messages"] = [*system, {"role": "user", "content": row.pop("prompt")}]
        yield {"id": row.get("id", number - 1), **row}


def _read_lines(path: str) -> list[str]:
    try:
        if path == "-":
            return sys.stdin.read().splitlines()
        with open(path, encoding="utf-8") as file:
            return file.read().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("input", f"cannot read {path!r}: {error}.") from None


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.", setting="input") from None
    if isinstance(row, str):
        return {"prompt": row}
    kinds = {"prompt": str, "prompt_token_ids": list, "messages": list}
    present = [name for name in kinds if isinstance(row, dict) and name in row]
    if len(present) != 1 or not isinstance(row[present[0]], kinds[present[0]]):
        message = f"{where}: expected a string, or an object with one of prompt (text), prompt_token_ids and messages (lists)."
        raise ConfigError(message, setting="input")
    return row


def _sampling_params(args: argparse.Namespace, params: Any) -> Any:
    import msgspec

    values = {name: getattr(args, f"sampling_{name}") for name in SAMPLING}
    values |= {"seed": args.sampling_seed, "stop": args.stop, "ignore_eos": args.ignore_eos or None}
    return msgspec.structs.replace(params, **{name: value for name, value in values.items() if value is not None})


def _open_output(path: str) -> Any:
    if path == "-":
        return os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    try:
        return open(path, "a", encoding="utf-8")  # what is there stays until the model is loaded; the caller closes it
    except OSError as error:
        raise ConfigError.of("output", f"cannot write {path!r}: {error}.") from None


def _answer(llm: Any, rows: list[dict[str, Any]], params: Any, progress: bool) -> list[Any]:
    """Answers in the order of the rows; texts and token ids go in one batch, conversations in another."""
    chats = [index for index, row in enumerate(rows) if "messages" in row]
    plain = [index for index, row in enumerate(rows) if "messages" not in row]
    answers: list[Any] = [None] * len(rows)
    if plain:
        prompts = [_prompt(rows[index]) for index in plain]
        for index, output in zip(plain, llm.generate(prompts, params, use_tqdm=progress), strict=True):
            answers[index] = output
    if chats:
        conversations = [rows[index]["messages"] for index in chats]
        for index, output in zip(chats, llm.chat(conversations, params, use_tqdm=progress), strict=True):
            answers[index] = output
    return answers


def _prompt(row: dict[str, Any]) -> dict[str, Any]:
    name = "prompt" if "prompt" in row else "prompt_token_ids"
    return {name: row[name]}


def _record(row: dict[str, Any], output: Any) -> dict[str, Any]:
    record: dict[str, Any] = {"id": row["id"]}
    for name in ("prompt", "messages"):
        if name in row:
            record[name] = row[name]
    record["outputs"] = [
        {
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "cumulative_logprob": choice.cumulative_logprob,
        }
        for choice in output.outputs
    ]
    if output.error is not None:
        record["error"] = output.error
    return record
