"""`quire generate`: answers for every prompt of a file, without a server.

Input: a text file with one text a line, or JSON lines: a string, `{"prompt": …}`, `{"prompt_token_ids": […]}` or
`{"messages": […]}`; a JSON object may carry an `id`. A text is a user's message where the model has a chat template. Output: JSON
lines in the order of the input.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from quire.engine.arg_parser import Flags, add_flags
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError, refusing

SAMPLING = {
    "n": (int, "answers a prompt"),
    "temperature": (float, "sampling temperature; 0 is greedy"),
    "top_p": (float, "share of the probability to sample from"),
    "top_k": (int, "likeliest tokens to sample from"),
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


_FLAGS: Flags = (
    ("model_tag", None, "a local folder or a hub id; none: the demo model", {"nargs": "?", "metavar": "MODEL"}),
    ("-i --input", None, "prompts: .txt or .jsonl; - is standard input", {"required": True, "metavar": "FILE"}),
    ("-o --output", "-", "answers as JSON lines (standard output, as for -)", {"metavar": "FILE"}),
    ("--overwrite", False, "replace an output that exists"),
    (
        "--chat",
        None,
        "take each text as a user's message, or not: as a text to continue (default: as a message where the model has a "
        "chat template, and a prompt in a JSON object as a text to continue)",
        {"action": argparse.BooleanOptionalAction},
    ),
    ("--system-prompt", None, "what the model is told before each text that is a message", {"metavar": "TEXT"}),
    ("--no-progress", False, "no progress bar"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, {"": _FLAGS})
    sampling = parser.add_argument_group("Sampling", "the model's generation config decides what is not given")
    for name, (kind, text) in SAMPLING.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", dest=f"sampling_{name}", type=kind, help=text)
    sampling.add_argument("--sampling-seed", type=int, help="seed of each prompt's answers")
    sampling.add_argument("--stop", nargs="+", help="strings that end an answer")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end of sequence")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> None:
    from quire.entrypoints.cli.serve import take_model

    take_model(args)
    if args.system_prompt and args.chat is False:
        raise ConfigError.of("system_prompt", "there are no messages with --no-chat; leave one of them out.")
    rows = list(read_rows(args.input))
    if not rows:
        raise ConfigError.of("input", f"{args.input!r} holds no prompt.")
    engine_args = EngineArgs.from_cli_args(args)

    from quire import LLM

    with _open_output(args.output, args.overwrite) as sink:
        llm = LLM.from_engine_args(engine_args)
        rows = as_prompts(rows, _takes_messages(args, llm, rows), args.system_prompt)
        params = _sampling_params(args, llm.get_default_sampling_params())
        if os.path.isfile(args.output):
            sink.truncate(0)
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            for row, output in zip(chunk, _answer(llm, chunk, params, not args.no_progress), strict=True):
                sink.write(json.dumps(_record(row, output), ensure_ascii=False) + "\n")
            sink.flush()


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """The input's rows, each with exactly one of `text` (no JSON object says what it is), `prompt`, `prompt_token_ids` and
    `messages`.
    Raises ConfigError: the file, or the line, that cannot be read."""
    for number, line in enumerate(_read_lines(path), start=1):
        if not line.strip():
            continue
        is_json = path.endswith((".jsonl", ".json"))
        row: dict[str, Any] = _parse(line, f"input: line {number}") if is_json else {"text": line}
        yield {"id": row.get("id", number - 1), **row}


def as_prompts(
    rows: list[dict[str, Any]], as_messages: frozenset[str], system_prompt: str | None
) -> list[dict[str, Any]]:
    """Rows with `prompt` or `messages` in place of `text`. `as_messages`: which of `text` and `prompt` are a user's message."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    prompts: list[dict[str, Any]] = []
    for row in rows:
        name = next((name for name in ("text", "prompt") if name in row), None)
        if name in as_messages:
            row = {**row, "messages": [*system, {"role": "user", "content": row[name]}]}
        elif name == "text":
            row = {**row, "prompt": row["text"]}
        dropped = {"text", "prompt"} if name in as_messages else {"text"}
        prompts.append({key: value for key, value in row.items() if key not in dropped})
    return prompts


def _takes_messages(args: argparse.Namespace, llm: Any, rows: list[dict[str, Any]]) -> frozenset[str]:
    """Which kinds of rows are a user's message; says so where it was not asked for."""
    if args.chat is not None:
        return frozenset({"text", "prompt"} if args.chat else ())
    tokenizer = llm.llm_engine.tokenizer
    is_chat = tokenizer is not None and (tokenizer.template is not None or tokenizer.writes_tokens)
    if not is_chat and args.system_prompt:
        message = "the model has no chat template, so there are no messages; give --chat-template, or leave it out."
        raise ConfigError.of("system_prompt", message)
    if is_chat and any("text" in row for row in rows):
        note = (
            "the model has a chat template: each text is taken as a user's message (--no-chat: as a text to continue)"
        )
        print(f"quire generate: {note}", file=sys.stderr)
    return frozenset({"text"} if is_chat else ())


def _read_lines(path: str) -> list[str]:
    with refusing(OSError, UnicodeDecodeError, setting="input", what=f"input: cannot read {path!r}"):
        if path == "-":
            return sys.stdin.read().splitlines()
        with open(path, encoding="utf-8") as file:
            return file.read().split("\n")


def _parse(line: str, where: str) -> dict[str, Any]:
    with refusing(ValueError, setting="input", what=f"{where} is not JSON"):
        row = json.loads(line)
    if isinstance(row, str):
        return {"text": row}
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


def _open_output(path: str, overwrite: bool) -> Any:
    if path == "-":
        return os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    if not overwrite and os.path.isfile(path) and os.path.getsize(path):
        raise ConfigError.of("output", f"{path!r} exists; --overwrite replaces it, or name another file.")
    with refusing(OSError, setting="output", what=f"output: cannot write {path!r}"):
        return open(path, "a", encoding="utf-8")  # what is there stays until the model is loaded; the caller closes it


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
