"""`quire conformance`: the contract of a platform, checked on this machine. Exit code 0 only if nothing failed."""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from quire.benchmarks.common import machine, write_text
from quire.conformance.report import as_html, build_report, line_of, summary
from quire.conformance.suite import Plan, Result, run_checks
from quire.engine.arg_parser import only
from quire.entrypoints import exit_codes
from quire.errors import ConfigError
from quire.platforms.host import usable_cpus

if TYPE_CHECKING:
    from collections.abc import Sequence


add_arguments = only(
    ("--platform", "auto", "a platform, as --device of `quire serve` (default: auto)", {"metavar": "NAME"}),
    ("--only", [], "groups, names of checks, or patterns of names", {"nargs": "+", "metavar": "CHECK"}),
    ("--quick", False, "smaller and fewer cases, and no check that takes long"),
    ("--list", False, "list the checks and end"),
    ("--json", None, "write the report as JSON", {"metavar": "PATH"}),
    ("--html", None, "write the report as a page that needs no other file", {"metavar": "PATH"}),
    ("--seed", 0, "of drawn shapes and values (default: 0)"),
    ("--jobs", 0, "checks at a time (default: half of the cores, at most 12)", {"metavar": "N"}),
    ("--timeout", 300.0, "seconds for one check (default: 300)", {"metavar": "S"}),
)


def run(args: argparse.Namespace) -> int:
    from quire.conformance.contract import select_checks
    from quire.envs import set_default

    chosen = select_checks(args.only, is_quick=args.quick)
    if args.list:
        width = max(len(each.name) for each in chosen)
        print("\n".join(f"{each.name:<{width}}  {each.about}" for each in chosen))
        return exit_codes.OK
    _check_numbers(args)
    about = _about(args.platform)
    for path, flag in ((args.json, "json"), (args.html, "html")):
        if path:  # a file that cannot be written is refused before anything is checked
            write_text(path, "", flag, "a")
    set_default("QUIRE_LOGGING_LEVEL", "WARNING")
    print(f"platform {about['platform']} ({about['class']}), seed {args.seed}")
    jobs = args.jobs or max(1, min(12, usable_cpus() // 2))
    plan = Plan(args.platform, args.seed, args.quick, jobs, args.timeout)
    begin = time.perf_counter()
    files = _Files(about | {"seed": args.seed, "quick": args.quick}, args.json, args.html, len(chosen))

    def take(result: "Result") -> None:
        print(line_of(result), flush=True)
        files.take(result)

    results = run_checks(plan, chosen, take)
    seconds = time.perf_counter() - begin
    print(summary(results, seconds))
    return exit_codes.OK if files.write(results) else exit_codes.FAILED


class _Files:
    """The reports, whole at any time: a machine may stop in the middle.

    Args:
        about: the platform and the machine.
        count: of checks.
    """

    def __init__(self, about: dict[str, Any], json_path: str | None, html_path: str | None, count: int) -> None:
        self._about, self._paths, self._count = about, (json_path, html_path), count
        self._found: list[Result] = []
        self._begin = time.perf_counter()

    def take(self, result: "Result") -> None:
        """One more result."""
        self._found.append(result)
        self.write(self._found)

    def write(self, results: "Sequence[Result]") -> bool:
        """Whether nothing failed so far."""
        about = self._about | {"left": self._count - len(results)}
        report = build_report(about, results, time.perf_counter() - self._begin)
        texts = (("json", lambda: json.dumps(report, indent=1) + "\n"), ("html", lambda: as_html(report)))
        for path, (setting, make) in zip(self._paths, texts, strict=True):
            if path:
                write_text(path, make(), setting)
        return report["passed"]


def _check_numbers(args: argparse.Namespace) -> None:
    for name, is_wrong in (("jobs", args.jobs < 0), ("seed", args.seed < 0), ("timeout", args.timeout <= 0)):
        if is_wrong:
            least = "above 0" if name == "timeout" else "0 or more"
            raise ConfigError.of(name, f"{getattr(args, name)} is not allowed; it must be {least}")


def _about(name: str) -> dict[str, Any]:
    """The platform, what it claims, and the machine. Raises ConfigError: there is no such platform."""
    from importlib.metadata import version

    from quire.entrypoints.cli.explain_platform import explain_capabilities
    from quire.platforms import current_platform
    from quire.version import __version__

    platform = current_platform(name)
    return {
        "platform": platform.name,
        "class": f"{type(platform).__module__}:{type(platform).__qualname__}",
        "quire": __version__,
        "torch": version("torch"),
        **machine(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "capabilities": explain_capabilities(platform.capabilities()),
    }
