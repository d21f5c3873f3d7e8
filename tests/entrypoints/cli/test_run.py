"""`quire run`, `pull`, `list`, `rm`, `ps`, `stop` and `search`: from a name at a hub to an answer, with real processes."""

import dataclasses
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import pytest
from tests.oracles.fake_hub import FakeHub
from tests.oracles.tiny_models import make_tiny_model
from tests.oracles.tiny_vision import make_tiny_vision

from quire.entrypoints.cli import running
from quire.entrypoints.cli.fit import fit_sentence, fits, limits_sentence
from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.run import _add_own, last_error
from quire.entrypoints.openai.cli_args import serve_words
from quire.errors import ConfigError

NAME, POOLER = "tiny/llama", "tiny/bert"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory):
    hub = FakeHub()
    hub.add(NAME, make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model")))
    hub.add(POOLER, make_tiny_model("BertModel", tmp_path_factory.mktemp("pooler")))
    yield hub
    hub.close()


@pytest.fixture
def quire(hub: FakeHub, tmp_path: Path):
    """Runs a command in a home that is empty at first; what still runs at the end is killed."""
    environment = hub.environment(tmp_path)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quire.entrypoints.cli.main", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    yield run
    for path in (tmp_path / "quire" / "servers").glob("*.json"):
        os.kill(json.loads(path.read_bytes())["pid"], signal.SIGKILL)


def test_from_a_name_to_an_answer_and_away_again(quire, hub: FakeHub) -> None:
    small = ["--kv-cache-memory-bytes", "4M", "--max-num-seqs", "4", "--max-model-len", "64"]
    first = quire("run", NAME, "-m", "hello", *small)
    assert first.returncode == 0, first.stderr
    assert (
        "It fits: " in first.stderr and "tokens of context" in first.stderr and f"`quire stop {NAME}`" in first.stderr
    )
    server = json.loads(quire("ps", "--json").stdout)[0]
    assert server["names"] == [NAME] and server["url"].startswith("http://127.0.0.1:")
    hub.seen.clear()
    again = quire("run", NAME, "--message", "hello")
    assert again.returncode == 0 and "It fits" not in again.stderr and "runs already" not in again.stderr, again.stderr
    other = quire("run", NAME, "--message", "hello", "--max-model-len", "32")
    assert (
        other.returncode == 0 and "runs already" in other.stderr and "--max-model-len changed nothing" in other.stderr
    )
    assert not hub.seen, "the server that runs is taken"
    listed = quire("list").stdout
    assert NAME in listed and server["url"] in listed
    refused = quire("rm", NAME)
    assert refused.returncode == 2 and f"`quire stop {NAME}` first" in refused.stderr
    assert f"{NAME} at {server['url']} is stopped" in quire("stop").stdout
    assert "No server runs" in quire("ps").stdout
    assert f"{NAME} is deleted" in quire("rm", NAME).stdout
    assert "No models" in quire("list").stdout


def test_what_goes_wrong_at_the_start_is_told(quire) -> None:
    missing = quire("run", "tiny/lama", "-m", "hello")
    assert missing.returncode == 2 and "looked up at the hub" in missing.stderr
    mute = quire("run", POOLER, "-m", "hello")
    assert mute.returncode == 2 and f"cannot talk: `quire run {POOLER} --web` opens its page, `quire" in mute.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = quire(
            "run", NAME, "-m", "hello", "--port", port, "--kv-cache-memory-bytes", "4M", "--max-model-len", "64"
        )
    assert refused.returncode == 2, refused.stderr
    assert "ended before it was ready: port: cannot listen on" in refused.stderr.strip().splitlines()[-1]


def test_a_model_is_fetched_found_and_deleted(quire, hub: FakeHub) -> None:
    hub.seen.clear()
    assert f"{NAME} is in " in quire("pull", NAME).stdout
    assert hub.fetched(".safetensors")
    (model,) = json.loads(quire("list", "--json").stdout)
    assert model["name"] == NAME and model["num_bytes"] > 100_000 and model["has_weights"]
    for weights in Path(model["folder"]).glob("snapshots/*/*.safetensors"):
        weights.unlink()
    assert "no weights yet" in quire("list").stdout
    unknown = quire("rm", "tiny/lama")
    assert unknown.returncode == 2 and f"did you mean '{NAME}'?" in unknown.stderr
    found = quire("search", "llama")
    assert NAME in found.stdout and "1,200" in found.stdout, found.stderr
    assert NAME in quire("search").stdout
    assert "no model" in quire("search", "whale").stdout


def test_a_hub_that_does_not_answer_a_search_is_named(quire, hub: FakeHub) -> None:
    hub.broken = 403
    try:
        refused = quire("search", "llama")
    finally:
        hub.broken = 0
    assert refused.returncode == 2 and hub.url in refused.stderr


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(running.atexit, "register", lambda *_: None)
    return tmp_path / "servers"


def test_a_server_is_found_by_each_of_its_names_and_forgotten_when_it_is_dead(registry: Path) -> None:
    assert running.find_servers() == []
    running.register("http://127.0.0.1:8123", "org/model", ["mine"], False)
    words = ("mine", "org/model", "8123", "http://127.0.0.1:8123/v1", str(os.getpid()))
    assert all(running.find_server(word).name == "mine" for word in words)
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        running.find_server("min")
    (path,) = registry.glob("*.json")
    told = json.loads(path.read_bytes())
    path.write_text(json.dumps(told | {"started": told["started"] + 1}))  # the number was given to another process
    (registry / "7.json").write_text("no server")
    assert running.find_servers() == [] and not path.exists()
    with pytest.raises(ConfigError, match="no server of this user"):
        running.find_server("mine")


def test_a_model_s_own_server_is_meant_before_one_of_several(registry: Path, monkeypatch) -> None:
    running.register("http://127.0.0.1:1", "mine", ["mine"], False)
    (path,) = registry.glob("*.json")
    told = json.loads(path.read_bytes()) | {"url": "http://127.0.0.1:2", "is_several": True, "since": time.time() + 1}
    (registry / "several.json").write_text(json.dumps(told))
    assert [each.is_several for each in running.find_servers()] == [True, False], "the latest first"
    assert not running.find_server("mine").is_several


def test_a_server_that_runs_and_cannot_talk_is_named_with_its_address(registry: Path, capsys) -> None:
    running.register("http://127.0.0.1:8123", POOLER, ["vectors"], False, pools=True)
    assert main(["run", "vectors", "-m", "hello"]) == 2
    told = capsys.readouterr().err
    assert "'vectors' pools" in told and "texts go to http://127.0.0.1:8123/v1/embeddings" in told
    assert "`quire run vectors --web` opens its page" in told


def test_a_client_without_an_address_asks_the_latest_server(registry: Path, capsys) -> None:
    assert running.latest_url() == "http://127.0.0.1:8000"
    running.register("http://127.0.0.1:9", "m", ["m"], False)
    for words in (["chat", "-q", "hi"], ["complete", "-q", "hi"], ["top", "--once"]):
        assert main(words) == 2 and "cannot reach http://127.0.0.1:9" in capsys.readouterr().err


def test_of_a_server_of_several_models_the_one_that_is_named_talks(registry: Path, monkeypatch) -> None:
    running.register("http://127.0.0.1:8123", "models.yaml", ["first", "second"], False)
    talked: list[str] = []
    monkeypatch.setattr("quire.entrypoints.cli.chat.run", lambda args: talked.append(args.model_name) or 0)
    assert main(["run", "second", "-m", "hello"]) == 0 == main(["run", "-m", "hello"])
    assert talked == ["second", None]


class Shows(http.server.BaseHTTPRequestHandler):
    """What a server of several models says of each: the second one embeds, the third one is not to be had."""

    abilities: ClassVar = {"first": ["completion"], "second": ["embedding"]}

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        name = json.loads(self.rfile.read(int(self.headers["content-length"])))["model"]
        known = self.path == "/api/show" and self.headers["authorization"] == "Bearer secret" and name in self.abilities
        body = json.dumps({"capabilities": self.abilities[name]} if known else {}).encode()
        self.send_response(200 if known else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_of_several_models_one_that_embeds_says_what_to_use(registry: Path, monkeypatch, capsys) -> None:
    talked: list[str] = []
    monkeypatch.setattr("quire.entrypoints.cli.chat.run", lambda args: talked.append(args.model_name) or 0)
    with http.server.HTTPServer(("127.0.0.1", 0), Shows) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        running.register(url, "models.yaml", ["first", "second", "third"], True, is_several=True)
        ask = ["-m", "hello", "--api-key", "secret"]
        assert main(["run", "second", *ask]) == 2
        told = capsys.readouterr().err
        assert "'second' pools" in told and f"texts go to {url}/v1/embeddings" in told and "--web" not in told
        assert "other models there: first, third" in told
        assert main(["run", "first", *ask]) == main(["run", "third", *ask]) == 0
        assert f"first goes on at {url}; `quire stop {url}` ends it." in capsys.readouterr().err
        assert main(["run", "first", "--web"]) == 2 and "has no page" in capsys.readouterr().err
        server.shutdown()
    assert talked == ["first", "third"], "of one that cannot be had, the talk says why"
    assert main(["ps"]) == 0 and "first, second, third" in capsys.readouterr().out


def test_stopping_waits_for_the_end_of_the_process(registry: Path) -> None:
    text = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print(flush=True); signal.pause()"
    )
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    started = running._start_of(child.pid)
    assert started is not None
    server = running.RunningServer(child.pid, started, 0.0, "http://x:1", "m", ["m"])
    assert running.stop(server, print) and child.wait(10) == 0
    assert running.stop(server, print), "one that is gone is stopped"


def test_the_words_of_the_talk_are_not_the_servers() -> None:
    words = ["m", "--web", "-m", "hello", "--max-model-len", "8k", "--message=x"]
    assert serve_words(words, _add_own) == ["m", "--max-model-len", "8k"]


def test_the_last_error_of_a_log_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO a\nquire: error: no room\nbye\n")
    assert last_error(log) == "no room"
    log.write_text("INFO a\nTraceback\nValueError: x\n")
    assert last_error(log) == "ValueError: x"
    log.write_text("")
    assert last_error(log) == "it wrote nothing"


def test_the_sentence_knows_models_that_see_and_models_that_embed(tmp_path: Path) -> None:
    from quire.engine.arg_utils import EngineArgs

    memory = {"total": 23 << 30, "free": 20 << 30, "weights": 8 << 30, "kv_tokens": 9_000}
    seer = make_tiny_vision("LlavaForConditionalGeneration", tmp_path / "seer")
    sentence = fit_sentence(EngineArgs(model=str(seer)).create_engine_config(), memory, "a card")
    assert "It reads images, too: each takes part of the context, at most " in sentence
    embedder = make_tiny_model("BertModel", tmp_path / "embedder")
    config = EngineArgs(model=str(embedder), max_num_seqs=4).create_engine_config()
    assert fit_sentence(config, memory, "a card").endswith("texts of up to 256 tokens.")
    limits = limits_sentence(config, memory)
    assert "truncate_prompt_tokens" in limits and "up to 4 texts (--max-num-seqs)" in limits
    assert limits_sentence(config, memory | {"refused": "no room"}) == ""


def test_the_sentence_says_whether_it_fits_and_what_limits_it() -> None:
    from quire.engine.arg_utils import EngineArgs

    config = EngineArgs(max_num_seqs=4, kv_cache_memory_bytes=1 << 24).create_engine_config()
    memory = {"total": 23 << 30, "free": 20 << 30, "weights": 8 << 30, "kv_tokens": 9_000}
    sentence = fit_sentence(config, memory, "a card")
    assert sentence.startswith("It fits: 8.6 GB of weights, 24.7 GB of memory")
    assert "4,096 tokens of context; about 3 conversations of 3,000 tokens at once" in sentence
    assert "limits how many run at once; the rest wait" in limits_sentence(config, memory)
    assert "--max-num-seqs 4 limits" in limits_sentence(config, memory | {"kv_tokens": 90_000})
    short = memory | {"kv_tokens": 1_000}
    assert "1,000 tokens of context" in fit_sentence(config, short, "a card")
    assert "memory for the KV cache limits the length" in limits_sentence(config, short)
    stored = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization="int8"))
    assert "8.6 GB of weights (int8), " in fit_sentence(stored, memory, "a card")
    refused = memory | {"refused": "no room"}
    assert not fits(refused) and fit_sentence(config, refused, "a card").endswith("on a card. no room.")
    huge = fit_sentence(config, refused | {"weights": 30 << 30}, "a card")
    assert huge.startswith("It does not fit: 32.2 GB of weights") and "The weights alone are larger: take" in huge
