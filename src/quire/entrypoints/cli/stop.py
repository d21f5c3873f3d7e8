"""`quire stop [SERVER]`: ends a server of this machine; its running requests finish first."""

import argparse

from quire.engine.arg_parser import only

add_arguments = only(
    (
        "server",
        None,
        "a model, an address, a port or a process, as `quire ps` shows it; may be left out if only one server runs",
        {"nargs": "?", "metavar": "SERVER"},
    ),
    ("--all", False, "all of them"),
)


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints import exit_codes
    from quire.entrypoints.cli.running import find_server, find_servers, stop
    from quire.errors import ConfigError

    servers = find_servers()
    if args.server is not None:
        servers = [find_server(args.server)]
    elif len(servers) > 1 and not args.all:
        names = ", ".join(server.name for server in servers)
        raise ConfigError.of("server", f"there are several: name one of {names}, or give --all")
    if not servers:
        print("No server runs.")
    ended = [stop(server, print) for server in servers]
    for server, has_ended in zip(servers, ended, strict=True):
        print(
            f"{server.name} at {server.url} {'is stopped' if has_ended else 'goes on: its requests have not finished'}"
        )
    return exit_codes.OK if all(ended) else exit_codes.FAILED
