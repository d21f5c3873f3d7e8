"""A Dockerfile, the command that runs its image, and a file for Docker Compose."""

import json
import os
import shlex
from typing import Any

from quire.entrypoints.deploy.plan import CACHE, KEY_FILE, Plan, check_words, container_words
from quire.version import __version__

_KEYS = f"/run/secrets/{KEY_FILE}"
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def probe(plan: Plan) -> list[str]:
    """A command in the container that fails unless the server lives and makes progress."""
    url = f"http://127.0.0.1:{plan.port}/health"
    return ["python", "-c", f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"]


def dockerfile(plan: Plan) -> str:
    """The image: an interpreter, Quire, a user without rights, a folder for models."""
    check_words(plan)
    version = __version__.partition("+")[0]
    index = [] if plan.gpus else [f"ENV PIP_EXTRA_INDEX_URL={_CPU_INDEX}"]
    lines = [
        "# Built by `docker build -t IMAGE .`; a wheel of Quire that lies in this folder is taken before the package index.",
        "FROM python:3.12-slim",
        f"ARG QUIRE=quire-llm=={version}",
        *index,
        "RUN --mount=type=bind,target=/context pip install --no-cache-dir --find-links /context ${QUIRE}",
        f"RUN useradd --uid 1000 --create-home quire && mkdir {CACHE} && chown quire {CACHE}",
        f"ENV HF_HOME={CACHE}/hub QUIRE_CACHE_ROOT={CACHE}/quire",
        f"VOLUME {CACHE}",
        "USER 1000",
        f"EXPOSE {plan.port}",
        f"HEALTHCHECK --interval=10s --timeout=6s --start-period=30m --retries=3 CMD {json.dumps(probe(plan))}",
        "STOPSIGNAL SIGTERM",
        'ENTRYPOINT ["quire"]',
        f"CMD {json.dumps(container_words(plan, _KEYS))}",
    ]
    return "\n".join(lines) + "\n"


def run_command(plan: Plan) -> str:
    """`docker run` with what the image cannot say of itself."""
    words = ["docker", "run", "--detach", "--name", plan.name, "--restart", "unless-stopped", "--init"]
    words += ["--publish", f"{plan.port}:{plan.port}", "--volume", f"{plan.name}-cache:{CACHE}"]
    words += ["--volume", f"./{KEY_FILE}:{_KEYS}:ro", "--stop-timeout", str(plan.stop_s), "--env", "HF_TOKEN"]
    words += ["--gpus", str(plan.gpus)] if plan.gpus else []
    words += ["--shm-size", "8g"] if plan.shared_memory else []
    for path in map(os.path.abspath, plan.paths):
        words += ["--volume", f"{path}:{path}:ro"]
    return shlex.join([*words, plan.image])


def compose(plan: Plan) -> dict[str, Any]:
    """A Compose file as plain values."""
    check_words(plan)
    service: dict[str, Any] = {
        "build": ".",
        "image": plan.image,
        "command": [word.replace("$", "$$") for word in container_words(plan, _KEYS)],
        "environment": ["HF_TOKEN"],
        "ports": [f"{plan.port}:{plan.port}"],
        "volumes": [f"cache:{CACHE}", *(f"{path}:{path}:ro" for path in map(os.path.abspath, plan.paths))],
        "secrets": [KEY_FILE],
        "init": True,
        "restart": "unless-stopped",
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{plan.stop_s}s",
        "healthcheck": {
            "test": ["CMD", *probe(plan)],
            "interval": "10s",
            "timeout": "6s",
            "start_period": "30m",
            "retries": 3,
        },
    }
    if plan.shared_memory:
        service["shm_size"] = "8gb"
    if plan.gpus:
        device = {"driver": "nvidia", "count": plan.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {
        "name": plan.name,
        "services": {plan.name: service},
        "volumes": {"cache": {}},
        "secrets": {KEY_FILE: {"file": f"./{KEY_FILE}"}},
    }
