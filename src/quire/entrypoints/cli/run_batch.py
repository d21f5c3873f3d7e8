"""`quire run-batch`: answers for OpenAI's batch files, by the server's own routes, without a server.

Answers are kept in a folder beside the output (`FILE.batch`) until all are there; then the output is written, in the order of the
input. A run that was cut off, and is started again, goes on where it stopped. A line that is wrong gets an error line.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Generator
from io import BufferedReader

from quire import envs
from quire.engine.arg_parser import Flags, add_flags
from quire.engine.arg_utils import AsyncEngineArgs
from quire.entrypoints.batches.protocol import BatchCreateRequest, LineChecker
from quire.entrypoints.batches.runner import BatchRunner, Window, pieces_of
from quire.entrypoints.batches.store import BatchRow, BatchStore
from quire.entrypoints.batches.tables import BatchFolder
from quire.entrypoints.cli.serve import check_server_flags, server_settings, set_up_log
from quire.entrypoints.openai.cli_args import add_server_arguments
from quire.errors import ConfigError, refusing

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


_FLAGS: Flags = (
    ("-i --input-file", None, "requests: a path or an http(s) address", {"required": True, "metavar": "FILE"}),
    (
        "-o --output-file",
        None,
        "answers: a path, or an http(s) address to PUT to",
        {"required": True, "metavar": "FILE"},
    ),
    ("--resume", False, "accept an output that exists and is complete; a run that was cut off goes on in any case"),
    ("--overwrite", False, "replace an output that exists"),
    (
        "--output-tmp-dir",
        None,
        "where answers are kept until they are PUT (the system's temporary folder, without going on after an interruption)",
        {"metavar": "DIR"},
    ),
    ("--max-inflight", None, "requests at once (twice --max-num-seqs)", {"type": int, "metavar": "N"}),
    ("--no-progress", False, "no progress bar"),
    ("--enable-metrics", False, "give /metrics on --host and --port while it runs"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, {"": _FLAGS})
    _add_answer_flags(parser)
    AsyncEngineArgs.add_cli_args(parser)


def _add_answer_flags(parser: argparse.ArgumentParser) -> None:
    """Those of the server that shape answers; the rest, of sockets and clients, at their defaults."""
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


def run(args: argparse.Namespace) -> None:
    set_up_log(args)
    check_server_flags(args)
    if args.max_inflight is not None and args.max_inflight < 1:
        raise ConfigError(f"max_inflight={args.max_inflight} must be at least 1.", setting="max_inflight")
    if not _is_url(args.input_file):
        _answer_file(args, args.input_file)
        return
    requests = _new_temporary_file(args.output_tmp_dir)
    try:
        _download(args.input_file, requests)
        _answer_file(args, requests)
    finally:
        os.unlink(requests)


def _answer_file(args: argparse.Namespace, requests: str) -> None:
    if args.resume and args.overwrite:
        raise ConfigError("resume and overwrite: give one of them.", setting="resume")
    _open(requests, "input_file").close()
    with _place_for(args) as output:
        journal = f"{output}.batch"
        _remove(f"{journal}.old")
        if args.overwrite:
            _remove(journal)
        elif os.path.exists(output) and os.path.getsize(output) and not os.path.exists(journal):
            _check_complete(args, output, requests)
            return
        asyncio.run(_run(args, requests, output, journal))
        if _is_url(args.output_file):
            _upload(output, args.output_file)
        os.rename(journal, f"{journal}.old")  # in one go: a half-removed journal would be taken for one
        _remove(f"{journal}.old")


@contextlib.contextmanager
def _place_for(args: argparse.Namespace) -> Generator[str]:
    """The file that the output is written to. One that is PUT has a name of its own in --output-tmp-dir, so that a run can go
    on there; it is removed once it was taken."""
    if not _is_url(args.output_file):
        yield args.output_file
        return
    if args.output_tmp_dir is None:
        output = _new_temporary_file(None)
    else:
        name = hashlib.sha256(args.output_file.partition("?")[0].encode()).hexdigest()[:16]
        output = os.path.join(args.output_tmp_dir, f"quire-batch-{name}.jsonl")
        _remove(output)
    yield output
    os.unlink(output)


def _check_complete(args: argparse.Namespace, output: str, requests: str) -> None:
    """An output that exists is whole: it is written in one go."""
    if not args.resume:
        raise ConfigError.of("output_file", f"{output!r} exists; --overwrite replaces it, --resume accepts it.")
    with _open(requests, "input_file") as asked, _open(output, "output_file") as answered:
        num_asked, num_answered = (sum(1 for line in file if line.strip()) for file in (asked, answered))
    if num_asked != num_answered:
        why = f"{output!r} has {num_answered} lines and the input {num_asked}: it belongs to another input."
        raise ConfigError.of("output_file", why)
    print(f"{args.output_file}: all {num_asked} lines are answered already", file=sys.stderr)


async def _run(args: argparse.Namespace, requests: str, output: str, journal: str) -> None:
    """Answer what is not answered yet, and write the output."""
    folder = BatchFolder(journal, "output_tmp_dir" if _is_url(args.output_file) else "output_file")
    try:
        if not folder.lock():
            raise ConfigError.of("output_file", f"{output!r} is being written by another run.")
        store = BatchStore(folder)
        row = await _load_lines(args, store, requests)
        if not row.batch.request_counts.total:
            print(f"{args.input_file}: no request, so no answer", file=sys.stderr)
        elif row.num_unanswered:
            await _answer_lines(args, store, row)
        await _write_output(store, row, output)
        counts = (await store.get(row.batch.id)).batch.request_counts
        print(f"{counts.completed} lines answered, {counts.failed} refused or failed", file=sys.stderr)
    finally:
        folder.close()


async def _load_lines(args: argparse.Namespace, store: "BatchStore", requests: str) -> "BatchRow":
    """The batch of this input, with its lines. Raises ConfigError: the journal is one of another input."""
    from quire.entrypoints.server.operations import CLOSED_PATHS

    with _open(requests, "input_file") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        batches, _ = await store.page(None, 1)
        if batches and batches[0].input_file_id != digest:
            why = f"a run of another input was cut off before {args.output_file!r} was there; --overwrite forgets it."
            raise ConfigError.of("input_file", why)
        request = BatchCreateRequest(input_file_id=digest, endpoint="*")
        batch = batches[0] if batches else await store.create(request, expires=False)
        row = await store.get(batch.id)
        if batch.status == "validating":
            await store.forget_lines(row)
            file.seek(0)
            checker = LineChecker(CLOSED_PATHS, None, envs.QUIRE_HTTP_MAX_REQUEST_BODY_SIZE)
            async for lines in pieces_of(checker.read(file)):
                await store.add_lines(row, await store.add_lines(row, lines))
            await store.begin(row)
    return await store.get(batch.id)


async def _answer_lines(args: argparse.Namespace, store: "BatchStore", row: "BatchRow") -> None:
    """Start an engine, answer the lines without a result, end it."""
    from tqdm import tqdm

    from quire.entrypoints.batches.beside import LineAnswerer
    from quire.entrypoints.http.state import ServerState
    from quire.entrypoints.server.app import build_app
    from quire.entrypoints.server.engine_start import begin_engine, connect_engine
    from quire.entrypoints.server.process import metrics_port

    state = ServerState(server_settings(args))
    loading = begin_engine(AsyncEngineArgs.from_cli_args(args))
    engine = connect_engine(await asyncio.wrap_future(loading), state)
    state.engine_or_none = engine
    app = build_app(state, docs=False)
    total = row.batch.request_counts.total
    try:
        with tqdm(total=total, initial=total - row.num_unanswered, unit="line", disable=args.no_progress) as progress:
            runner = BatchRunner(
                store,
                LineAnswerer(app, state).answer,
                Window(args.max_inflight or 2 * engine.config.scheduler.max_num_seqs),
                (),
                envs.QUIRE_HTTP_MAX_REQUEST_BODY_SIZE,
                on_result=lambda _: progress.update(),
            )
            async with metrics_port(app, args.host, args.port) if args.enable_metrics else contextlib.nullcontext():
                await runner.run(until_done=True)
    finally:
        await asyncio.to_thread(engine.shutdown)


async def _write_output(store: "BatchStore", row: "BatchRow", output: str) -> None:
    """Write all results to a file beside the output, which takes its place in one go."""
    part = f"{output}.part"
    try:
        with open(part, "wb") as file:
            async for lines in store.files.read_results(row.number):
                file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, output)
    except OSError as error:
        raise ConfigError.of("output_file", f"cannot write {output!r}: {error.strerror}.") from None


def _remove(path: str) -> None:
    """Remove a file or folder, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _open(path: str, setting: str) -> BufferedReader:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError.of(setting, f"cannot open {path!r}: {error.strerror}.") from None


def _is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


def _new_temporary_file(folder: str | None) -> str:
    with refusing(OSError, setting="output_tmp_dir", what="output_tmp_dir: cannot write there"):
        handle, path = tempfile.mkstemp(prefix="quire-batch-", suffix=".jsonl", dir=folder)
    os.close(handle)
    return path


def _download(url: str, path: str) -> None:
    with (
        refusing(OSError, ValueError, setting="input_file", what=f"input_file: cannot get {url!r}"),
        urllib.request.urlopen(url, timeout=TIMEOUT_S) as response,
        open(path, "wb") as file,
    ):
        shutil.copyfileobj(response, file)


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
