"""Runs vLLM's own test files of tool parsers and reasoning parsers against Quire's parsers.

    python -m tools.vllm_cases PATH                    of an unpacked source distribution of vLLM; prints a table
    python -m tools.vllm_cases PATH --json FILE        every case, with what was different
    python -m tools.vllm_cases PATH --only gemma4      files whose names contain it (also: PATH --show, prints differences)
    python -m tools.vllm_cases PATH --servers          the cases that start servers (see vllm_faces/servers.py), minutes

The cases stay where they are. What they import of vLLM is made in `vllm_faces`: its parsers' classes are faces of Quire's.
A case is *equal* (it passes), *different* (it does not), *absent* (Quire has no parser of that name), or *not black box*
(it looks into vLLM: state, tokens, grammars, servers). Cases that vLLM marks as failing count as *different* where they fail.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from tools.vllm_faces import servers

FOLDERS = ("tests/tool_parsers", "tests/reasoning", "tests/parser", "tests/tool_use")
COLUMNS = ("equal", "different", "absent", "not black box")
ROOT = Path(__file__).parents[1]
JUDGED = Path(__file__).parent / "vllm_faces" / "judged.json"
"""Why cases that are different are so: a sentence, and parts of the cases' names."""
WHITE_BOX = "white box: "
"""How the reasons of cases begin that are left out."""


def server_files(root: Path) -> list[Path]:
    """The files whose cases start servers of what Quire has."""
    files = [path for folder in servers.FOLDERS for path in sorted((root / folder).rglob("test_*.py"))]
    files = [path for path in files if not any(word in str(path.relative_to(root)) for word in servers.NOT_HERE)]
    return [path for path in files if any(map(_starts_servers, (path, path.with_name("conftest.py"))))]


def _starts_servers(path: Path) -> bool:
    return path.is_file() and "RemoteOpenAIServer" in path.read_text(encoding="utf-8")


def run_cases(root: Path, only: str, jobs: int, with_servers: bool = False) -> list[dict[str, Any]]:
    """Every case's outcome.

    Raises:
        SystemExit: there are no such files.
    """
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("test_*.py"))]
    files = [path for path in (server_files(root) if with_servers else files) if only in path.name]
    if not files:
        sys.exit(
            f"{root}: no test files of parsers{f' with {only!r} in their names' if only else ''}; give the path of an "
            "unpacked source distribution of vLLM"
        )
    with tempfile.TemporaryDirectory() as folder:
        groups = [files[index::jobs] for index in range(jobs) if files[index::jobs]]
        extra = ("--servers",) if with_servers else ()
        running = [_start(root, group, Path(folder) / f"{index}.jsonl", *extra) for index, group in enumerate(groups)]
        logs = [process.communicate()[0] for process in running]
        outcomes: list[dict[str, Any]] = []
        for index, log in enumerate(logs):
            path = Path(folder) / f"{index}.jsonl"
            if not path.is_file():
                sys.exit(f"pytest could not run the cases:\n{log[-3000:]}")
            outcomes += map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return sorted(outcomes, key=lambda each: each["case"])


def _start(root: Path, files: list[Path], outcomes: Path, *extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--maxfail=1000000", "--runxfail", "--tb=no"]
    command += ["--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", "-p", "tools.vllm_faces.plugin", "-c", os.devnull, f"--rootdir={root}"]
    kept = "tests/entrypoints" if extra else FOLDERS[0]
    command += ["--confcutdir", str(root / kept), f"--vllm-root={root}", f"--outcomes={outcomes}", *extra]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # The distribution has packages `tools` and `tests`: the first is to be ours (it is imported from elsewhere), the second its.
    return subprocess.Popen(
        [*command, *map(str, files)],
        cwd=outcomes.parent,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def table(outcomes: list[dict[str, Any]]) -> str:
    """One line a file, and all of them."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for each in outcomes:
        counts[each["case"].partition("::")[0]][each["outcome"]] += 1
    total = sum(counts.values(), Counter[str]())
    width = max(map(len, counts))
    lines = [" ".join([f"{'file':{width}}", f"{'cases':>6}", *(f"{column:>13}" for column in COLUMNS)])]
    for name, found in [*sorted(counts.items()), ("all", total)]:
        numbers = [f"{found[column]:>13}" for column in COLUMNS]
        note = "  (cannot be imported)" if found["file not imported"] and name != "all" else ""
        lines.append(" ".join([f"{name:{width}}", f"{sum(found.values()):>6}", *numbers]) + note)
    lines += [f"{count:>6}  {why}" for why, count in causes(outcomes).items()]
    black_box = total["equal"] + total["different"]
    lines.append(f"{total['equal']} of {black_box} black-box cases equal ({total['equal'] / max(black_box, 1):.1%})")
    return "\n".join(lines)


def leave_out(outcomes: list[dict[str, Any]]) -> None:
    """Cases that read texts but are about something within vLLM, as `judged.json` says, are not black box."""
    for each in outcomes:
        why = _judged(each["case"]) if each["outcome"] in ("equal", "different") else ""
        if why.startswith(WHITE_BOX):
            each["outcome"], each["why"] = "not black box", why


@functools.cache
def _reasons() -> dict[str, list[str]]:
    return json.loads(JUDGED.read_text(encoding="utf-8"))


def _judged(case: str) -> str:
    return next((why for why, parts in _reasons().items() if any(part in case for part in parts)), "not judged")


def causes(outcomes: list[dict[str, Any]]) -> dict[str, int]:
    """Why cases are different, or left out, as `judged.json` says, and how many; last those that are not judged."""
    found = Counter(_judged(each["case"]) for each in outcomes if each["outcome"] == "different")
    found += Counter(each["why"] for each in outcomes if str(each.get("why")).startswith(WHITE_BOX))
    return dict(sorted(found.items(), key=lambda item: (item[0] == "not judged", -item[1])))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="an unpacked source distribution of vLLM")
    parser.add_argument("--only", default="", help="only files whose names contain this")
    parser.add_argument("--servers", action="store_true", help="the cases that start servers")
    parser.add_argument("--json", type=Path, help="write every case's outcome to this file")
    parser.add_argument("--show", action="store_true", help="print what was different")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    outcomes = run_cases(arguments.root.resolve(), arguments.only, arguments.jobs, arguments.servers)
    leave_out(outcomes)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcomes, indent=1, ensure_ascii=False), encoding="utf-8")
    for each in outcomes if arguments.show else ():
        if each["outcome"] in ("different", "file not imported"):
            print(f"--- {each['case']} ({each['outcome']})\n{each['why']}\n")
    print(table(outcomes))


if __name__ == "__main__":
    main()
