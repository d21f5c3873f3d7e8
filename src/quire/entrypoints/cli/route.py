"""`quire route --backend URL …`: one address for several servers that serve the same model."""

import argparse

from quire.engine.arg_parser import only
from quire.errors import ConfigError

_SERVERS = {"action": "append", "metavar": "URL"}
POLICIES = ("prefix", "load")


add_arguments = only(
    ("--backend", [], "a server, for example http://127.0.0.1:8001; once for each", _SERVERS),
    (
        "--prefill",
        [],
        "a server that computes prompts for these, which fetch their pages (--kv-transfer-config); once for each",
        _SERVERS,
    ),
    (
        "--prefill-timeout",
        30.0,
        "seconds that a prefill server may take; then the server that answers computes the prompt",
        {"metavar": "S"},
    ),
    ("--host", "127.0.0.1", "where to listen"),
    ("--port", 8000, "where to listen; 0 chooses one", {"type": int}),
    (
        "--policy",
        "prefix",
        "prefix: least to compute, cached beginnings counted; load: least load alone",
        {"choices": POLICIES},
    ),
    ("--check-every", 1.0, "seconds between two looks at /health", {"metavar": "S"}),
)


def run(args: argparse.Namespace) -> None:
    import uvicorn

    from quire.entrypoints.http.listen import ListenOptions, open_socket
    from quire.entrypoints.http_client import Target
    from quire.entrypoints.route.router_app import Router

    if not args.backend:
        raise ConfigError.of("backend", "name at least one server: --backend http://127.0.0.1:8001")
    if not args.check_every > 0:
        raise ConfigError.of("check_every", f"{args.check_every} must be above 0")
    if not args.prefill_timeout > 0:
        raise ConfigError.of("prefill_timeout", f"{args.prefill_timeout} must be above 0")
    targets = [Target.parse(url, setting="backend") for url in args.backend]
    prefill = [Target.parse(url, setting="prefill") for url in args.prefill]
    if len({target.url for target in (*targets, *prefill)}) < len(targets) + len(prefill):
        raise ConfigError.of("backend", "a server is named twice")
    listener, options = open_socket(ListenOptions(host=args.host, port=args.port))
    router = Router(
        targets,
        by_prefix=args.policy == "prefix",
        check_every_s=args.check_every,
        prefill=prefill,
        prefill_timeout_s=args.prefill_timeout,
    )
    config = uvicorn.Config(router, log_level="warning", lifespan="on", access_log=False, timeout_graceful_shutdown=300)
    print(f"quire route: {len(targets) + len(prefill)} servers at {options.url}", flush=True)
    with listener:
        uvicorn.Server(config).run([listener])
