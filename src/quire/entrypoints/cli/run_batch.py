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
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from quire.engine.arg_parser import switch
from quire.errors import ConfigError, EngineDeadError

if TYPE_CHECKING:
    from quire.entrypoints.http.state import ServerState


TIMEOUT_S = 300.0


class BatchRequest(msgspec.Struct, kw_only=True):
    """A line of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line has no good answer."""

    code: str
    message: str


class BatchResponse(msgspec.Struct):
    """What the route answered; `body` is its JSON as it came."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchResult(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None


class _Answered(msgspec.Struct):
    custom_id: str | None


_decode = msgspec.json.Decoder(BatchRequest).decode
_decode_answered = msgspec.json.Decoder(_Answered).decode
_encode = msgspec.json.Encoder().encode


def read_request(line: bytes) -> BatchRequest | BatchResult:
    """A line's request, or the error line that it gets."""
    try:
        request = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return failed(_custom_id(line), "invalid_line", f"This line is not a batch request: {error}.")
    if request.method != "POST":
        return failed(request.custom_id, "invalid_method", f"method: {request.method[:50]!r} is not 'POST'.")
    return request


def failed(custom_id: str | None, code: str, message: str) -> BatchResult:
    """The result of a line that reached no route."""
    return BatchResult(_new_id(), custom_id, None, BatchError(code, message))


def answered(request: BatchRequest, status: int, request_id: str, body: bytes) -> BatchResult:
    """The result of a line that a route answered; a refusal is told in `error` as well."""
    error = None
    if status >= 400:
        detail = _error_detail(body)
        error = BatchError(str(detail.get("code") or status), str(detail.get("message") or f"status {status}"))
    if not body.startswith((b"{", b"[")):
        body = _encode({"text": body.decode("utf-8", "replace")})
    return BatchResult(_new_id(), request.custom_id, BatchResponse(status, request_id, msgspec.Raw(body)), error)


def as_line(result: BatchResult) -> bytes:
    """A result as it stands in the file; one line, whatever white space the body has."""
    line = _encode(result)
    if b"\n" in line:
        line = _encode(msgspec.json.decode(line))
    return line + b"\n"


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _custom_id(line: bytes) -> str | None:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decode_answered(line).custom_id
    return None


def _error_detail(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(body, type=dict[str, dict[str, Any]]).get("error", {})
    return {}


def read_lines(path: str) -> Iterator[bytes]:
    """The lines that are not blank. Raises ConfigError: the file cannot be read."""
    with _open(path, "rb", "input_file") as file:
        for line in file:
            if line.strip():
                yield line


def count_lines(path: str) -> int:
    return sum(1 for _ in read_lines(path))


def find_resume_point(output: str, requests: str) -> int:
    """How many lines of the input are answered; a torn last line of the output is cut off.
    Raises ConfigError: the output does not belong to this input."""
    answered_lines, size = 0, 0
    lines = read_lines(requests)
    with _open(output, "rb", "output_file") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            custom_id, expected = _custom_id(line), next(lines, None)
            if expected is None or custom_id != _custom_id(expected):
                asked = "no such line" if expected is None else f"{_custom_id(expected)!r} there"
                message = (
                    f"output_file: line {answered_lines + 1} of {output!r} answers {custom_id!r}, the input has {asked}"
                )
                raise ConfigError(f"{message}: it belongs to another input.", setting="output_file")
            answered_lines += 1
            size += len(line)
    os.truncate(output, size)
    return answered_lines


def _open(path: str, mode: str, setting: str) -> BinaryIO:
    try:
        return open(path, mode)  # type: ignore[return-value]  # every mode here is binary; the caller closes it
    except OSError as error:
        raise ConfigError.of(setting, f"cannot open {path!r}: {error.strerror}.") from None


def open_output(path: str, *, append: bool) -> BinaryIO:
    """The output, to be written. Raises ConfigError: it cannot be."""
    return _open(path, "ab" if append else "wb", "output_file")


def is_url(path: str) -> bool:
    """Whether a path is an http(s) address."""
    return path.startswith(("http://", "https://"))


def new_temporary_file(folder: str | None) -> str:
    """An empty file of one's own."""
    try:
        handle, path = tempfile.mkstemp(prefix="quire-batch-", suffix=".jsonl", dir=folder)
    except OSError as error:
        raise ConfigError.of("output_tmp_dir", f"cannot write there: {error}.") from None
    os.close(handle)
    return path


def download(url: str, path: str) -> None:
    """Get an address' content into a file. Raises ConfigError: it cannot be got."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, open(path, "wb") as file:
            shutil.copyfileobj(response, file)
    except (OSError, ValueError) as error:
        raise ConfigError.of("input_file", f"cannot get {url!r}: {error}.") from None


def upload(path: str, url: str) -> None:
    """Put a file to an address (a signed one of an object store, for example).
    Raises ConfigError: it was not taken; the file is kept, and named."""
    request = urllib.request.Request(url, method="PUT", headers={"Content-Type": "application/jsonl"})
    try:
        with open(path, "rb") as file:
            request.data = file
            request.add_header("Content-Length", str(os.path.getsize(path)))
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                pass
    except (OSError, ValueError) as error:
        raise ConfigError.of("output_file", f"cannot put to {url!r}: {error}. The answers are in {path!r}.") from None


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
    "enable_force_include_usage", "enable_request_id_headers", "keep_alive_on_engine_death", "shutdown_timeout",
    "uvicorn_log_level",
}  # fmt: skip
"""Of those groups, the flags that do not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # fmt: off
    from quire.engine.arg_utils import AsyncEngineArgs

    parser.add_argument("-i", "--input-file", required=True, metavar="FILE",
        help="requests: a path or an http(s) address")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE",
        help="answers: a path, or an http(s) address to PUT to")
    switch(parser, "--resume", "go on after the last whole line of an output that exists")
    switch(parser, "--overwrite", "replace an output that exists")
    parser.add_argument("--output-tmp-dir", metavar="DIR",
        help="where answers are kept until they are PUT (the system's temporary folder)")
    parser.add_argument("--max-inflight", type=int, metavar="N", help="requests at once (twice --max-num-seqs)")
    switch(parser, "--no-progress", "no progress bar")
    switch(parser, "--enable-metrics", "give /metrics on --host and --port while it runs")
    _add_answer_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)
    # fmt: on


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
    if not is_url(args.input_file):
        return _answer_file(args, args.input_file)
    requests = new_temporary_file(args.output_tmp_dir)
    try:
        download(args.input_file, requests)
        return _answer_file(args, requests)
    finally:
        os.unlink(requests)


