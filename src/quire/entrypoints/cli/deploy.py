"""`quire deploy TARGET [MODEL] [flags of serve]`: writes the files that run this server in Docker, Compose, Kubernetes or
systemd, or that let Prometheus and Grafana watch it.

The flags are checked as `quire serve` checks them. Files that are there already are not replaced without `--force`; a file of
keys never is.
"""

import argparse
import sys
from pathlib import Path

from quire.engine.arg_parser import Flags, add_flags, bounded
from quire.engine.arg_utils import AsyncEngineArgs
from quire.entrypoints.cli import serve
from quire.errors import ConfigError

TARGETS = ("docker", "compose", "kubernetes", "systemd", "prometheus")


_COUNT = {"type": bounded(int, "a number of 0 or more", 0), "metavar": "N"}


_OWN: Flags = (
    ("--output", Path("deploy"), "where the files are written (deploy)", {"type": Path, "metavar": "FOLDER"}),
    ("--force", False, "replace files that are there; the file of keys is kept"),
    ("--name", "quire", "of the service, container or deployment"),
    ("--image", None, "of the container (quire:VERSION)", {"metavar": "IMAGE"}),
    ("--gpus", None, "devices of one server (as many as ranks; 0 for --device cpu)", _COUNT),
    ("--replicas", 1, "servers in the cluster", _COUNT),
    ("--router", False, "one address before them: `quire route`"),
    ("--prefill-replicas", 0, "servers in the cluster that compute prompts for the others; with a router", _COUNT),
    ("--max-replicas", 0, "servers are added up to so many, by KEDA; needs --prometheus (0: never)", _COUNT),
    ("--scale-at", 32, "requests of one server, running and waiting, above which another is added", _COUNT),
    ("--max-prefill-replicas", 0, "the same of servers that compute prompts (0: never)", _COUNT),
    ("--prefill-scale-at", 4, "requests of one of these, above which another is added", _COUNT),
    ("--prometheus", "", "where KEDA asks for these requests", {"metavar": "URL"}),
    ("--storage", "100Gi", "of the cluster's volume for models", {"metavar": "SIZE"}),
)


def _add_own(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, {"Deployment": _OWN})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", choices=TARGETS, help="what the files are for")
    _add_own(parser)
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> None:
    from quire.engine.settings import check_settings
    from quire.entrypoints.deploy.plan import make_plan
    from quire.entrypoints.deploy.writing import render
    from quire.entrypoints.openai.cli_args import serve_words

    if args.command_line[:1] != [args.target]:
        raise ConfigError.of("target", f"write it first: `quire deploy {args.target} …`")
    serve.take_model(args)
    check_settings(AsyncEngineArgs.from_cli_args(args))
    serve.check_server_flags(args)
    plan = make_plan(args, serve_words(args.command_line[1:], _add_own))
    files, to_do = render(args.target, plan, args.output)
    for path in _write(args.output, files, args.force):
        print(path)
    print(f"\n{to_do}", file=sys.stderr)


def _write(folder: Path, files: dict[str, str], force: bool) -> list[Path]:
    """Write what is not there yet. Raises ConfigError, before anything is written: a file is there and differs."""
    changed = [
        name for name, text in files.items() if (folder / name).exists() and (folder / name).read_text("utf-8") != text
    ]
    if changed and not force:
        raise ConfigError.of("output", f"{folder / changed[0]} is there and differs; give --force, or another --output")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]
