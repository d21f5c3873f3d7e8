"""docs/migrating-from-vllm.md says what Quire has of vLLM's names: asked of Quire, and never stale."""

from typing import Any

import pytest
from tools.migration_table import ABSENT, CHECKS, DIFFERENT, DOCUMENT, SAME, Verdict

from tools import migration_table

TABLES: list[dict[str, Any]] = migration_table.tables()


def test_the_guide_is_up_to_date() -> None:
    current = DOCUMENT.read_text(encoding="utf-8")
    fresh = migration_table.build_document(current)
    changed = [line for line in fresh.splitlines() if line not in set(current.splitlines())]
    message = "docs/migrating-from-vllm.md is stale; write it anew: .venv/bin/python -m tools.migration_table\n"
    assert fresh == current, message + "\n".join(changed)


def test_no_flag_of_vllms_server_is_unknown() -> None:
    unknown = [
        name
        for table in TABLES
        if table["kind"] == "flag" and table["of"] == "serve"
        for name, verdict in CHECKS["flag"](table)
        if verdict == Verdict(ABSENT)
    ]
    assert unknown == [], "add them to engine/vllm_settings.json"


def test_a_route_that_refuses_whatever_it_is_asked_is_absent() -> None:
    blamed = {"error": {"code": "not_supported", "param": "model"}}
    assert not migration_table.is_closed(200, {}) and not migration_table.is_closed(400, blamed)
    assert migration_table.is_closed(501, {})
    assert migration_table.is_closed(400, {"error": {"code": "not_supported", "param": None}})


def test_every_note_is_about_a_name_of_vllms() -> None:
    names = {(table["kind"], name) for table in TABLES for name in table["names"]}
    for status in (DIFFERENT, ABSENT):
        noted = {(kind, name) for kind, told in migration_table.notes()[status].items() for name in told}
        assert noted <= names, noted - names


@pytest.mark.parametrize("kind", sorted(CHECKS))
def test_a_name_that_nobody_knows_is_absent(kind: str) -> None:
    table = next(table for table in TABLES if table["kind"] == kind)
    made_up = "GET /made/up" if kind == "route" else "--made-up" if kind == "flag" else "made_up_name"
    names = {made_up: None} if isinstance(table["names"], dict) else [made_up]
    ((name, verdict),) = CHECKS[kind]({**table, "names": names})
    assert name == made_up and verdict.status == ABSENT


@pytest.mark.parametrize(
    ("kind", "of", "name", "status", "words"),
    [
        ("flag", "serve", "--max-num-seqs", SAME, ""),
        ("flag", "serve", "--gpu-memory-utilization", DIFFERENT, "0.9"),
        ("flag", "serve", "--cpu-offload-gb", ABSENT, "accepted at"),
        ("flag", "serve", "--enable-dbo", ABSENT, "default"),
        ("flag", "serve", "--cpu-offload-params", ABSENT, "default"),
        ("flag", "bench serve", "--request-rate", SAME, ""),
        ("route", "", "POST /v1/chat/completions", SAME, ""),
        ("route", "", "GET /v1/chat/completions", ABSENT, ""),
        ("request field", "/v1/chat/completions", "top_k", SAME, ""),
        ("request field", "/v1/completions", "kv_transfer_params", SAME, ""),
        ("request field", "/v1/chat/completions", "mm_processor_kwargs", ABSENT, "by name"),
        ("request field", "/v1/completions", "watermarking", ABSENT, "ignored"),
        ("request field", "/nowhere", "n", ABSENT, "no such route"),
        ("attribute", "quire:SamplingParams", "min_p", SAME, ""),
        ("attribute", "quire:LLM", "generate", SAME, ""),
        ("attribute", "quire:LLMEngine", "tokenizer", SAME, ""),
        ("metric", "", "num_requests_running", SAME, ""),
        ("metric", "", "prompt_tokens", SAME, ""),
    ],
)
def test_verdicts_follow_what_is_there(kind: str, of: str, name: str, status: str, words: str) -> None:
    defaults = {
        "--gpu-memory-utilization": 0.92,
        "--cpu-offload-gb": 0,
        "--enable-dbo": False,
        "--cpu-offload-params": [],
    }
    names = {name: defaults[name]} if name in defaults else [name]
    ((_, verdict),) = CHECKS[kind]({"kind": kind, "of": of, "names": names})
    assert verdict.status == status and words in verdict.note
