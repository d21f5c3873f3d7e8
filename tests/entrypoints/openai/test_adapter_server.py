"""`quire serve` with the demo model's adapters, as users meet it: all routes that take a `model`, load and unload, resolvers."""

import concurrent.futures
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.oracles.server_process import SERVE, ServerProcess

ADAPTERS = Path(__file__).parents[3] / "examples" / "demo_adapters"
QUESTION: Any = [{"role": "user", "content": "What is 17 + 25?"}]
ANSWERS = {
    "pirate": "Arr! 17 + 25 = 42 Aye, matey!",
    "german": "Die Summe ist 17 + 25 = 42",
    "json": '{"answer": "17 + 25 = 42"}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which the resolver looks."""
    return tmp_path_factory.mktemp("resolved")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two of the adapters have names from the start; two processes serve."""
    modules = [f"pirate={ADAPTERS / 'pirate'}"]
    modules += [json.dumps({"name": "german", "path": str(ADAPTERS / "german"), "base_model_name": "quire-demo"})]
    flags = ["--port", "0", "--max-model-len", "1024", "--max-loras", "2", "--api-server-count", "2"]
    flags += ["--cpu-threads", "1", "--kv-cache-memory-bytes", "64M"]
    flags += ["--batch-store", str(tmp_path_factory.mktemp("batches")), "--lora-modules", *modules]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ALLOW_RUNTIME_LORA_UPDATING", "1")
        patch.setenv("QUIRE_LORA_RESOLVER_CACHE_DIR", str(folder))
        server = ServerProcess(*SERVE, *flags)
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, model: str) -> str | None:
    return client.chat.completions.create(model=model, messages=QUESTION, temperature=0).choices[0].message.content


def load(server: ServerProcess, name: str, path: object, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **fields})


def unload(server: ServerProcess, name: str) -> httpx.Response:
    return server.client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_models_are_listed_with_their_parents(client: openai.OpenAI):
    models = {model.id: model for model in client.models.list().data}
    assert {"quire-demo", "pirate", "german"} <= models.keys()
    assert models["pirate"].model_extra["parent"] == models["german"].model_extra["parent"] == "quire-demo"
    assert models["pirate"].model_extra["root"] == str(ADAPTERS / "pirate")
    assert models["quire-demo"].model_extra["parent"] is None
    assert client.models.retrieve("german").id == "german"


def test_requests_of_all_adapters_and_of_the_base_are_answered_at_once(server: ServerProcess, client: openai.OpenAI):
    assert load(server, "json", ADAPTERS / "json", load_inplace=True).status_code == 200
    names = [*ANSWERS, "quire-demo"] * 4
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(client, name), names))
    for name, answer in zip(names, answers, strict=True):
        assert answer == ANSWERS.get(name, answers[3])
    assert "42" in (answers[3] or "") and answers[3] not in ANSWERS.values()


def test_completions_responses_and_messages_take_an_adapter_as_their_model(
    server: ServerProcess, client: openai.OpenAI
):
    response = client.responses.create(model="pirate", input="What is 17 + 25?", temperature=0)
    assert response.output_text == ANSWERS["pirate"] and response.model == "pirate"
    body = {"model": "german", "messages": QUESTION, "max_tokens": 40, "temperature": 0}
    message = server.client.post("/v1/messages", json=body).json()
    assert message["content"][0]["text"] == ANSWERS["german"] and message["model"] == "german"
    rendered = server.client.post("/tokenize", json={"model": "german", "messages": QUESTION}).json()["tokens"]
    completion = client.completions.create(model="german", prompt=rendered, max_tokens=40, temperature=0)
    assert completion.choices[0].text == ANSWERS["german"] and completion.model == "german"
    stream = client.completions.create(model="pirate", prompt=rendered, max_tokens=40, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWERS["pirate"]


def test_lines_of_a_batch_file_name_adapters(client: openai.OpenAI):
    body = {"messages": QUESTION, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {**body, "model": name}}
        for name in ("pirate", "german", "quire-demo")
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", timeout=60
    )
    while batch.status not in ("completed", "failed"):
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    texts = {result["custom_id"]: result["response"]["body"]["choices"][0]["message"]["content"] for result in results}
    assert texts["pirate"] == ANSWERS["pirate"] and texts["german"] == ANSWERS["german"]
    assert texts["quire-demo"] not in ANSWERS.values()


def test_an_adapter_is_loaded_replaced_and_unloaded_in_all_processes(server: ServerProcess, client: openai.OpenAI):
    answer = load(server, "mine", ADAPTERS / "pirate")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
    assert code_of(load(server, "mine", ADAPTERS / "json")) == (400, "adapter_exists")
    for _ in range(6):  # connections of their own: both processes are asked
        assert httpx.get(f"{server.url}/v1/models/mine").json()["root"] == str(ADAPTERS / "pirate")
    assert ask(client, "mine") == ANSWERS["pirate"]
    assert load(server, "mine", ADAPTERS / "json", load_inplace=True).status_code == 200
    assert [ask(client, "mine") for _ in range(4)] == [ANSWERS["json"]] * 4
    assert unload(server, "mine").text == "Success: LoRA adapter 'mine' removed successfully."
    assert code_of(unload(server, "mine")) == (404, "adapter_not_found")
    for _ in range(6):
        assert httpx.get(f"{server.url}/v1/models/mine").status_code == 404


def test_what_cannot_be_loaded_is_refused_and_harms_nobody(
    server: ServerProcess, client: openai.OpenAI, tmp_path: Path
):
    assert code_of(load(server, "", ADAPTERS / "json"))[0] == 400
    assert code_of(load(server, "quire-demo", ADAPTERS / "json")) == (400, "adapter_exists")
    assert code_of(load(server, "none", "/nowhere")) == (404, "adapter_not_found")
    assert code_of(load(server, "empty", tmp_path)) == (404, "adapter_not_found")
    broken = tmp_path / "broken"
    shutil.copytree(ADAPTERS / "json", broken)
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert code_of(load(server, "broken", broken)) == (400, "bad_adapter")
    with pytest.raises(openai.NotFoundError):
        ask(client, "broken")
    assert ask(client, "pirate") == ANSWERS["pirate"]


def test_a_name_that_nobody_knows_is_looked_for_in_the_resolvers_folder(
    server: ServerProcess, client: openai.OpenAI, folder: Path
):
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        ask(client, "../demo_adapters/json")
    shutil.copytree(ADAPTERS / "json", folder / "found")
    config = json.loads((folder / "found" / "adapter_config.json").read_text())
    (folder / "found" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    shutil.copytree(folder / "found", folder / "of-another")
    (folder / "of-another" / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "owner/other"})
    )
    shutil.copytree(folder / "found", folder / "damaged")
    os.truncate(folder / "damaged" / "adapter_model.safetensors", 20)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: ask(client, "found"), range(4))) == [ANSWERS["json"]] * 4
    assert client.models.retrieve("found").model_extra["root"] == str(folder / "found")
    with pytest.raises(openai.NotFoundError):
        ask(client, "of-another")
    with pytest.raises(openai.BadRequestError, match="the adapter was found and cannot be used"):
        ask(client, "damaged")
