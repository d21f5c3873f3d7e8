"""`quire deploy TARGET [MODEL] [flags of serve]`: writes the files that run this server in Docker, Compose, Kubernetes or
systemd, or that let Prometheus and Grafana watch it.

The flags are checked as `quire serve` checks them. Files that are there already are not replaced without `--force`; a file of
keys never is.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.entrypoints.deploy.plan import Plan


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


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
    own.add_argument("--storage", default="100Gi", metavar="SIZE", help="of the cluster's volume for models (100Gi)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quire.entrypoints.cli import serve

    parser.add_argument("target", choices=tuple(_TARGETS), help="what the files are for")
    _add_own(parser)
    serve.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from quire.engine.arg_utils import AsyncEngineArgs
    from quire.engine.settings import check_settings
    from quire.entrypoints.cli import serve
    from quire.entrypoints.cli.serve_words import serve_words
    from quire.entrypoints.deploy.plan import make_plan

    if args.command_line[:1] != [args.target]:
        raise ConfigError.of("target", f"write it first: `quire deploy {args.target} …`")
    serve.take_model(args)
    check_settings(AsyncEngineArgs.from_cli_args(args))
    serve.check_server_flags(args)
    plan = make_plan(args, serve_words(args.command_line[1:], _add_own))
    files, to_do = _TARGETS[args.target](plan, args.output)
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


def _yaml(*documents: dict[str, Any]) -> str:
    import yaml

    written = [yaml.safe_dump(document, sort_keys=False, width=1000) for document in documents]
    return "# Written by `quire deploy`; see docs/deploy.md.\n" + "---\n".join(written)


def _with_keys(folder: Path) -> dict[str, str]:
    from quire.entrypoints.deploy.plan import KEY_FILE, write_keys

    folder.mkdir(parents=True, exist_ok=True)
    write_keys(folder)
    return {".gitignore": f"{KEY_FILE}\n", ".dockerignore": f"{KEY_FILE}\n"}


def _docker(plan: "Plan", folder: Path) -> tuple[dict[str, str], str]:
    from quire.entrypoints.deploy.containers import dockerfile, run_command

    files = {"Dockerfile": dockerfile(plan)} | _with_keys(folder)
    return files, f"In {folder.absolute()}:\n  docker build -t {plan.image} .\n  {run_command(plan)}"


def _compose(plan: "Plan", folder: Path) -> tuple[dict[str, str], str]:
    from quire.entrypoints.deploy.containers import compose, dockerfile

    files = {"compose.yaml": _yaml(compose(plan)), "Dockerfile": dockerfile(plan)} | _with_keys(folder)
    return files, f"In {folder.absolute()}:\n  docker compose up --detach --build"


def _kubernetes(plan: "Plan", folder: Path) -> tuple[dict[str, str], str]:
    from quire.entrypoints.deploy.cluster import manifests
    from quire.entrypoints.deploy.containers import dockerfile

    files = {"quire.yaml": _yaml(*manifests(plan)), "Dockerfile": dockerfile(plan)} | _with_keys(folder)
    secret = f"kubectl create secret generic {plan.name}-api-keys --from-file=api-keys"
    return (
        files,
        f"In {folder.absolute()}, with {plan.image} in your registry:\n  {secret}\n  kubectl apply -f quire.yaml",
    )


def _systemd(plan: "Plan", folder: Path) -> tuple[dict[str, str], str]:
    from quire.entrypoints.deploy.plan import KEY_FILE
    from quire.entrypoints.deploy.unit import unit

    command = shutil.which("quire", path=str(Path(sys.executable).parent)) or shutil.which("quire")
    if command is None:
        raise ConfigError.of("target", "the command `quire` is not installed here; a unit needs its path")
    ignored = {".gitignore": _with_keys(folder)[".gitignore"]}
    name, place = f"{plan.name}.service", folder.absolute()
    files = {name: unit(plan, command, str(Path.cwd()), str(place / KEY_FILE))} | ignored
    return files, f"  sudo systemctl enable --now {place / name}\n  journalctl --follow --unit {plan.name}"


def _prometheus(plan: "Plan", folder: Path) -> tuple[dict[str, str], str]:
    from quire.entrypoints.deploy.monitoring import (
        PROMETHEUS_KEY,
        alert_rules,
        board,
        grafana_provisioning,
        scrape_config,
    )

    files = {
        "prometheus.yml": _yaml(scrape_config(plan)),
        "quire-alerts.yml": _yaml(alert_rules(plan)),
        "grafana/boards/quire.json": json.dumps(json.loads(board(plan)), indent=2) + "\n",
    }
    files |= {f"grafana/{name}": _yaml(document) for name, document in grafana_provisioning().items()}
    place = folder.absolute()
    to_do = f"  prometheus --config.file={place / 'prometheus.yml'}\nGrafana reads {place / 'grafana'} as /etc/grafana."
    if plan.guards_metrics:
        to_do += f"\nPut a key, and nothing else, into {place / PROMETHEUS_KEY}."
    return files, to_do


_TARGETS: dict[str, Callable[["Plan", Path], tuple[dict[str, str], str]]] = {
    "docker": _docker,
    "compose": _compose,
    "kubernetes": _kubernetes,
    "systemd": _systemd,
    "prometheus": _prometheus,
}
"""What each target writes (names and texts of files), and what to do with it."""
