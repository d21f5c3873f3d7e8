"""What a server needs from the place where it runs: its words, port, probes, key, devices, time to drain.

Every file that `quire deploy` writes is made from one `Plan`. Knows the flags of `quire serve`; knows no format of files.
"""

import argparse
import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple, cast

from quire.errors import ConfigError
from quire.version import __version__

KEY_FILE = "api-keys"
"""The file of keys that is written once and belongs into no image and no repository."""
SPARE_S = 30
"""Seconds after the drain time in which the server closes and ends, before it is killed."""
LEAVE_S = 5
"""Seconds in which a cluster stops sending requests to a server, before the server is told to end."""
PRIVATE_NETWORKS = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
"""Where a cluster's pods have their addresses, unless `peers` says otherwise."""
CACHE = "/cache"
"""Where a container keeps models and compiled kernels."""


class Kind(NamedTuple):
    """What a cluster keeps running: the kind of thing, and where it is defined."""

    api: str
    name: str


DEPLOYMENT = Kind("apps/v1", "Deployment")
STATEFUL_SET = Kind("apps/v1", "StatefulSet")
"""Its servers have names, by which a router knows them."""
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
"""Its servers are several pods each."""


class Pool(NamedTuple):
    """Servers in a cluster that are alike.

    Attributes:
        part: `server`, which answers, or `prefill`, which computes prompts for those.
        transfer: their `--kv-transfer-config`, without an address; empty: as the words say.
        max_replicas: servers are added up to so many, above `scale_at` requests each; 0: never.
    """

    name: str
    part: str
    replicas: int
    transfer: dict[str, Any]
    max_replicas: int
    scale_at: int

    @property
    def most(self) -> int:
        """Servers that there may be."""
        return self.max_replicas or self.replicas


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
        nodes: pods of one server. prefill_replicas: servers that compute prompts for the others, by `transfer`.
        max_replicas: servers are added up to so many, above `scale_at` requests each as `prometheus` tells; 0: never. The same
            of those that compute prompts: `max_prefill_replicas`, `prefill_scale_at`.
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
    model_name: str
    transfer: dict[str, Any]
    replicas: int = 1
    storage: str = "100Gi"
    nodes: int = 1
    has_router: bool = False
    prefill_replicas: int = 0
    max_replicas: int = 0
    scale_at: int = 32
    max_prefill_replicas: int = 0
    prefill_scale_at: int = 4
    prometheus: str = ""

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

    @property
    def is_several(self) -> bool:
        """Whether several pods need the models."""
        return self.replicas > 1 or self.nodes > 1 or self.max_replicas > 0 or self.prefill_replicas > 0

    @property
    def is_routed(self) -> bool:
        """Whether a router stands before the servers."""
        return self.has_router or self.prefill_replicas > 0

    @property
    def kind(self) -> Kind:
        """What servers are in a cluster."""
        if self.nodes > 1:
            return LEADER_WORKER_SET
        return STATEFUL_SET if self.is_routed else DEPLOYMENT

    @property
    def pools(self) -> list[Pool]:
        """The servers in a cluster; those that answer come first."""
        name = self.name if self.kind is DEPLOYMENT else f"{self.name}-servers"
        scaled = (self.max_replicas, self.scale_at)
        if not self.prefill_replicas:
            return [Pool(name, "server", self.replicas, {}, *scaled)]
        extra = {"peers": list(PRIVATE_NETWORKS), **self.transfer.get("kv_connector_extra_config", {})}
        given = {"kv_connector": "tcp", **self.transfer, "kv_connector_extra_config": extra}
        return [
            Pool(name, "server", self.replicas, {**given, "kv_role": "kv_consumer"}, *scaled),
            Pool(
                f"{self.name}-prefill",
                "prefill",
                self.prefill_replicas,
                {**given, "kv_role": "kv_producer"},
                self.max_prefill_replicas,
                self.prefill_scale_at,
            ),
        ]

    @property
    def router_words(self) -> list[str]:
        """Of the router, which knows every server that there may be."""
        words = ["route", "--host", "0.0.0.0", "--port", str(self.port)]
        for pool in self.pools:
            flag = "--prefill" if pool.part == "prefill" else "--backend"
            for number in range(pool.most):
                words += [flag, f"http://{pool.name}-{number}.{pool.name}:{self.port}"]
        return words

    @property
    def is_scaled(self) -> bool:
        """Whether servers are added and stopped."""
        return any(pool.max_replicas for pool in self.pools)


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
    _check_cluster(args)
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
        model_name=(args.served_model_name or [args.model])[0],
        transfer=args.kv_transfer_config or {},
        replicas=args.replicas,
        storage=args.storage,
        nodes=args.nnodes,
        has_router=args.router,
        prefill_replicas=args.prefill_replicas,
        max_replicas=args.max_replicas,
        scale_at=args.scale_at,
        max_prefill_replicas=args.max_prefill_replicas,
        prefill_scale_at=args.prefill_scale_at,
        prometheus=args.prometheus,
    )


