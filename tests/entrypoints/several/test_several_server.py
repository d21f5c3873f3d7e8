"""`quire serve --models` as clients meet it: two copies of the demo model in memory for one, and a model that cannot be had."""

import json
import os
import signal
from collections.abc import Iterator

import httpx
import ollama
import openai
import pytest
from tests.oracles.server_process import ROOT, SERVE, ServerProcess

DEMO = str(ROOT / "src/quire/assets/demo")
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
FILE = {
    "memory": "300M",
    "models": [
        {"model": DEMO, "name": "one", "memory": "200M"},
        {"model": DEMO, "name": ["two", "deux"], "memory": "200M", "flags": "--max-model-len 512"},
        {"model": "/nowhere", "name": "broken"},
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("several") / "models.yaml"
    path.write_text(json.dumps(FILE))
    flags = ("--port", "0", "--max-model-len", "1024", "--max-num-seqs", "4", "--api-key", "secret")
    server = ServerProcess(*SERVE, "--models", str(path), *flags)
    server.client.headers["authorization"] = "Bearer secret"
    yield server
    code, output = server.end(signal.SIGTERM)
    assert code == 0, output


def ask(server, model: str, **options) -> str:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=300)
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, **options)  # type: ignore[call-overload]
    if not options:
        return answer.choices[0].message.content or ""
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer)


def states(server) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.client.get("/models").json()["models"]}


def test_a_request_wakes_its_model_and_the_other_sleeps(server):
    assert states(server) == {"one": "off", "two": "off", "broken": "off"}
    assert ask(server, "one") == "17 + 25 = 42" and states(server)["one"] == "awake"
    assert ask(server, "deux", stream=True) == "17 + 25 = 42"
    assert states(server) == {"one": "asleep", "two": "awake", "broken": "off"}
    assert ask(server, "one") == "17 + 25 = 42"
    assert states(server) == {"one": "awake", "two": "asleep", "broken": "off"}
    rows = {each["name"]: each for each in server.client.get("/models").json()["models"]}
    assert (rows["one"]["starts"], rows["one"]["wakes"], rows["one"]["requests"]) == (1, 1, 2)


def test_a_model_that_cannot_be_had_says_why_and_harms_no_other(server):
    for _ in range(2):
        answer = server.client.post("/v1/chat/completions", json={"model": "broken", "messages": QUESTION})
        assert answer.status_code == 503 and "/nowhere" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    answer = server.client.post("/api/chat", json={"model": "third"})
    assert answer.status_code == 404 and answer.json()["error"].endswith("served: one, two, broken.")
    assert ask(server, "one")


def test_all_models_are_listed_in_both_protocols(server):
    assert ask(server, "two") == ask(server, "one")  # which sleeps and which is awake, whatever was asked before
    names = ["one", "two", "deux", "broken"]
    assert [each["id"] for each in server.client.get("/v1/models").json()["data"]] == names
    assert server.client.get("/v1/models/deux").json()["max_model_len"] == 512
    client = ollama.Client(server.url, headers={"authorization": "Bearer secret"})
    assert [each.model for each in client.list().models] == names
    assert [each.model for each in client.ps().models] == ["one"]
    assert client.show("two:latest").capabilities == ["completion", "tools", "thinking"]
    assert states(server)["two"] == "asleep", "to be shown, it need not be awake"
    assert (
        "".join(part.message.content or "" for part in client.chat("two:latest", QUESTION, stream=True))
        == "17 + 25 = 42"
    )
    assert client.generate("two", keep_alive=0).done_reason == "unload" and states(server)["two"] == "asleep"
    assert server.client.get("/metrics").text.count("# TYPE quire:num_requests_running ") == 1


def test_only_a_key_opens_it_and_its_own_routes_are_all_there_are(server):
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.client.post("/sleep").status_code == 404, "the servers' routes of operators are not passed on"
    assert server.client.post("/v1/chat/completions", content=b"[").status_code == 400


def test_a_model_whose_process_was_killed_comes_back(server):
    ask(server, "one")
    (killed,) = [pid for pid in server.children("model_process") if _serves(pid, "one")]
    os.kill(killed, signal.SIGKILL)
    while server.client.post("/v1/chat/completions", json={"model": "one", "messages": QUESTION}).status_code == 503:
        pass
    assert ask(server, "one") == "17 + 25 = 42"
    assert [pid for pid in server.children("model_process") if _serves(pid, "one")] != [killed]
    assert ask(server, "two") == "17 + 25 = 42"


def _serves(pid: int, name: str) -> bool:
    with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
        words = file.read().split("\0")
    return words[words.index("--served-model-name") + 1] == name
