"""`quire run-batch`: answers for OpenAI's batch files, by the server's own routes, without a server.

Lines are worked on together and written in the order of the input as soon as they and all before them are there. A line that is
wrong gets an error line. `--resume` goes on after the last whole line of the output.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import IO, BinaryIO

from quire.engine.arg_parser import switch
from quire.entrypoints.server.batch import BatchResult, LineAnswerer, answer_lines, custom_id_of
from quire.errors import ConfigError

TIMEOUT_S = 300.0
OFFLINE_GROUPS = ("Chat", "Answers and log")
"""The server's groups of flags that mean something here."""
METRICS_PORT = ("host", "port")
"""Of its other groups, the flags that do."""
ONLINE = (
    "console",
    "disable_access_log_for_endpoints",
    "disable_fastapi_docs",
    "disable_uvicorn_access_log",
    "enable_force_include_usage",
    "enable_request_id_headers",
    "keep_alive_on_engine_death",
    "shutdown_timeout",
    "uvicorn_log_level",
)
"""Of those groups, the flags that do not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.engine.arg_utils import AsyncEngineArgs

    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="requests: a path or an http(s) address")
    add("-o", "--output-file", required=True, metavar="FILE", help="answers: a path, or an http(s) address to PUT to")
    switch(parser, "--resume", "go on after the last whole line of an output that exists")
    switch(parser, "--overwrite", "replace an output that exists")
    kept = "where answers are kept until they are PUT (the system's temporary folder)"
    add("--output-tmp-dir", metavar="DIR", help=kept)
    add("--max-inflight", type=int, metavar="N", help="requests at once (twice --max-num-seqs)")
    switch(parser, "--no-progress", "no progress bar")
    switch(parser, "--enable-metrics", "give /metrics on --host and --port while it runs")
    _add_answer_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the server that shape answers; the rest, of sockets and clients, at their defaults."""
    from quire.entrypoints.openai.cli_args import add_server_arguments

    server = argparse.ArgumentParser(add_help=False)
    add_server_arguments(server)
    for group in server._action_groups:
        kept = group.title in OFFLINE_GROUPS
        actions = [
            each for each in group._group_actions if (kept and each.dest not in ONLINE) or each.dest in METRICS_PORT
        ]
        shown = parser.add_argument_group(group.title) if actions else parser
        for action in actions:
            shown._add_action(action)
        parser.set_defaults(**{each.dest: each.default for each in group._group_actions if each not in actions})


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints.cli.serve import check_server_flags, set_up_log

    set_up_log(args)
    check_server_flags(args)
    if args.max_inflight is not None and args.max_inflight < 1:
        raise ConfigError(f"max_inflight={args.max_inflight} must be at least 1.", setting="max_inflight")
    if not _is_url(args.input_file):
        return _answer_file(args, args.input_file)
    requests = _new_temporary_file(args.output_tmp_dir)
    try:
        _download(args.input_file, requests)
        return _answer_file(args, requests)
    finally:
        os.unlink(requests)


def _answer_file(args: argparse.Namespace, requests: str) -> int:
    total = sum(1 for _ in read_lines(requests))
    output, goes_to_url = args.output_file, _is_url(args.output_file)
    if goes_to_url:
        if args.resume:
            raise ConfigError.of("resume", "an output that is PUT cannot be resumed; write to a file.")
        output = _new_temporary_file(args.output_tmp_dir)
    done = _resume_point(args, output, requests)
    if total and done == total:
        print(f"{args.output_file}: all {total} lines are answered already", file=sys.stderr)
    else:
        with _open(output, "ab" if done else "wb", "output_file") as sink:
            if total:
                asyncio.run(_answer_lines(args, requests, sink, done, total))
            else:
                print(f"{args.input_file}: no request, so no answer", file=sys.stderr)
    if goes_to_url:
        _upload(output, args.output_file)
        os.unlink(output)
    return 0


def _resume_point(args: argparse.Namespace, output: str, requests: str) -> int:
    if args.resume and args.overwrite:
        raise ConfigError("resume and overwrite: give one of them.", setting="resume")
    if args.overwrite or not os.path.exists(output) or not os.path.getsize(output):
        return 0
    if args.resume:
        return find_resume_point(output, requests)
    raise ConfigError.of("output_file", f"{output!r} exists; --resume goes on with it, --overwrite replaces it.")


