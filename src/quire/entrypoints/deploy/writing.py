"""What each target of `quire deploy` writes, from the templates in `assets/deploy`, and what to do with it.

A template gets the plan. Texts of the user are written in it as JSON, which YAML and Docker read alike.
"""

import functools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from quire.entrypoints import exit_codes
from quire.entrypoints.deploy.plan import (
    CACHE,
    KEY_FILE,
    LEAVE_S,
    Plan,
    Pool,
    check_words,
    container_words,
    pod_words,
    write_keys,
)
from quire.errors import ConfigError
from quire.metrics.prometheus import PREFIX
from quire.version import __version__

BOARD = "grafana/quire.json"


class Target(NamedTuple):
    """A place where servers run.

    Attributes:
        templates: of each file that is written, by its name; the board is one of them, and no template.
        to_do: a template, too.
        ignored_by: files that keep the key out of images and repositories; none: there is no key.
        is_container: paths and keys are not those of this machine.
    """

    templates: dict[str, str]
    to_do: str
    ignored_by: tuple[str, ...] = (".gitignore", ".dockerignore")
    is_container: bool = True


_IMAGE = {"Dockerfile": "deploy/Dockerfile"}
TARGETS = {
    "docker": Target(_IMAGE, "In {{ folder }}:\n  docker build -t {{ plan.image }} .\n  {{ run_command }}"),
    "compose": Target(
        {"compose.yaml": "deploy/compose.yaml", **_IMAGE}, "In {{ folder }}:\n  docker compose up --detach --build"
    ),
    "kubernetes": Target(
        {"quire.yaml": "deploy/quire.yaml", **_IMAGE},
        "In {{ folder }}, with {{ plan.image }} in your registry:\n"
        "  kubectl create secret generic {{ plan.name }}-api-keys --from-file={{ key_file }}\n"
        "  kubectl apply -f quire.yaml\n"
        "{% if plan.nodes > 1 %}The cluster needs LeaderWorkerSet (lws.sigs.k8s.io). {% endif %}"
        "{% if plan.is_scaled %}The cluster needs KEDA (keda.sh).{% endif %}",
    ),
    "systemd": Target(
        {"{{ plan.name }}.service": "deploy/quire.service"},
        "  sudo systemctl enable --now {{ folder }}/{{ plan.name }}.service\n"
        "  journalctl --follow --unit {{ plan.name }}",
        ignored_by=(".gitignore",),
        is_container=False,
    ),
    "prometheus": Target(
        {
            "prometheus.yml": "deploy/prometheus.yml",
            "quire-alerts.yml": "deploy/quire-alerts.yml",
            "grafana/boards/quire.json": BOARD,
            "grafana/provisioning/datasources/quire.yaml": "deploy/grafana/datasource.yaml",
            "grafana/provisioning/dashboards/quire.yaml": "deploy/grafana/boards.yaml",
        },
        "  prometheus --config.file={{ folder }}/prometheus.yml\n"
        "Grafana reads {{ folder }}/grafana as /etc/grafana."
        "{{ key_note }}",
        ignored_by=(),
        is_container=False,
    ),
}


def render(name: str, plan: Plan, folder: Path) -> tuple[dict[str, str], str]:
    """The files of a target, by name, and what to do with them. A key is written if there is none yet.
    Raises ConfigError: a word names something of this machine that the target does not have."""
    target = TARGETS[name]
    if target.is_container:
        check_words(plan)
    if name == "kubernetes" and plan.paths:
        why = f"{plan.paths[0]!r} is on this machine, and not in the cluster; give a hub id, or a path below {CACHE}"
        raise ConfigError.of("model", f"{why}, which is the claim {plan.name}-cache")
    fill = _filler(plan, folder.absolute(), _command() if name == "systemd" else "")
    assets, written = files("quire") / "assets", dict[str, str]()
    for file, template in target.templates.items():
        text = (assets / template).read_text("utf-8")
        written[fill(file)] = text.replace(PREFIX, plan.prefix) if template == BOARD else fill(text)
    to_do = fill(target.to_do).rstrip()
    if target.ignored_by:
        folder.mkdir(parents=True, exist_ok=True)
        write_keys(folder)
        to_do += f"\nClients need a key: there is one in {folder.absolute() / KEY_FILE}."
    return written | dict.fromkeys(target.ignored_by, f"{KEY_FILE}\n"), to_do


def _filler(plan: Plan, folder: Path, command: str) -> Callable[[str], str]:
    """What makes a text of a template."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["json"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.filters["dollars"] = lambda words: [word.replace("$", "$$") for word in words]
    environment.filters["percents"] = lambda text: text.replace("%", "%%")
    url = f"http://127.0.0.1:{plan.port}/health"
    paths = list(map(os.path.abspath, plan.paths))
    environment.globals.update(
        plan=plan,
        version=__version__.partition("+")[0],
        cache=CACHE,
        key_file=KEY_FILE,
        leave_s=LEAVE_S,
        paths=paths,
        words=functools.partial(container_words, plan),
        words_of=functools.partial(pod_words, plan, f"/run/secrets/quire/{KEY_FILE}"),
        router_words=plan.router_words,
        load_query=functools.partial(_load_query, plan),
        probe=["python", "-c", f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"],
        run_command=_run_command(plan, paths),
        folder=str(folder),
        here=str(Path.cwd()),
        unit_words=" ".join(map(quoted, (command, "serve", *plan.words))),
        own_key=not any(word.startswith("--api-key-file") for word in plan.words),
        wrong_argument=exit_codes.WRONG_ARGUMENT,
        scraped_at=plan.scraped_at,
        key_note=f"\nPut a key, and nothing else, into {folder}/prometheus-key." if plan.guards_metrics else "",
    )
    return lambda text: environment.from_string(text).render()


def _load_query(plan: Plan, pool: Pool) -> str:
    """What Prometheus is asked: the requests that run and wait at all servers of a pool."""
    is_not = "=" if pool.part == "prefill" else "!"
    pods = f',pod{is_not}~"{plan.name}-prefill-.*"' if plan.prefill_replicas else ""
    names = (f"{plan.prefix}num_requests_{state}" for state in ("running", "waiting"))
    return " + ".join(f"sum({name}{{model_name={json.dumps(plan.model_name)}{pods}}})" for name in names)


def _command() -> str:
    """Where `quire` is. Raises ConfigError: nowhere."""
    command = shutil.which("quire", path=str(Path(sys.executable).parent)) or shutil.which("quire")
    if command is None:
        raise ConfigError.of("target", "the command `quire` is not installed here; a unit needs its path")
    return command


def _run_command(plan: Plan, paths: list[str]) -> str:
    """`docker run` with what the image cannot say of itself."""
    words = ["docker", "run", "--detach", "--name", plan.name, "--restart", "unless-stopped", "--init"]
    words += ["--publish", f"{plan.port}:{plan.port}", "--volume", f"{plan.name}-cache:{CACHE}"]
    words += ["--volume", f"./{KEY_FILE}:/run/secrets/{KEY_FILE}:ro", "--stop-timeout", str(plan.stop_s)]
    words += ["--env", "HF_TOKEN", *(["--gpus", str(plan.gpus)] if plan.gpus else [])]
    words += ["--shm-size", "8g"] if plan.shared_memory else []
    return shlex.join([*words, *(word for path in paths for word in ("--volume", f"{path}:{path}:ro")), plan.image])


def quoted(word: str) -> str:
    """A word of a unit's ExecStart: `%` and `$` are its own, quotes keep spaces."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if not word or any(char in word for char in " \t'\"\\;") else escaped
