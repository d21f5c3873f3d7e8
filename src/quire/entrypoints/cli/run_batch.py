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
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, BinaryIO

from quire.engine.arg_parser import switch
from quire.entrypoints.cli import batch_file
from quire.entrypoints.cli.batch_file import BatchRequest, BatchResult
from quire.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from quire.entrypoints.openai.state import ServerState

WINDOW = 16
"""Answers that may wait to be written, as a multiple of the requests in flight."""
RETRY_S = 0.2
"""Until a line is tried again that found the queue full."""
OFFLINE_GROUPS = ("Chat", "Answers and log")
"""The server's groups of flags that mean something here."""
METRICS_PORT = ("host", "port")
"""Of its other groups, the flags that do."""
ONLINE = {
    "console", "disable_access_log_for_endpoints", "disable_fastapi_docs", "disable_uvicorn_access_log",
    "enable_force_include_usage", "enable_request_id_headers", "shutdown_timeout", "uvicorn_log_level",
}  # fmt: skip
"""Of those groups, the flags that do not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.engine.arg_utils import AsyncEngineArgs

    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="requests: a path or an http(s) address"
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="answers: a path, or an http(s) address to PUT to"
    )
    switch(parser, "--resume", "go on after the last whole line of an output that exists")
    switch(parser, "--overwrite", "replace an output that exists")
    parser.add_argument(
        "--output-tmp-dir",
        metavar="DIR",
        help="where answers are kept until they are PUT (the system's temporary folder)",
    )
    parser.add_argument("--max-inflight", type=int, metavar="N", help="requests at once (twice --max-num-seqs)")
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
    from quire.entrypoints.cli.serve import set_up_log

    set_up_log(args)
    if args.max_inflight is not None and args.max_inflight < 1:
        raise ConfigError(f"max_inflight={args.max_inflight} must be at least 1.", setting="max_inflight")
    if not batch_file.is_url(args.input_file):
        return _answer_file(args, args.input_file)
    requests = batch_file.new_temporary_file(args.output_tmp_dir)
    try:
        batch_file.download(args.input_file, requests)
        return _answer_file(args, requests)
    finally:
        os.unlink(requests)


def _answer_file(args: argparse.Namespace, requests: str) -> int:
    total = batch_file.count_lines(requests)
    if not total:
        raise ConfigError.of("input_file", f"{args.input_file!r} holds no request.")
    output, goes_to_url = args.output_file, batch_file.is_url(args.output_file)
    if goes_to_url:
        if args.resume:
            raise ConfigError.of("resume", "an output that is PUT cannot be resumed; write to a file.")
        output = batch_file.new_temporary_file(args.output_tmp_dir)
    done = _resume_point(args, output, requests)
    if done < total:
        with batch_file.open_output(output, append=bool(done)) as sink:
            asyncio.run(_serve_offline(args, requests, sink, done, total))
    else:
        print(f"{args.output_file}: all {total} lines are answered already", file=sys.stderr)
    if goes_to_url:
        batch_file.upload(output, args.output_file)
        os.unlink(output)
    return 0


def _resume_point(args: argparse.Namespace, output: str, requests: str) -> int:
    if args.resume and args.overwrite:
        raise ConfigError("resume and overwrite: give one of them.", setting="resume")
    if not os.path.exists(output) or not os.path.getsize(output) or args.overwrite:
        return 0
    if args.resume:
        return batch_file.find_resume_point(output, requests)
    raise ConfigError.of("output_file", f"{output!r} exists; --resume goes on with it, --overwrite replaces it.")


async def _serve_offline(args: argparse.Namespace, requests: str, sink: BinaryIO, done: int, total: int) -> None:
    """Start an engine, answer the lines after the first `done`, end it."""
    from tqdm import tqdm

    from quire.engine.arg_utils import AsyncEngineArgs
    from quire.entrypoints.cli.in_process import metrics_port
    from quire.entrypoints.cli.serve import server_settings
    from quire.entrypoints.openai.app import build_app
    from quire.entrypoints.openai.engine_start import start_engine
    from quire.entrypoints.openai.state import ServerState

    state = ServerState(server_settings(args))
    engine = await asyncio.to_thread(start_engine, AsyncEngineArgs.from_cli_args(args), state)
    state.set_engine(engine)
    counts: collections.Counter[bool] = collections.Counter()
    app = build_app(state, docs=False)
    try:
        limit = args.max_inflight or 2 * engine.config.scheduler.max_num_seqs
        answerer = LineAnswerer(app, state)
        lines = batch_file.read_lines(requests)
        for line in itertools.islice(lines, done):
            answerer.skip(line)
        with tqdm(total=total, initial=done, unit="line", disable=args.no_progress) as progress:

            def write(result: BatchResult) -> None:
                sink.write(batch_file.as_line(result))
                sink.flush()
                counts[result.error is None] += 1
                progress.update()

            async with metrics_port(app, args.host, args.port) if args.enable_metrics else contextlib.nullcontext():
                await answer_lines(lines, answerer.answer, write, limit)
    finally:
        await asyncio.to_thread(engine.shutdown)
    print(f"{counts[True]} lines answered, {counts[False]} refused or failed", file=sys.stderr)


class LineAnswerer:
    """Answers a line by the server's application.

    Args:
        app: the application around `state`.
    """

    def __init__(self, app: Any, state: "ServerState") -> None:
        from quire.entrypoints.openai.operations import OPERATIONS

        self._app = app
        self._state = state
        self._closed = {path for path, _, _ in OPERATIONS}
        self._seen: set[str] = set()
        self._running = 0

    def skip(self, line: bytes) -> None:
        """A line that was answered by an earlier run."""
        if isinstance(request := batch_file.read_request(line), BatchRequest):
            self._seen.add(request.custom_id)

    async def answer(self, line: bytes) -> BatchResult:
        """The line's result. Raises EngineDeadError: the engine has died; no further line can be answered."""
        request = batch_file.read_request(line)
        if isinstance(request, BatchResult):
            return request
        if request.custom_id in self._seen:
            text = f"custom_id: {request.custom_id[:200]!r} stands on an earlier line too."
            return batch_file.failed(request.custom_id, "duplicate_custom_id", text)
        self._seen.add(request.custom_id)
        if request.url.partition("?")[0] in self._closed:
            text = f"url: {request.url[:200]!r} is an operator's route, not one for requests."
            return batch_file.failed(request.custom_id, "invalid_url", text)
        if field := _answers_elsewhere(request):
            return batch_file.failed(
                request.custom_id, "invalid_request", f"{field}: a batch file's answers are whole."
            )
        self._running += 1
        try:
            return await self._ask(request)
        finally:
            self._running -= 1

    async def _ask(self, request: BatchRequest) -> BatchResult:
        from quire.entrypoints.cli.in_process import call_app

        while True:
            answer = await call_app(self._app, "POST", request.url, bytes(request.body))
            if answer.status >= 500 and self._state.engine.errored:
                raise EngineDeadError("The engine has died; --resume goes on after the lines that are written.")
            if answer.status != 429 or self._running < 2:
                break
            await asyncio.sleep(RETRY_S)  # others are in the queue, and leave it
        return batch_file.answered(request, answer.status, answer.headers.get("x-request-id", ""), answer.body)


