"""What a server needs from the place where it runs: its words, port, probes, key, devices, time to drain.

Every file that `quire deploy` writes is made from one `Plan`. Knows the flags of `quire serve`; knows no format of files.
"""

import argparse
import dataclasses
import os
import secrets
from pathlib import Path
from typing import cast

from quire.errors import ConfigError
from quire.version import __version__

KEY_FILE = "api-keys"
"""The file of keys that is written once and belongs into no image and no repository."""
SPARE_S = 30
"""Seconds after the drain time in which the server closes and ends, before it is killed."""
LEAVE_S = 5
"""Seconds in which a cluster stops sending requests to a server, before the server is told to end."""
CACHE = "/cache"
"""Where a container keeps models and compiled kernels."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One server and its place.

    Attributes:
        words: of `quire serve`, without the key.
        paths: files and folders of this machine that the words name.
        gpus: devices of one server; 0: it runs on a CPU.
        ranks: processes that share a model, which need shared memory.
        drain_s: seconds in which running requests may finish.
        ready_path: the probe that says whether new requests are welcome.
        scheme: `http` or `https`.
        prefix: of the names of its metrics.
        guards_metrics: `/metrics` wants a key.
    """

    name: str
    words: tuple[str, ...]
    paths: tuple[str, ...]
    host: str
    port: int
    gpus: int
    ranks: int
    drain_s: int
    ready_path: str
    scheme: str
    prefix: str
    guards_metrics: bool
    image: str
    replicas: int = 1
    storage: str = "100Gi"

    @property
    def stop_s(self) -> int:
        """Seconds from the signal to the kill."""
        return self.drain_s + SPARE_S

    @property
    def scraped_at(self) -> str:
        """Where Prometheus, on the same machine, asks."""
        host = "127.0.0.1" if self.host in ("127.0.0.1", "0.0.0.0", "::") else self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def shared_memory(self) -> bool:
        """Whether more shared memory is needed than containers have."""
        return self.ranks > 1


def make_plan(args: argparse.Namespace, words: list[str]) -> Plan:
    """The plan of parsed flags. Raises ConfigError: the server could not be reached, or gets fewer devices than it has ranks."""
    from quire.metrics.prometheus import PREFIXES

    ranks = count_ranks(args)
    if args.uds or args.headless or not args.port:
        raise ConfigError.of(
            "port", "a server that is deployed needs a port: leave --uds and --headless out, and give a --port from 1"
        )
    gpus = count_gpus(args) if args.gpus is None else args.gpus
    if 0 < gpus < ranks:
        raise ConfigError.of("gpus", f"{gpus} are too few: the parallel sizes make {ranks} ranks, one a device")
    if args.api_key:
        why = "a key in a command line can be read by everybody on the machine; leave it out"
        raise ConfigError.of("api_key", f"{why}: {KEY_FILE} is written with a new key")
    guards = args.api_key_for == "all"
    return Plan(
        name=args.name,
        words=tuple(words),
        paths=tuple(dict.fromkeys(filter(_is_path, words))),
        host=args.host,
        port=args.port,
        gpus=gpus,
        ranks=ranks,
        drain_s=int(args.shutdown_timeout),
        ready_path="/health" if guards else "/ready",
        scheme="https" if args.ssl_certfile else "http",
        prefix=PREFIXES[args.metrics_names][0],
        guards_metrics=guards,
        image=args.image or f"quire:{__version__.partition('+')[0]}",
        replicas=args.replicas,
        storage=args.storage,
    )


def count_ranks(args: argparse.Namespace) -> int:
    """Ranks of the server that parsed flags describe, on its host. Raises ConfigError: its copies contradict one another."""
    from quire.engine.copies_here import copies_here
    from quire.engine.settings import EngineSettings

    copies = copies_here(cast(EngineSettings, args)).on_this_host
    return args.tensor_parallel_size * args.pipeline_parallel_size * copies


def count_gpus(args: argparse.Namespace) -> int:
    """Devices that it needs: one for each rank, none where the host computes."""
    return 0 if _computes_on_host(args.device) else count_ranks(args)


def _computes_on_host(device: str) -> bool:
    """Whether a device that the user named is the host's own cores; one that is found where the server runs is a card."""
    from quire.platforms import current_platform

    return device != "auto" and current_platform(device).capabilities().computes_on_host.value


def _is_path(word: str) -> bool:
    """Whether a word names something of this machine: not by chance, as a number may that is a file's name, too."""
    return os.path.sep in word and not word.startswith("-") and os.path.exists(word)


def container_words(plan: Plan, key_file: str) -> list[str]:
    """The words in a container: it is reached from outside, its paths are absolute, and the key is a file."""
    words = [os.path.abspath(word) if word in plan.paths else word for word in plan.words]
    host = [] if plan.host != "127.0.0.1" else ["--host", "0.0.0.0"]
    return ["serve", *words, *host, "--api-key-file", key_file]


def check_words(plan: Plan) -> None:
    """Raise ConfigError for flags that name the key or TLS of another place than the files' own."""
    for flag in ("--api-key-file", "--ssl-certfile", "--ssl-keyfile"):
        if any(word.split("=")[0].replace("_", "-") == flag for word in plan.words):
            why = f"{KEY_FILE} is written and used" if flag == "--api-key-file" else "let the proxy before it end TLS"
            raise ConfigError.of(flag[2:].replace("-", "_"), f"not in a container: {why}; leave it out")


def write_keys(folder: Path) -> bool:
    """A new key in a file that only the owner can read, and is never replaced; whether it was written."""
    path = folder / KEY_FILE
    if path.exists():
        return False
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"# NAME KEY [WEIGHT], a line for each tenant\nclients {secrets.token_urlsafe(32)}\n")
    return True
