"""The log of a real `quire serve` on a real socket, as JSON."""

import json
import signal
import subprocess
import sys

import httpx


def test_every_line_is_json_quiet_paths_are_left_out_and_texts_are_not_told():
    flags = "--port 0 --max-model-len 128 --log-format json --enable-log-requests --enable-log-outputs"
    flags += " --disable-access-log-for-endpoints /health,/metrics"
    command = [sys.executable, "-m", "quire.entrypoints.cli.main", "serve", *flags.split()]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    lines: list[str] = []
    try:
        for line in server.stdout:
            lines.append(line)
            if " is ready after " in line:
                break
        url = json.loads(lines[-1])["message"].rsplit(" at ", 1)[1]
        body = {"messages": [{"role": "user", "content": "swordfish"}], "max_tokens": 4, "temperature": 0}
        with httpx.Client(base_url=url, timeout=60) as client:
            for path in ("/health", "/metrics?x=1", "/version"):
                assert client.get(path).status_code == 200
            headers = {"X-Request-Id": "here"}
            assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    finally:
        server.send_signal(signal.SIGTERM)
        rest, _ = server.communicate(timeout=60)
    entries = [json.loads(line) for line in [*lines, *rest.splitlines()]]
    assert all({"time", "level", "message", "pid"} <= set(entry) for entry in entries)
    access = [entry["message"] for entry in entries if entry["logger"] == "uvicorn.access"]
    assert len(access) == 2 and any("/version" in line for line in access)
    told = [entry for entry in entries if entry.get("event")]
    assert [entry["event"] for entry in told] == ["request_received", "request_ended"]
    assert all("here" in entry["request_id"] for entry in told) and told[1]["output_tokens"] > 0
    assert not any("swordfish" in json.dumps(entry) for entry in entries)
