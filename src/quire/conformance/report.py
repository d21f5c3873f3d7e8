"""The report of a run: lines for a terminal, JSON, and a page of HTML that needs no other file."""

import dataclasses
import html
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.conformance.contract import Outcome
from quire.conformance.suite import Result

MARKS = {Outcome.PASS: "ok", Outcome.FAIL: "FAIL", Outcome.NOT_CLAIMED: "-", Outcome.ERROR: "ERROR"}
_COLORS = {Outcome.PASS: "#1a7f37", Outcome.FAIL: "#cf222e", Outcome.NOT_CLAIMED: "#6e7781", Outcome.ERROR: "#bc4c00"}
_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#1f2328;background:#fff}"
    "table{border-collapse:collapse;width:100%;margin-bottom:1.5rem}td,th{padding:.3rem .6rem;border-bottom:1px solid #d0d7de;"
    "text-align:left;vertical-align:top}td:nth-child(3){text-align:right;white-space:nowrap}code,pre{font-size:13px}"
    "pre{white-space:pre-wrap;margin:.3rem 0}small{color:#57606a}@media(prefers-color-scheme:dark){body{background:#0d1117;"
    "color:#e6edf3}td,th{border-color:#30363d}small{color:#8d96a0}}"
)


def line_of(result: Result) -> str:
    """One result for a terminal; a failure takes more lines."""
    lines = [f"{MARKS[result.outcome]:<5}  {result.name:<40} {result.seconds:7.2f} s  {result.message}"]
    if result.outcome is Outcome.FAIL:
        lines += [f"         expected: {result.expected}", f"         got:      {result.got}"]
    if result.trace:
        lines += [f"         {line}" for line in result.trace.rstrip().splitlines()[-8:]]
    return "\n".join(lines)


def summary(results: Sequence[Result], seconds: float) -> str:
    """The last line."""
    counts = Counter(result.outcome for result in results)
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome])
    return f"{len(results)} checks in {seconds:.1f} s: {told}"


def build_report(about: dict[str, Any], results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Plain values.

    Args:
        about: the platform and the machine.
    """
    counts = Counter(result.outcome for result in results)
    return {
        **about,
        "passed": all(result.is_good for result in results),
        "seconds": round(seconds, 2),
        "counts": {str(outcome): counts[outcome] for outcome in Outcome},
        "checks": [dataclasses.asdict(result) for result in results],
    }


def as_html(report: dict[str, Any]) -> str:
    """A page."""
    title = f"Conformance of {report['platform']}"
    verdict = "Nothing failed." if report["passed"] else "Some checks failed."
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report["counts"].items())
    parts = [f"<h1>{html.escape(title)}</h1><p><strong>{verdict}</strong> {counts}, in {report['seconds']:.1f} s.</p>"]
    facts = {name: value for name, value in report.items() if isinstance(value, str | int | float | bool)}
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>" for name, value in facts.items()
    )
    claims = "".join(
        f"<tr><th>{html.escape(name)}</th><td><code>{html.escape(json.dumps(claim['value']))}</code> "
        f"<small>{html.escape(claim['why'])}</small></td></tr>"
        for name, claim in report["capabilities"].items()
    )
    parts += [f"<table>{rows}</table><h2>Capabilities</h2><table>{claims}</table>"]
    groups = dict.fromkeys(entry["name"].partition("/")[0] for entry in report["checks"])
    for group in groups:
        entries = [entry for entry in report["checks"] if entry["name"].startswith(f"{group}/")]
        parts.append(f"<h2>{html.escape(group)}</h2><table>{''.join(map(_row, entries))}</table>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _row(entry: dict[str, Any]) -> str:
    name, about, message = (html.escape(entry[part]) for part in ("name", "about", "message"))
    more = "".join(
        f"<pre>{label}: {html.escape(entry[part])}</pre>"
        for part, label in (("expected", "expected"), ("got", "got"), ("trace", "trace"))
        if entry[part]
    )
    color = _COLORS[Outcome(entry["outcome"])]
    return (
        f'<tr><td style="color:{color};white-space:nowrap"><strong>{html.escape(entry["outcome"])}</strong></td>'
        f"<td><code>{name}</code><br><small>{about}</small><br>{message}{more}</td><td>{entry['seconds']:.2f} s</td></tr>"
    )
