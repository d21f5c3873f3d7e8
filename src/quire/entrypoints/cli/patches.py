"""`quire patches list | check | explain`: what installed packages change in Quire, and whether it still fits.

Applies nothing: it looks at Quire as it is without them.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from quire import patch
from quire.engine.arg_parser import only
from quire.entrypoints import exit_codes
from quire.entrypoints.cli.terminal import columns, show
from quire.errors import ConfigError, did_you_mean
from quire.patch.plan import Status
from quire.patch.targets import (
    MISSING,
    TargetError,
    check_original,
    describe_signature,
    hash_signature,
    load,
    locate,
    make_substitute,
)

VERBS = ("list", "check", "explain")
_VERBS = (
    "list: each patch in a line; check: exit code 1 if something is wrong; explain: all of one patch, or of a target"
)


add_arguments = only(
    ("verb", None, _VERBS, {"choices": VERBS}),
    ("names", None, "ids of patches, or for explain also module:qualname", {"nargs": "*", "metavar": "ID"}),
    ("--json", False, "print JSON"),
)


def run(args: argparse.Namespace) -> int | None:
    targets = [name for name in args.names if ":" in name]
    if targets and args.verb != "explain":
        raise ConfigError.of("names", f"{targets[0]!r} is a target; `quire patches {args.verb}` takes ids of patches")
    statuses = _named(patch.installed(), [name for name in args.names if ":" not in name])
    if args.verb == "list":
        return _show(args, [_line(status) for status in statuses])
    if args.verb == "check":
        rows = [{"id": status.patch.id, "problems": list(problems(status))} for status in statuses]
        _show(args, [row | {"problems": row["problems"] or "none"} for row in rows])
        return exit_codes.FAILED if any(row["problems"] for row in rows) else exit_codes.OK
    if not args.names:
        raise ConfigError.of("names", "`quire patches explain` needs the id of a patch, or a target (module:qualname)")
    chosen = statuses if len(targets) < len(args.names) else []
    return _show(args, [*map(_explanation, chosen), *map(_explain_target, targets)])


def _named(statuses: list[Status], names: list[str]) -> list[Status]:
    known = [status.patch.id for status in statuses]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, "; {}", f"; there are {', '.join(known) or 'none'}")
            raise ConfigError.of("names", f"no patch {name!r} is installed{hint}")
    return [status for status in statuses if not names or status.patch.id in names]


def _show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    texts = ("\n".join(columns({name: _text(value) for name, value in row.items()})) for row in rows)
    show(rows, args.json, lambda: "\n\n".join(texts) or "No package declares a patch.")


def _text(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _line(status: Status) -> dict[str, Any]:
    patch = status.patch
    return {
        "id": patch.id,
        "package": status.package,
        "processes": list(patch.processes),
        "targets": [f"{target.kind} {target.path}" for target in patch.targets],
        "expires": str(patch.expires),
        "here": "to be applied" if status.is_wanted else f"{status.state}: {status.why}",
    }


def _explanation(status: Status) -> dict[str, Any]:
    fields = {field.name: getattr(status.patch, field.name) for field in dataclasses.fields(status.patch)}
    targets = [
        f"{each.kind} {each.path} by {each.by} (of the signature {each.signature})" for each in fields["targets"]
    ]
    rest = {name: value for name, value in fields.items() if value}
    return rest | _line(status) | {"targets": targets, "problems": list(problems(status)) or "none"}


def _explain_target(path: str) -> dict[str, Any]:
    try:
        value = locate(path).value
    except TargetError as error:
        raise ConfigError.of("names", str(error)) from None
    if value is MISSING:
        return {"target": path, "signature": "it does not exist; a patch of the kind `add` may put something there"}
    return {"target": path, "signature": hash_signature(value), "which says": describe_signature(value)}


def problems(status: Status) -> Iterator[str]:
    """What is wrong with a patch now, as far as can be told without applying it; imports its targets."""
    yield from ([status.why] if status.state == "refused" else [])
    yield from status.doubts
    if status.state == "off":
        return
    for target in status.patch.targets:
        try:
            place = locate(target.path)
            problem = check_original(target, place.value)
            if problem is None:
                make_substitute(target, place)
        except TargetError as error:
            problem = str(error)
        if problem is not None and problem not in (status.why, *status.doubts):
            yield problem
    try:
        if load(status.patch.removal_check)():
            yield f"it can be removed, says {status.patch.removal_check}: {status.patch.removal_plan}"
    except Exception as error:
        yield f"its removal check {status.patch.removal_check} failed: {type(error).__name__}: {error}"
