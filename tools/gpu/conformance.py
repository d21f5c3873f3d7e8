"""`quire conformance` on a GPU, within a time limit: the quick suite, then the whole one, as far as the time goes.

`python tools/gpu/conformance.py [--seconds 280] [--jobs 8]`. Prints a line for each check; JSON and HTML go under $OUT and hold
what was found so far, also where the time ran out (`left` says how many checks did not run). Exit code 0: nothing failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

COMMAND = "import sys; from quire.entrypoints.cli.main import main; sys.exit(main(['conformance', *sys.argv[1:]]))"
SUITES = {"conformance-quick": ["--quick"], "conformance": []}


def run_suite(words: list[str], report: Path, seconds: float) -> dict[str, int]:
    """What was found: checks by outcome, and how many are left."""
    files = ["--json", str(report), "--html", str(report.with_suffix(".html"))]
    try:
        subprocess.run([sys.executable, "-c", COMMAND, *words, *files], timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print(f"the time is over: {report.name} has what was found so far")
    text = report.read_text() if report.exists() else ""
    if not text:
        return {"error": 1, "left": -1}
    found = json.loads(text)
    return {**found["counts"], "left": found["left"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=280.0, help="for everything")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--platform", default="cuda")
    args = parser.parse_args()
    end, out = time.monotonic() + args.seconds, Path(os.environ.get("OUT", "."))
    told: dict[str, dict[str, int]] = {}
    for name, words in SUITES.items():
        left = end - time.monotonic()
        if left > 10:
            both = ["--platform", args.platform, "--jobs", str(args.jobs), *words]
            told[name] = run_suite(both, out / f"{name}.json", left)
    for name, counts in told.items():
        print(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return int(any(counts.get("fail", 0) + counts.get("error", 0) for counts in told.values()))


if __name__ == "__main__":
    sys.exit(main())
