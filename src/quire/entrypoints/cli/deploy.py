"""`quire deploy TARGET [MODEL] [flags of serve]`: writes the files that run this server in Docker, Compose, Kubernetes or
systemd, or that let Prometheus and Grafana watch it.

The flags are checked as `quire serve` checks them. Files that are there already are not replaced without `--force`; a file of
keys never is.
"""

import argparse
import sys
from pathlib import Path

from quire.engine.arg_parser import bounded
from quire.errors import ConfigError

TARGETS = ("docker", "compose", "kubernetes", "systemd", "prometheus")


_size = bounded(int, "a number of 0 or more", 0)


def _add_own(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("Deployment")
    own.add_argument(
        "--output", type=Path, default=Path("deploy"), metavar="FOLDER", help="where the files are written (deploy)"
    )
    own.add_argument("--force", action="store_true", help="replace files that are there; the file of keys is kept")
    own.add_argument("--name", default="quire", help="of the service, container or deployment (quire)")
    own.add_argument("--image", metavar="IMAGE", help="of the container (quire:VERSION)")
    own.add_argument(
        "--gpus", type=_size, metavar="N", help="devices of one server (as many as ranks; 0 for --device cpu)"
    )
    own.add_argument("--replicas", type=_size, default=1, metavar="N", help="servers in the cluster (1)")
    own.add_argument("--router", action="store_true", help="one address before them: `quire route`")
    text = "servers in the cluster that compute prompts for the others; with a router (0)"
    own.add_argument("--prefill-replicas", type=_size, default=0, metavar="N", help=text)
    text = "servers are added up to so many, by KEDA; needs --prometheus (0: never)"
    own.add_argument("--max-replicas", type=_size, default=0, metavar="N", help=text)
    text = "requests of one server, running and waiting, above which another is added (32)"
    own.add_argument("--scale-at", type=_size, default=32, metavar="N", help=text)
    text = "the same of servers that compute prompts (0: never)"
    own.add_argument("--max-prefill-replicas", type=_size, default=0, metavar="N", help=text)
    text = "requests of one of these, above which another is added (4)"
    own.add_argument("--prefill-scale-at", type=_size, default=4, metavar="N", help=text)
    own.add_argument("--prometheus", default="", metavar="URL", help="where KEDA asks for these requests")
    own.add_argument("--storage", default="100Gi", metavar="SIZE", help="of the cluster's volume for models (100Gi)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.entrypoints.cli import serve

    parser.add_argument("target", choices=TARGETS, help="what the files are for")
    _add_own(parser)
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from quire.engine.arg_utils import AsyncEngineArgs
    from quire.engine.settings import check_settings
    from quire.entrypoints.cli import serve
    from quire.entrypoints.cli.serve_words import serve_words
    from quire.entrypoints.deploy.plan import make_plan
    from quire.entrypoints.deploy.writing import render

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
    return 0


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
