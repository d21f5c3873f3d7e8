"""`quire pull MODEL`: fetches a model from the hub, and says how large it is and where it lies."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a name at the hub: owner/name, or owner/name:Q4_K_M of GGUF files"
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit")
    parser.add_argument("--download-dir", metavar="FOLDER", help="where downloads are kept (HF_HOME)")


def run(args: argparse.Namespace) -> int:
    from quire.config.hub.listing import HubSettings
    from quire.entrypoints.cli.here import fetch

    folder = fetch(args.model, HubSettings(args.revision, args.download_dir))
    print(f"{args.model} is in {folder}")
    return 0