def _answers_elsewhere(request: BatchRequest) -> str | None:
    """The field that asks for the answer in pieces, or later."""
    import msgspec

    text = bytes(request.body)
    if b'"stream"' not in text and b'"background"' not in text:
        return None
    try:
        body: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return next((name for name in ("stream", "background") if isinstance(body, dict) and body.get(name)), None)


async def answer_lines(
    lines: Iterable[bytes],
    answer: Callable[[bytes], Awaitable[BatchResult]],
    write: Callable[[BatchResult], None],
    max_inflight: int,
) -> None:
    """Give every line to `answer`, at most `max_inflight` at a time, and its result to `write`, in the order of the lines.

    Raises:
        what `answer` raises; the lines in flight are cancelled.
    """
    running = asyncio.Semaphore(max_inflight)

    async def work(line: bytes) -> BatchResult:
        try:
            return await answer(line)
        finally:
            running.release()

    waiting: collections.deque[asyncio.Task[BatchResult]] = collections.deque()
    try:
        for line in lines:
            await running.acquire()
            waiting.append(asyncio.ensure_future(work(line)))
            while waiting and (waiting[0].done() or len(waiting) >= WINDOW * max_inflight):
                write(await waiting[0])
                waiting.popleft()
        while waiting:
            write(await waiting[0])
            waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
