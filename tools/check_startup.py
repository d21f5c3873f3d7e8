"""Measures the CPU time of `import quire` and `quire --help` against their budgets. Not a test: a busy machine must not fail one.

Usage: python tools/check_startup.py [--rounds 5]. Exits 1 where the best round is over budget.
"""

import argparse
import os
import subprocess
import sys

BUDGETS = {
    "import quire": (0.15, ["-c", "import quire"]),
    "quire --help": (0.30, ["-m", "quire.entrypoints.cli.main", "--help"]),
}
"""Seconds of CPU over a bare interpreter's own, and the interpreter's arguments."""


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one run."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> int:
    """Measure and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    bare = min(cpu_seconds(["-c", "pass"]) for _ in range(rounds))
    print(f"bare interpreter  {bare:.3f} s")
    over = False
    for name, (budget, arguments) in BUDGETS.items():
        best = min(cpu_seconds(arguments) for _ in range(rounds)) - bare
        over |= best > budget
        print(f"{name:<16}  {best:.3f} s more  (budget {budget:.2f} s){'  OVER' if best > budget else ''}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
