"""What the engine's own thread costs on the processor beside the GPU: `python -m bench host`, with its figures in $OUT/host.json.

Needs no GPU. About 20 seconds.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from bench import host


def main() -> int:
    parser = argparse.ArgumentParser()
    host.add_arguments(parser)
    args = parser.parse_args()
    args.disable_detokenize = args.disable_detokenize or importlib.util.find_spec("tokenizers") is None
    figures = host.run_command(args)
    out = Path(os.environ.get("OUT", "."))
    (out / "host.json").write_text(json.dumps({"benchmark": "host", **figures}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
