"""`quire pull MODEL`: fetches a model from the hub, and says how large it is and where it lies."""

import argparse

from quire.engine.arg_parser import only

add_arguments = only(
    ("model", None, "a name at the hub: owner/name, or owner/name:Q4_K_M of GGUF files", {"metavar": "MODEL"}),
    ("--revision", None, "branch, tag or commit", {"metavar": "TEXT"}),
    ("--download-dir", None, "where downloads are kept (HF_HOME)", {"metavar": "FOLDER"}),
)


def run(args: argparse.Namespace) -> None:
    from quire.config.hub.listing import HubSettings
    from quire.entrypoints.cli.here import fetch

    folder = fetch(args.model, HubSettings(args.revision, args.download_dir))
    print(f"{args.model} is in {folder}")
