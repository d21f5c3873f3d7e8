"""`quire ps`: the servers of this user that run on this machine."""

import argparse
import time

import msgspec

from quire.engine.arg_parser import only
from quire.entrypoints.cli.terminal import show, table

add_arguments = only(
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> None:
    from quire.entrypoints.cli.running import find_servers

    servers = find_servers()
    rows = [
        (", ".join(each.names) or each.model, each.url, str(each.pid), _ago(time.time() - each.since))
        for each in servers
    ]
    text = "\n".join(table(("MODEL", "ADDRESS", "PROCESS", "SINCE"), rows))
    none = "No server runs. `quire run MODEL` starts one and talks to it, `quire serve MODEL` only starts one."
    show(list(map(msgspec.to_builtins, servers)), args.json, lambda: text if servers else none)


def _ago(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
