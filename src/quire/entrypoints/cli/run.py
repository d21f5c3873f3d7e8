"""`quire run [MODEL]`: fetches a model, says whether it fits, starts a server in the background (or takes the one that runs), and
talks to it in the terminal or in the browser.

The server goes on when the talk ends; `quire stop` ends it.
"""

import argparse
import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from quire import envs
from quire.engine.arg_parser import ArgumentParser, only
from quire.engine.arg_resolve import hub_settings
from quire.engine.arg_utils import AsyncEngineArgs, UsageContext
from quire.entrypoints.cli import chat, serve
from quire.entrypoints.cli.fit import fit_sentence, fits
from quire.entrypoints.cli.running import RunningServer, find_servers
from quire.entrypoints.openai.cli_args import serve_words
from quire.errors import ConfigError, QuireError

_LOOK_S = 0.1
_DEFAULT_PORT = 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser, "the server that runs, or else the built-in demo model")
    _add_own(parser)


_add_own = only(
    ("--web", False, "open the console in a browser, in place of a talk in the terminal"),
    ("-m --message", None, "send one message, print the answer, leave", {"metavar": "TEXT"}),
)


def run(args: argparse.Namespace) -> None:
    serve.take_model(args)
    server, words = _running(args), serve_words(args.command_line, _add_own)
    if server is None:
        _prepare(args)
        server = start(args.model, words, chosen_port(args))
    elif flags := [word for word in words if word.startswith("-")]:
        told = f"{args.model or server.name} runs already, with the flags it was started with: {', '.join(flags)} changed nothing"
        print(f"{told} (`quire stop {server.name}` first).", file=sys.stderr)
    if args.web and server.is_several:
        raise ConfigError.of("web", f"{server.url} serves several models and has no page: leave --web out")
    name = args.model if args.model in server.names else server.name
    if not args.web and (server.pools or (server.is_several and _embeds(server, name, args.api_key))):
        raise _mute(name, f"texts go to {server.url}/v1/embeddings (or /classify, /rerank)", server)
    if args.web:
        import webbrowser

        print(f"{server.name} is at {server.url}/ ; `quire stop {server.name}` ends it.")
        webbrowser.open(f"{server.url}/")
        return
    _talk(args, server)
    stopped_by = server.url if server.is_several else server.name
    print(f"{name} goes on at {server.url}; `quire stop {stopped_by}` ends it.", file=sys.stderr)


def _running(args: argparse.Namespace) -> "RunningServer | None":
    """A server of the same model that runs; without a model, the latest one."""
    servers = [each for each in find_servers() if each.url.startswith("http")]
    if args.model is not None:  # one of its own before one of several
        servers.sort(key=lambda each: each.is_several)
    return next((each for each in servers if args.model is None or each.is_called(args.model)), None)


def _prepare(args: argparse.Namespace) -> None:
    """Fetch the model, and say whether it fits. Raises ConfigError: it does not, or it cannot be had."""
    from quire.config.hub import fetch_weights
    from quire.platforms import current_platform
    from quire.worker.dry_run import explain_without_weights

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.API_SERVER)
    if config.model.pooling is not None and not args.web:
        raise _mute(config.model.model, "`quire serve` serves it")
    platform = current_platform(config.device.device)
    memory = explain_without_weights(config, platform)["memory"]
    sentence = fit_sentence(config, memory, platform.device_name())
    if not fits(memory):
        raise ConfigError.of("model", sentence)
    print(sentence, file=sys.stderr)
    if config.model.hub is not None:
        fetch_weights(config.model.hub, hub_settings(config.load, config.model.revision))


def _embeds(server: "RunningServer", name: str, keys: list[str] | None) -> bool:
    """Whether one of several models only embeds, which is known when it has been started."""
    from quire.entrypoints.http_client import ANSWER_TIMEOUT_S, Target, control

    target = Target.parse(server.url, {"Authorization": f"Bearer {keys[0]}"} if keys else {})
    with contextlib.suppress(QuireError, OSError):  # the talk tells
        return (
            "completion" not in control(target, "POST", "/api/show", {"model": name}, ANSWER_TIMEOUT_S)["capabilities"]
        )
    return False


def _mute(model: str, served: str, server: "RunningServer | None" = None) -> ConfigError:
    told = f"{model!r} pools (it embeds or classifies texts) and cannot talk"
    if server is not None and server.is_several:
        others = [name for name in server.names if name != model]
        return ConfigError.of("model", f"{told}: {served}; other models there: {', '.join(others) or 'none'}")
    return ConfigError.of("model", f"{told}: `quire run {model} --web` opens its page, {served}")


def chosen_port(args: argparse.Namespace) -> list[str]:
    """The flag of a port that is free, where the user named none and the usual one is taken."""
    if args.port != _DEFAULT_PORT:
        return []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host, _DEFAULT_PORT))
        except OSError:
            return ["--port", "0"]
    return []


def start(model: str | None, words: list[str], port: list[str]) -> "RunningServer":
    """Start a server in the background; returns when it is ready.

    Raises:
        ConfigError: it ended before it was ready; the message is its last error.
    """

    log = Path(envs.QUIRE_CACHE_ROOT) / "logs" / f"{re.sub('[^A-Za-z0-9._-]+', '-', model or 'demo').strip('-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", *words, *port]
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(f"Starting a server (log: {log}) …", file=sys.stderr)
    while child.poll() is None:
        ready = next((each for each in find_servers() if each.pid == child.pid), None)
        if ready is not None:
            return ready
        time.sleep(_LOOK_S)
    raise ConfigError.of("server", f"it ended before it was ready: {last_error(log)} (log: {log})")


def last_error(log: Path) -> str:
    """The error in a log, or its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line.partition("quire: error: ")[2] for line in lines if line.startswith("quire: error: ")]
    return (errors or lines or ["it wrote nothing"])[-1]


def _talk(args: argparse.Namespace, server: "RunningServer") -> None:
    parser = ArgumentParser(prog="quire chat")
    chat.add_arguments(parser)
    words = [
        *("--url", f"{server.url}/v1"),
        *(("--quick", args.message) if args.message is not None else ()),
        *(("--model-name", args.model) if args.model in server.names else ()),  # it may serve several
        *(("--api-key", args.api_key[0]) if args.api_key else ()),
    ]
    chat.run(parser.parse_args(words))
