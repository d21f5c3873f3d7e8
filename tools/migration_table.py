"""Writes docs/migrating-from-vllm.md: what Quire has of vLLM's flags, fields, routes and names, asked of Quire itself.

    python -m tools.migration_table            write the tables
    python -m tools.migration_table --check    exit with 1 if they are stale

vLLM's flags of `serve` and their defaults are in `src/quire/engine/vllm_settings.json`, its other names in
`migration/vllm.json`. `migration/notes.json` holds what a reader must know about a name that means something else (`different`)
or is missing (`absent`); a note that does not apply any more is left out.
`migration/signatures.json` holds the parameters of vLLM's methods, for `tests/tools/test_migration_signatures.py`, which calls
those that are there. The text above the marker in the document is written by hand.
"""

import argparse
import asyncio
import difflib
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "migrating-from-vllm.md"
MARKER = "<!-- Everything below is written by `python -m tools.migration_table`. -->"
SAME, DIFFERENT, ABSENT = "same", "different", "absent"
REFUSED, AT_DEFAULT = "refused", "accepted at their defaults, otherwise refused"
IGNORED = "ignored and logged once; `--strict` refuses them"
BY_NAME, NO_ROUTE, NOT_YET = "refused by name", "no such route", "always refused"
SHARED_NOTES = (REFUSED, AT_DEFAULT, IGNORED, BY_NAME, NO_ROUTE, NOT_YET)
"""Notes of many names, which are listed together."""
EXAMPLES: tuple[Any, ...] = ("x", 1, {"a": 1}, ["x"], [{"a": 1}], True)
"""Values with which a field is tried, to see whether it is refused by name."""
MINIMAL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
}


class Verdict(NamedTuple):
    """Whether a name is there, and what is different about it."""

    status: str
    note: str = ""


Verdicts = Iterator[tuple[str, Verdict]]


def there(found: bool, note: str = "") -> Verdict:
    """Of a name that is simply there or not; the note is for one that is not."""
    return Verdict(SAME) if found else Verdict(ABSENT, note)


# --- flags and settings ---


@functools.cache
def parser_of(command: str) -> Any:
    from quire.entrypoints.cli import bench, main

    words = command.split()
    parser = bench.build_parser(words[1]) if words[0] == "bench" and words[1:] else main.build_parser(command)
    parser.add_foreign()
    return parser


def is_same_default(ours: Any, theirs: Any) -> bool:
    """Empty values are all the same: nothing was asked for."""
    if ours == [["*"]]:  # a flag that takes words or JSON lists of them
        ours = ["*"]
    return ours == theirs or (not ours and not theirs and isinstance(ours, bool) == isinstance(theirs, bool))


def compare_default(ours: Any, theirs: Any) -> Verdict:
    """Of a setting that is there."""
    if is_same_default(ours, theirs):
        return Verdict(SAME)
    return Verdict(DIFFERENT, f"default `{json.dumps(ours)}`, not `{json.dumps(theirs)}`")


def accepted(values: Iterable[Any], default: Any) -> Verdict:
    values = list(values)
    if any(value is True for value in values) and any(value is False for value in values):
        return Verdict(DIFFERENT, "accepted, no effect")
    taken = any(is_same_default(value, default) and value == default for value in values) or default in (None, False)
    return Verdict(ABSENT, AT_DEFAULT if taken else REFUSED)


def vllm_settings() -> Any:
    from quire.engine import vllm_settings

    return vllm_settings


def compare_foreign(name: str, default: Any) -> Verdict:
    """Of a setting that Quire does not have, or that has no effect."""
    settings = vllm_settings()
    if name in settings.NO_EFFECT:
        return Verdict(DIFFERENT, f"accepted, no effect: {settings.NO_EFFECT[name]}")
    return accepted(settings.accepted_values(name), default)


