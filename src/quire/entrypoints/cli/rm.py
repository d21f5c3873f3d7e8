"""`quire rm MODEL`: deletes a model of the hub's cache that no server uses."""

import argparse
from pathlib import Path

from quire.engine.arg_parser import only

add_arguments = only(
    ("models", None, "a model, as `quire list` shows it", {"nargs": "+", "metavar": "MODEL"}),
)


def run(args: argparse.Namespace) -> None:
    from quire.config.hub.download import amount
    from quire.config.hub.find import open_hub
    from quire.config.hub.listing import HubSettings
    from quire.entrypoints.cli.here import remove
    from quire.entrypoints.cli.running import find_servers
    from quire.errors import ConfigError

    cache = Path(open_hub(HubSettings()).cache)
    used = {name: server for server in find_servers() for name in (server.model, *server.names)}
    for name in args.models:
        if name in used:
            raise ConfigError.of("model", f"{name!r} is served at {used[name].url}: `quire stop {name}` first")
        print(f"{name} is deleted: {amount(remove(name, cache).num_bytes)}")