def _answer_file(args: argparse.Namespace, requests: str) -> int:
    total = count_lines(requests)
    output, goes_to_url = args.output_file, is_url(args.output_file)
    if goes_to_url:
        if args.resume:
            raise ConfigError.of("resume", "an output that is PUT cannot be resumed; write to a file.")
        output = new_temporary_file(args.output_tmp_dir)
    done = _resume_point(args, output, requests)
    if done < total or not total:
        with open_output(output, append=bool(done)) as sink:
            if total:
                asyncio.run(_serve_offline(args, requests, sink, done, total))
        if not total:
            print(f"{args.input_file}: no request, so no answer", file=sys.stderr)
    else:
        print(f"{args.output_file}: all {total} lines are answered already", file=sys.stderr)
    if goes_to_url:
        upload(output, args.output_file)
        os.unlink(output)
    return 0


def _resume_point(args: argparse.Namespace, output: str, requests: str) -> int:
    if args.resume and args.overwrite:
        raise ConfigError("resume and overwrite: give one of them.", setting="resume")
    if not os.path.exists(output) or not os.path.getsize(output) or args.overwrite:
        return 0
    if args.resume:
        return find_resume_point(output, requests)
    raise ConfigError.of("output_file", f"{output!r} exists; --resume goes on with it, --overwrite replaces it.")


async def _serve_offline(args: argparse.Namespace, requests: str, sink: BinaryIO, done: int, total: int) -> None:
    """Start an engine, answer the lines after the first `done`, end it."""
    from tqdm import tqdm

    from quire.engine.arg_utils import AsyncEngineArgs
    from quire.entrypoints.cli.in_process import metrics_port
    from quire.entrypoints.cli.serve import server_settings
    from quire.entrypoints.http.state import ServerState
    from quire.entrypoints.server.app import build_app
    from quire.entrypoints.server.engine_start import begin_engine, connect_engine

    state = ServerState(server_settings(args))
    loading = begin_engine(AsyncEngineArgs.from_cli_args(args))
    engine = connect_engine(await asyncio.wrap_future(loading), state)
    state.set_engine(engine)
    counts: collections.Counter[bool] = collections.Counter()
    app = build_app(state, docs=False)
    try:
        limit = args.max_inflight or 2 * engine.config.scheduler.max_num_seqs
        answerer = LineAnswerer(app, state)
        lines = read_lines(requests)
        for line in itertools.islice(lines, done):
            answerer.skip(line)
        with tqdm(total=total, initial=done, unit="line", disable=args.no_progress) as progress:

            def write(result: BatchResult) -> None:
                sink.write(as_line(result))
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
        from quire.entrypoints.server.operations import OPERATIONS

        self._app = app
        self._state = state
        self._closed = {endpoint.path for endpoint in OPERATIONS}
        self._seen: set[str] = set()
        self._running = 0

    def skip(self, line: bytes) -> None:
        """A line that was answered by an earlier run."""
        if isinstance(request := read_request(line), BatchRequest):
            self._seen.add(request.custom_id)

    async def answer(self, line: bytes) -> BatchResult:
        """The line's result. Raises EngineDeadError: the engine has died; no further line can be answered."""
        request = read_request(line)
        if isinstance(request, BatchResult):
            return request
        if request.custom_id in self._seen:
            text = f"custom_id: {request.custom_id[:200]!r} stands on an earlier line too."
            return failed(request.custom_id, "duplicate_custom_id", text)
        self._seen.add(request.custom_id)
        if request.url.partition("?")[0] in self._closed:
            text = f"url: {request.url[:200]!r} is an operator's route, not one for requests."
            return failed(request.custom_id, "invalid_url", text)
        if field := _answers_elsewhere(request):
            return failed(request.custom_id, "invalid_request", f"{field}: a batch file's answers are whole.")
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
        return answered(request, answer.status, answer.headers.get("x-request-id", ""), answer.body)


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
    Raises what `answer` raises; the lines in flight are cancelled."""
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