def check_flags(table: dict[str, Any]) -> Verdicts:
    from quire.engine.arg_help import visible_options
    from quire.engine.arg_parser import ForeignFlag

    parser = parser_of(table["of"])
    visible = {name: action for action in visible_options(parser) for name in action.option_strings}
    names, defaults = table["names"], isinstance(table["names"], dict)
    for name in names:
        hidden = parser._option_string_actions.get(name)
        if name in visible:
            ours = None if visible[name].default == argparse.SUPPRESS else visible[name].default
            known = defaults and visible[name].dest != argparse.SUPPRESS
            yield name, compare_default(ours, names[name]) if known else Verdict(SAME)
        elif isinstance(hidden, ForeignFlag):
            yield name, compare_foreign(hidden.name, names[name] if defaults else None)
        else:
            yield name, Verdict(ABSENT)


def check_settings(table: dict[str, Any]) -> Verdicts:
    from quire.engine.arg_utils import EngineArgs

    defaults = vars(EngineArgs())
    for name in table["names"]:
        default = vllm_settings().ENGINE_DEFAULTS.get(name)
        if name == "model":  # vLLM's LLM has no default for it
            yield name, Verdict(SAME)
        elif name in defaults:
            yield name, compare_default(defaults[name], default)
        elif name in vllm_settings().ENGINE_DEFAULTS:
            yield name, compare_foreign(name, default)
        else:
            yield name, Verdict(ABSENT)


def check_commands(table: dict[str, Any]) -> Verdicts:
    from quire.entrypoints.cli.main import COMMANDS

    for name in table["names"]:
        yield name, there(name in COMMANDS)


def check_benchmarks(table: dict[str, Any]) -> Verdicts:
    from quire.entrypoints.cli.bench import BENCHMARKS

    for name in table["names"]:
        yield name, there(name in BENCHMARKS)


# --- the server ---


@functools.cache
def server() -> Any:
    """The real application, over an engine that answers without a model; in development mode, as vLLM's list of routes has it."""
    from tests.oracles.fake_async_llm import FakeAsyncLLM

    from quire.entrypoints.http.state import ServerSettings, ServerState
    from quire.entrypoints.server.app import build_app

    with mock.patch.dict(os.environ, QUIRE_SERVER_DEV_MODE="1"):
        engine: Any = FakeAsyncLLM()
        return build_app(ServerState(ServerSettings(trust_request_chat_template=True), engine))


@functools.cache
def openapi() -> Any:
    from quire.entrypoints.http.openapi import build_openapi
    from quire.entrypoints.server.operations import OPERATIONS
    from quire.entrypoints.server.routes import WORK

    return build_openapi([*WORK, *OPERATIONS])


def ask(method: str, path: str, body: Any) -> tuple[int, Any]:
    from quire.entrypoints.http.call import call_app

    answer = asyncio.run(call_app(server(), method, path, json.dumps(body).encode()))
    try:
        return answer.status, json.loads(answer.body)
    except ValueError:
        return answer.status, {}


def is_closed(status: int, answer: Any) -> bool:
    """Whether a route refuses whatever it is asked: it blames no field."""
    error = answer.get("error") if isinstance(answer, dict) else None
    return status == 501 or (bool(error) and error.get("code") == "not_supported" and not error.get("param"))


def check_routes(table: dict[str, Any]) -> Verdicts:
    from quire.entrypoints.server.operations import DEV_ROUTES

    unasked = {endpoint.path for endpoint in DEV_ROUTES}  # they need a real engine
    routes = {
        (method, re.sub(r"\{[^}]*\}", "{}", route.path))
        for route in server().routes
        for method in getattr(route, "methods", None) or ("WebSocket",)
    }
    for name in table["names"]:
        method, path = name.split(" ")
        if (method, re.sub(r"\{[^}]*\}", "{}", path)) not in routes:
            yield name, Verdict(ABSENT)
        elif method == "POST" and path not in unasked and is_closed(*ask(method, path.replace("{id}", "x"), {})):
            yield name, Verdict(ABSENT, NOT_YET)
        else:
            yield name, Verdict(SAME)


