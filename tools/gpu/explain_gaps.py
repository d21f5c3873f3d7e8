"""What stood in the way while streams had no token: `quire bench first-use` beside the files of `tools/gpu/watch`.

    python tools/gpu/explain_gaps.py FIRST-USE.json WATCH-DIR [--least 20]

For each gap from `--least` milliseconds on: what any process noted in it, the longest first.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path


def gaps(report: dict) -> Iterator[tuple[str, float, float]]:
    """Names, milliseconds, and when they began; the gap of features that came together once."""
    for run in report["runs"]:
        yield f"{run['order']}: undisturbed", run["undisturbed_gap_ms"], run["undisturbed_gap_at_s"]
        seen = set()
        for row in run["features"]:
            for use in ("first", "second"):
                if "refused" not in row and (at := row[use]["gap_at_s"]) not in seen:
                    seen.add(at)
                    name = row["feature"] if run["order"] == "in-turn" else "all features"
                    yield f"{run['order']}: {name}, {use} use", row[use]["gap_ms"], at


def notes(folder: Path) -> list[dict]:
    """Lines of all processes."""
    found = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            try:
                found.append({**json.loads(line), "pid": int(file.stem)})
            except ValueError:  # a process was killed in the middle of a line
                continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--least", type=float, default=20.0)
    parser.add_argument("--lines", type=int, default=9, help="for each gap")
    args = parser.parse_args()
    lines = notes(args.folder)
    for name, ms, at in gaps(json.loads(args.report.read_text())):
        if ms < args.least:
            continue
        print(f"{ms:6.0f} ms  {name}")
        end = at + ms / 1e3
        inside = []
        for line in lines:
            overlap = min(end, line["t"] + line["ms"] / 1e3) - max(at, line["t"])
            if overlap > 0.002:
                inside.append((overlap, line))
        last: dict[tuple, tuple[float, dict]] = {}
        for overlap, line in inside:  # of one step's stacks the last but one: where it was for longest
            key = (line["pid"], line["what"], line["t"] if line["what"] == "inside a step" else line["ms"])
            last[key] = (overlap, line)
        for overlap, line in sorted(last.values(), key=lambda pair: -pair[0])[: args.lines]:
            more = {key: value for key, value in line.items() if key not in ("t", "ms", "what", "pid")}
            text = " ".join(str(value) for value in more.values())
            print(f"    {overlap * 1e3:5.0f} of {line['ms']:6.0f} ms  {line['pid']} {line['what']}: {text[:260]}")
    modules = [line for line in lines if line["what"] == "import"]
    print(
        f"{len(modules)} modules were imported while serving: {' '.join(sorted({m['module'] for m in modules}))[:600]}"
    )


if __name__ == "__main__":
    main()
