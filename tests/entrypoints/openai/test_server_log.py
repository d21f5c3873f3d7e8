"""The log of a real `quire serve` on a real socket, as JSON."""

import json
import signal

from tests.oracles.server_process import SERVE, ServerProcess


def test_every_line_is_json_quiet_paths_are_left_out_and_texts_are_not_told():
    flags = "--port 0 --max-model-len 128 --log-format json --enable-log-requests --enable-log-outputs"
    flags += " --disable-access-log-for-endpoints /health,/metrics"
    server = ServerProcess(*SERVE, *flags.split())
    try:
        body = {"messages": [{"role": "user", "content": "swordfish"}], "max_tokens": 4, "temperature": 0}
        for path in ("/health", "/metrics?x=1", "/version"):
            assert server.client.get(path).status_code == 200
        headers = {"X-Request-Id": "here"}
        assert server.client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    finally:
        _, output = server.end(signal.SIGTERM)
    entries = [json.loads(line) for line in output.splitlines()]
    assert all({"time", "level", "message", "pid"} <= set(entry) for entry in entries)
    access = [entry["message"] for entry in entries if entry["logger"] == "uvicorn.access"]
    assert len(access) == 2 and any("/version" in line for line in access)
    told = [entry for entry in entries if entry.get("event")]
    assert [entry["event"] for entry in told] == ["request_received", "request_ended"]
    assert all("here" in entry["request_id"] for entry in told) and told[1]["output_tokens"] > 0
    assert not any("swordfish" in json.dumps(entry) for entry in entries)
