"""`quire ps`: the servers of this user that run on this machine."""

import argparse
import time

from quire.engine.arg_parser import only

add_arguments = only(
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> int:
    from quire.entrypoints.cli.running import as_json, find_servers
    from quire.entrypoints.cli.terminal import table

    servers = find_servers()
    if args.json:
        print(as_json(servers))
        return 0
    if not servers:
        print("No server runs. `quire run MODEL` starts one and talks to it, `quire serve MODEL` only starts one.")
        return 0
    rows = [
        (", ".join(each.names) or each.model, each.url, str(each.pid), _ago(time.time() - each.since))
        for each in servers
    ]
    print("\n".join(table(("MODEL", "ADDRESS", "PROCESS", "SINCE"), rows)))
    return 0


def _ago(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {name}"
    return f"{max(seconds, 0):.0f} s"