def schema_fields(schema: Any) -> set[str]:
    """The properties of a schema of the OpenAPI document."""
    if "$ref" in schema:
        schema = openapi()["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    own = set(schema.get("properties", ()))
    return own.union(*(schema_fields(each) for key in ("anyOf", "allOf", "oneOf") for each in schema.get(key, ())))


def operation(path: str) -> Any:
    return openapi()["paths"].get(path, {}).get("post")


def is_refused(path: str, field: str) -> bool:
    """Whether a request with this field is refused because it is not supported."""
    for value in EXAMPLES:
        status, answer = ask("POST", path, {**MINIMAL[path], field: value})
        error = answer.get("error", {})
        if status == 400 and error.get("code") == "not_supported" and error.get("param") == field:
            return True
    return False


def check_request_fields(table: dict[str, Any]) -> Verdicts:
    path = table["of"]
    route = operation(path)
    fields = set[str]()
    for content in route["requestBody"]["content"].values() if route else ():  # JSON, or a form
        fields |= schema_fields(content["schema"])
    for name in table["names"]:
        if route is None:
            yield name, Verdict(ABSENT, NO_ROUTE)
        elif name not in fields:
            yield name, Verdict(ABSENT, IGNORED)
        elif path in MINIMAL and name not in MINIMAL[path] and is_refused(path, name):
            yield name, Verdict(ABSENT, BY_NAME)
        else:
            yield name, Verdict(SAME)


def check_response_fields(table: dict[str, Any]) -> Verdicts:
    fields = schema_fields(operation(table["of"])["responses"]["200"]["content"]["application/json"]["schema"])
    for name in table["names"]:
        yield name, there(name in fields)


def check_schema_fields(table: dict[str, Any]) -> Verdicts:
    fields = schema_fields(openapi()["components"]["schemas"].get(table["of"], {}))
    for name in table["names"]:
        yield name, there(name in fields)


def check_usage_fields(table: dict[str, Any]) -> Verdicts:
    schemas = openapi()["components"]["schemas"]
    fields = set().union(*(schema_fields(schema) for name, schema in schemas.items() if name.endswith("TokensDetails")))
    for name in table["names"]:
        yield name, there(name in fields)


# --- Python, formats, metrics, variables ---


def check_attributes(table: dict[str, Any]) -> Verdicts:
    module, _, name = table["of"].partition(":")
    owner = importlib.import_module(module)
    source = ""
    if name:
        owner = getattr(owner, name)
        source = "".join(inspect.getsource(each) for each in owner.__mro__ if each.__module__.startswith("quire"))
    fields = {*getattr(owner, "__struct_fields__", ()), *getattr(owner, "__dataclass_fields__", ())}
    for name in table["names"]:
        found = name in fields or hasattr(owner, name) or re.search(rf"\bself\.{name}\b\s*[:=]", source)
        yield name, there(bool(found))


def check_formats(table: dict[str, Any]) -> Verdicts:
    from quire.parsers.formats import HARMONY, REASONING, TOOLS
    from quire.parsers.response_template import NAMES

    names = {*HARMONY, *NAMES, *(REASONING if table["kind"] == "reasoning format" else TOOLS)}
    for name in table["names"]:
        yield name, there(name in names)


def check_metrics(table: dict[str, Any]) -> Verdicts:
    from quire.metrics.engine_metrics import EngineMetrics
    from quire.metrics.prometheus import PrometheusExposition
    from quire.request import AdapterStats

    metrics = EngineMetrics("m", 4096)
    metrics.adapters = AdapterStats()
    metrics.accepted_per_position = [1]
    text = PrometheusExposition(metrics, {"block_size": "16"}).exposition()[0].decode()
    names = {re.split(r"[{ ]", line)[0].partition(":")[2] for line in text.splitlines() if line.startswith("quire:")}
    bare = {re.sub(r"_(total|count|sum|bucket)$", "", name) for name in names} | names
    for name in table["names"]:
        yield name, there(name in bare)


def check_variables(table: dict[str, Any]) -> Verdicts:
    from quire import envs

    renamed: dict[str, str] = notes()["renamed variables"]
    for name in table["names"]:
        ours = renamed.get(name, name.replace("VLLM_", "QUIRE_"))
        if ours not in envs.VARIABLES:
            yield name, Verdict(ABSENT)
        elif name in renamed:
            yield name, Verdict(DIFFERENT, f"`{ours}`")
        else:
            yield name, Verdict(SAME)


CHECKS: dict[str, Callable[[dict[str, Any]], Verdicts]] = {
    "flag": check_flags,
    "setting": check_settings,
    "command": check_commands,
    "benchmark": check_benchmarks,
    "route": check_routes,
    "request field": check_request_fields,
    "response field": check_response_fields,
    "schema field": check_schema_fields,
    "usage field": check_usage_fields,
    "attribute": check_attributes,
    "reasoning format": check_formats,
    "tool format": check_formats,
    "metric": check_metrics,
    "variable": check_variables,
}


# --- the document ---


@functools.cache
def notes() -> Any:
    return json.loads((ROOT / "tools/migration/notes.json").read_text(encoding="utf-8"))


def with_note(kind: str, name: str, verdict: Verdict) -> Verdict:
    """The verdict with what was written by hand about it."""
    if verdict.status == ABSENT:
        told = notes()["absent"].get(kind, {}).get(name)
        return Verdict(ABSENT, told) if told else verdict
    told = notes()["different"].get(kind, {}).get(name)
    return Verdict(DIFFERENT, "; ".join(filter(None, (verdict.note, told)))) if told else verdict


@functools.cache
def tables() -> list[dict[str, Any]]:
    """vLLM's names by topic: the flags of `serve` first."""
    settings = vllm_settings()
    found: list[dict[str, Any]] = []
    for part in ("engine", "server"):
        for title, group in settings.LIST[part].items():
            if title != "older releases":
                flags = {flag: value for name, value in group.items() for flag in settings.flags_of(name)}
                found.append(
                    {"title": f"{part.capitalize()} flags: {title}", "kind": "flag", "of": "serve", "names": flags}
                )
    return found + json.loads((ROOT / "tools/migration/vllm.json").read_text(encoding="utf-8"))["tables"]


def verdicts() -> Iterator[tuple[dict[str, Any], list[tuple[str, Verdict]]]]:
    """Every table with its names' verdicts."""
    for table in tables():
        rows = [(name, with_note(table["kind"], name, verdict)) for name, verdict in CHECKS[table["kind"]](table)]
        yield table, rows


def render(rows: list[tuple[str, Verdict]]) -> list[str]:
    """A table of the names with a note of their own; the others in one sentence a verdict."""
    shared: dict[Verdict, list[str]] = {}
    lines: list[str] = []
    for name, each in rows:
        if each.note and each.note not in SHARED_NOTES:
            lines.append(f"| `{name}` | {each.status} | {each.note} |")
        else:
            shared.setdefault(each, []).append(f"`{name}`")
    if lines:
        lines = ["| name | in Quire | note |", "| --- | --- | --- |", *lines]
    for each, names in sorted(shared.items(), reverse=True):
        told = f" ({each.note})" if each.note else ""
        lines += ["", f"{each.status.capitalize()}{told}: {', '.join(names)}."]
    return lines


def build_tables() -> str:
    """The text below the marker."""
    sections: list[str] = []
    total: Counter[str] = Counter()
    overview = ["| of vLLM's | same | different | absent |", "| --- | --- | --- | --- |"]
    for table, rows in verdicts():
        counts = Counter(verdict.status for _, verdict in rows)
        total += counts
        overview.append(f"| {table['title']} | {counts[SAME]} | {counts[DIFFERENT]} | {counts[ABSENT]} |")
        sections += ["", f"### {table['title']}", ""]
        sections += render(rows)
    overview.append(f"| **all** | **{total[SAME]}** | **{total[DIFFERENT]}** | **{total[ABSENT]}** |")
    text = "\n".join((MARKER, "", "## How much is there", "", *overview, "", "## Name by name", *sections)) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def build_document(current: str) -> str:
    """The document with fresh tables."""
    return current.partition(MARKER)[0] + build_tables()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check whether the document is stale")
    check = parser.parse_args().check
    current = DOCUMENT.read_text(encoding="utf-8")
    fresh = build_document(current)
    if fresh == current:
        print(f"{DOCUMENT.relative_to(ROOT)} is up to date")
        return 0
    if check:
        sys.stdout.writelines(difflib.unified_diff(current.splitlines(True), fresh.splitlines(True), "now", "fresh"))
        return 1
    DOCUMENT.write_text(fresh, encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)} is written anew")
    return 0


if __name__ == "__main__":
    sys.exit(main())
