"""`python -m bench overload` at a smaller size: what a flood may not do, whatever the machine's speed."""

import json

import pytest
from bench.__main__ import main

SMALL = ["--max-num-seqs", "8", "--max-num-waiting", "16", "--tokens", "8", "--requests", "600", "--factor", "50"]


@pytest.mark.exhaustive
def test_a_flood_is_refused_in_part_and_what_was_accepted_is_answered_whole(tmp_path):
    report = tmp_path / "overload.json"
    assert main(["overload", "--parts", "flood", *SMALL, "--json", str(report)]) == 0
    flood = json.loads(report.read_text())["flood"]
    assert flood["accepted"] >= 24 and flood["refused"] > 0
    assert flood["accepted"] + flood["refused"] == 600 and flood["neither"] == 0
    assert flood["accepted_and_lost"] == 0 and flood["refusals_without_retry_after"] == 0
    assert flood["refusal_ms_light_client"]["count"] > 0 and flood["answered_by_the_server_within_s"]["+Inf"] >= 600
    assert flood["memory_mib"]["most"] < flood["memory_mib"]["before"] + 200


@pytest.mark.exhaustive
def test_a_tenant_beside_a_flood_is_never_refused(tmp_path):
    report = tmp_path / "overload.json"
    words = ["overload", "--parts", "tenants", *SMALL, "--quiet-requests", "20", "--json", str(report)]
    assert main(words) == 0  # which fails where one of its requests is refused
    tenants = json.loads(report.read_text())["tenants"]
    assert tenants["ttft_beside_a_flood_ms"]["count"] == 20 and tenants["flood_requests_per_s"] > 0
