"""A whole server whose core makes no progress."""

import os
import signal
from pathlib import Path

import pytest
from tests.engine.builders import write_model_folder
from tests.oracles.server_process import ServerProcess


def test_without_recovery_a_hang_ends_the_server_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS", "0.5")
    folder = write_model_folder(tmp_path)
    server = ServerProcess("-m", "tests.oracles.hash_server", str(folder), "process", "2000")
    try:
        assert server.client.get("/health").text == ""
        (core,) = server.children("core_process")
        os.kill(core, signal.SIGSTOP)
        answer = server.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 20})
        assert answer.status_code in (500, 503)
        code, output = server.end()
        assert code == 1
        assert "made no progress" in output and "so it cannot show its stacks" in output
    finally:
        server.kill()