def find_resume_point(output: str, requests: str) -> int:
    """How many lines of the input are answered; a torn last line of the output is cut off.
    Raises ConfigError: the output does not belong to this input."""
    answered, size = 0, 0
    lines = read_lines(requests)
    with _open(output, "rb", "output_file") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            custom_id, expected = custom_id_of(line), next(lines, None)
            if expected is None or custom_id != custom_id_of(expected):
                asked = "no such line" if expected is None else f"{custom_id_of(expected)!r} there"
                message = f"line {answered + 1} of {output!r} answers {custom_id!r}, the input has {asked}"
                raise ConfigError.of("output_file", f"{message}: it belongs to another input.")
            answered += 1
            size += len(line)
    os.truncate(output, size)
    return answered


async def _answer_lines(args: argparse.Namespace, requests: str, sink: IO[bytes], done: int, total: int) -> None:
    """Start an engine, answer the lines after the first `done`, end it."""
    from tqdm import tqdm

    from quire.engine.arg_utils import AsyncEngineArgs
    from quire.entrypoints.cli.serve import server_settings
    from quire.entrypoints.http.state import ServerState
    from quire.entrypoints.server.app import build_app
    from quire.entrypoints.server.batch import metrics_port
    from quire.entrypoints.server.engine_start import begin_engine, connect_engine

    state = ServerState(server_settings(args))
    loading = begin_engine(AsyncEngineArgs.from_cli_args(args))
    engine = connect_engine(await asyncio.wrap_future(loading), state)
    state.engine_or_none = engine
    counts: collections.Counter[bool] = collections.Counter()
    app = build_app(state, docs=False)
    answerer = LineAnswerer(app, state)
    lines = read_lines(requests)
    try:
        for line in itertools.islice(lines, done):
            answerer.skip(line)
        with tqdm(total=total, initial=done, unit="line", disable=args.no_progress) as progress:

            def write(result: BatchResult) -> None:
                sink.write(result.as_line())
                sink.flush()
                counts[result.error is None] += 1
                progress.update()

            async with metrics_port(app, args.host, args.port) if args.enable_metrics else contextlib.nullcontext():
                limit = args.max_inflight or 2 * engine.config.scheduler.max_num_seqs
                await answer_lines(lines, answerer.answer, write, limit)
    finally:
        await asyncio.to_thread(engine.shutdown)
    print(f"{counts[True]} lines answered, {counts[False]} refused or failed", file=sys.stderr)


def read_lines(path: str) -> Iterator[bytes]:
    """The lines that are not blank. Raises ConfigError: the file cannot be read."""
    with _open(path, "rb", "input_file") as file:
        yield from (line for line in file if line.strip())


def _open(path: str, mode: str, setting: str) -> BinaryIO:
    try:
        return open(path, mode)  # type: ignore[return-value]  # every mode here is binary; the caller closes it
    except OSError as error:
        raise ConfigError.of(setting, f"cannot open {path!r}: {error.strerror}.") from None


def _is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _new_temporary_file(folder: str | None) -> str:
    try:
        handle, path = tempfile.mkstemp(prefix="quire-batch-", suffix=".jsonl", dir=folder)
    except OSError as error:
        raise ConfigError.of("output_tmp_dir", f"cannot write there: {error}.") from None
    os.close(handle)
    return path


def _download(url: str, path: str) -> None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, open(path, "wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, ValueError) as error:
        raise ConfigError.of("input_file", f"cannot get {url!r}: {error}.") from None


def _upload(path: str, url: str) -> None:
    """Put a file to an address (a signed one of an object store, for example).
    Raises ConfigError: it was not taken; the file is kept, and named."""
    headers = {"Content-Type": "application/jsonl", "Content-Length": str(os.path.getsize(path))}
    try:
        with open(path, "rb") as file:
            request = urllib.request.Request(url, file, headers, method="PUT")
            urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError.of("output_file", f"cannot put to {url!r}: {error}. The answers are in {path!r}.") from None
