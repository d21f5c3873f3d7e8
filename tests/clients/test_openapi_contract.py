"""Schemathesis reads /openapi.json and tries every route: no 5xx, and every answer is one that the document knows.

Not asked of it: that every body of the right form is served. Which texts fit, which tokens exist and which fields exclude one
another is the model's and the request's business, and no JSON schema's.
"""

import subprocess
import sys

import pytest

pytest.importorskip("schemathesis", reason="needs schemathesis")
FLAGS = [
    *("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--max-response-time", "240"),
    *("--request-timeout", "240", "--suppress-health-check", "all", "--generation-database", "none"),
    *("--no-color", "--continue-on-failure"),
]


def run(server, folder, *flags: str, seconds: int = 280) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *FLAGS, *flags]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    assert "Traceback" not in server.log()
    assert server.gauges() == dict.fromkeys(server.gauges(), 0.0)


def test_the_document_and_the_server_agree(demo, tmp_path):
    run(demo, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "3")


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("server", ["demo", "embedder"])
def test_the_document_and_the_server_agree_at_every_edge(server, request, tmp_path):
    phases = ("--phases", "examples,coverage,fuzzing", "--max-examples", "5")
    run(request.getfixturevalue(server), tmp_path, *phases, seconds=1700)
