"""`quire list`: the models of the hub's cache, with their sizes."""

import argparse
import time
from pathlib import Path

from quire.engine.arg_parser import only

add_arguments = only(
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> None:
    from quire.config.hub.download import amount
    from quire.config.hub.find import open_hub
    from quire.config.hub.listing import HubSettings
    from quire.entrypoints.cli.here import local_models
    from quire.entrypoints.cli.running import find_servers
    from quire.entrypoints.cli.terminal import show, table

    cache = Path(open_hub(HubSettings()).cache)
    models = local_models(cache)
    servers = find_servers()
    rows = [
        (
            each.name,
            amount(each.num_bytes) if each.has_weights else "no weights yet",
            time.strftime("%Y-%m-%d", time.localtime(each.changed)),
            next((server.url for server in servers if server.is_called(each.name)), ""),
        )
        for each in models
    ]
    text = "\n".join(table(("MODEL", "SIZE", "FETCHED", "SERVER"), rows))
    none = f"No models in {cache}. `quire search WORDS` finds some, `quire pull MODEL` fetches one."
    show([model._asdict() for model in models], args.json, lambda: text if models else none)