def _check_cluster(args: argparse.Namespace) -> None:
    """Raise ConfigError: flags of a cluster contradict one another, or are given for another target."""
    several = {
        "nnodes": args.nnodes > 1,
        "router": args.router,
        "prefill_replicas": args.prefill_replicas,
        "max_replicas": args.max_replicas,
        "max_prefill_replicas": args.max_prefill_replicas,
    }
    for flag in several:
        if several[flag] and args.target != "kubernetes":
            raise ConfigError.of(flag, f"only kubernetes has several servers, and not {args.target}: leave it out")
    if args.nnodes > 1 and args.prefill_replicas:
        raise ConfigError.of(
            "prefill_replicas", "servers of several hosts do not hand over pages: leave it or nnodes out"
        )
    if args.max_prefill_replicas and not args.prefill_replicas:
        raise ConfigError.of("max_prefill_replicas", "it needs a pool that computes prompts: --prefill-replicas from 1")
    for most, least in (("max_replicas", "replicas"), ("max_prefill_replicas", "prefill_replicas")):
        if 0 < getattr(args, most) <= getattr(args, least):
            flag = least.replace("_", "-")
            raise ConfigError.of(most, f"{getattr(args, most)} must be above --{flag} {getattr(args, least)}")
    scaled_at = [
        at
        for most, at in ((args.max_replicas, args.scale_at), (args.max_prefill_replicas, args.prefill_scale_at))
        if most
    ]
    if scaled_at and (not args.prometheus or not all(scaled_at)):
        why = (
            "servers are added by what Prometheus tells: give its address, --prometheus http://…, and --scale-at from 1"
        )
        raise ConfigError.of("prometheus", why)


def count_ranks(args: argparse.Namespace) -> int:
    """Ranks of the server that parsed flags describe, on one host. Raises ConfigError: its copies contradict one another."""
    from quire.engine.copies_here import copies_here
    from quire.engine.settings import EngineSettings

    copies = copies_here(cast(EngineSettings, args)).on_this_host
    ranks = args.tensor_parallel_size * args.prefill_context_parallel_size * args.pipeline_parallel_size
    return ranks * copies // args.nnodes


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


def pod_words(plan: Plan, key_file: str, pool: Pool, *, is_rank: bool = False) -> list[str]:
    """The words in a pod, where `$(NAME)` is replaced by a variable and two dollars are one.

    Args:
        is_rank: the pod has ranks of a server, and answers nothing itself.
    """
    words = [word.replace("$", "$$") for word in container_words(plan, key_file)]
    if pool.transfer:
        words += ["--kv-transfer-config", json.dumps(pool.transfer).replace("$", "$$")[:-1] + ', "kv_ip": "$(POD_IP)"}']
    if plan.nodes > 1:
        words += ["--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    return [*words, "--headless"] if is_rank else words


def check_words(plan: Plan) -> None:
    """Raise ConfigError for flags that name the key or TLS of another place than the files' own."""
    for flag in ("--api-key-file", "--ssl-certfile", "--ssl-keyfile"):
        if any(word.split("=")[0].replace("_", "-") == flag for word in plan.words):
            why = f"{KEY_FILE} is written and used" if flag == "--api-key-file" else "let the proxy before it end TLS"
            raise ConfigError.of(flag[2:].replace("-", "_"), f"not in a container: {why}; leave it out")


def write_keys(folder: Path) -> None:
    """A new key in a file that only the owner can read, and is never replaced."""
    path = folder / KEY_FILE
    if path.exists():
        return
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f"# NAME KEY [WEIGHT], a line for each tenant\nclients {secrets.token_urlsafe(32)}\n")
