"""Where a model's files come from: folders of this machine, a hub's repositories, and one sentence for everything else.

The hub is a server of this machine (`oracles/fake_hub.py`), asked by the real client in a process of its own.
"""

import errno
import json
import os
import sys
import threading
import types
from pathlib import Path

import pytest
from tests.oracles.fake_hub import GUEST_TOKEN, TOKEN, Asker, FakeHub
from tests.oracles.pty_terminal import Terminal

from quire.config.hub import fetch_weights, find_model, find_tokenizer
from quire.config.hub.download import check_space
from quire.config.hub.failures import explain
from quire.config.hub.find import _fetch
from quire.config.hub.huggingface import HuggingFaceHub
from quire.config.hub.listing import HubFile, HubModel, HubSettings, Listing
from quire.errors import ConfigError

WEIGHTS = {"model.safetensors": b"weights"}
CONFIG = {"config.json": "{}", "generation_config.json": "{}"}
TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "special_tokens_map.json": "{}"}
LITTER = {
    "README.md": "words", ".gitattributes": "x", "original/consolidated.00.pth": "x", "original/params.json": "{}",
    "onnx/model.onnx": "x", "onnx/config.json": "{}", "trainer_state.json": "{}", "flax_model.msgpack": "x", "picture.png": "x",
    "tf_model.h5": "x", "modeling_own.py": "raise", "openvino/model.bin": "x",
}  # fmt: skip


def index(**weight_map):
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})


@pytest.fixture(scope="module")
def hub():
    hub = FakeHub()
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def forget(hub):
    hub.seen.clear()


@pytest.fixture(scope="module")
def asker(hub, tmp_path_factory):
    asker = Asker(hub.environment(tmp_path_factory.mktemp("home")))
    yield asker
    asker.kill()


def files_below(path):
    return sorted(file.relative_to(path).as_posix() for file in Path(path).rglob("*") if file.is_file())


# Folders of this machine.


def test_a_folder_is_its_own_path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == (str(tmp_path.resolve()), None)
    assert find_tokenizer(str(tmp_path), HubSettings()) == str(tmp_path.resolve())


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c", "trailing/"])
def test_a_missing_folder_names_the_setting_and_what_was_looked_for(name):
    with pytest.raises(ConfigError, match=r"model=.*no such folder \(looked for") as caught:
        find_model(name)
    assert caught.value.setting == "model"


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match="model=''"):
        find_model("")


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        find_model(str(file))


def test_a_folder_without_a_configuration_says_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(ConfigError, match=r"has no config.json \(it holds notes.md\)"):
        find_model(str(tmp_path))


def test_a_folder_with_an_adapter_names_its_base(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(ConfigError, match=r"is an adapter \(LoRA\) of owner/base.*run owner/base without it, or merge"):
        find_model(str(tmp_path))


# Every kind of repository: what is fetched.

LAYOUTS = {
    "one file": ({**CONFIG, **TOKENIZER, **WEIGHTS}, {}),
    "a template apart": (
        {
            **CONFIG, **TOKENIZER, **WEIGHTS, "chat_template.jinja": "{{ x }}", "chat_template.json": "{}",
            "additional_chat_templates/tool_use.jinja": "{{ y }}",
        },
        {},
    ),
    "sentencepiece": ({**CONFIG, **WEIGHTS, "tokenizer.model": "x", "tokenizer_config.json": "{}"}, {}),
    "another sentencepiece": ({**CONFIG, **WEIGHTS, "spiece.model": "x", "sentencepiece.bpe.model": "x"}, {}),
    "tiktoken": ({**CONFIG, **WEIGHTS, "own.tiktoken": "x", "tokenizer_config.json": "{}"}, {}),
    "words and merges": ({**CONFIG, **WEIGHTS, "vocab.json": "{}", "merges.txt": "x", "added_tokens.json": "{}"}, {}),
    "words": ({**CONFIG, **WEIGHTS, "vocab.txt": "x"}, {}),
    "pictures": ({**CONFIG, **TOKENIZER, **WEIGHTS, "preprocessor_config.json": "{}", "processor_config.json": "{}"}, {}),
    "quantized": ({**CONFIG, **TOKENIZER, **WEIGHTS, "hf_quant_config.json": "{}", "quantize_config.json": "{}"}, {}),
    "shards": (
        {
            **CONFIG, **TOKENIZER, "model.safetensors.index.json": index(a="a-1.safetensors", b="a-2.safetensors"),
            "a-1.safetensors": "1", "a-2.safetensors": "2",
        },
        {"a-3.safetensors": "no part of it", "model.fp16.safetensors": "another copy"},
    ),
    "both kinds of weights": (
        {**CONFIG, **TOKENIZER, **WEIGHTS},
        {"pytorch_model.bin": "x", "pytorch_model.bin.index.json": index(a="pytorch_model.bin")},
    ),
    "both layouts": (
        {**CONFIG, **TOKENIZER, **WEIGHTS, "params.json": "{}", "tekken.json": "{}"},
        {"consolidated.safetensors": "a second copy"},
    ),
    "Mistral's layout": ({"params.json": "{}", "tekken.json": "{}", "consolidated.safetensors": "x"}, {}),
    "Mistral's older tokenizer": ({"params.json": "{}", "tokenizer.model.v3": "x", "consolidated.safetensors": "x"}, {}),
    "a whole model beside its adapter": (
        {**CONFIG, **TOKENIZER, **WEIGHTS, "adapter_config.json": "{}"}, {"adapter_model.safetensors": "x"}
    ),
    "sentence-transformers": (
        {
            **CONFIG, **TOKENIZER, **WEIGHTS, "modules.json": "[]", "sentence_bert_config.json": "{}",
            "config_sentence_transformers.json": "{}", "1_Pooling/config.json": "{}", "2_Dense/config.json": "{}",
            "2_Dense/model.safetensors": "x",
        },
        {"2_Dense/pytorch_model.bin": "x"},
    ),
}  # fmt: skip


def distinct(files):
    """The same with no two equal contents, of which a hub's client would fetch one."""
    changed = {"{}": '{{"file": "{}"}}', "x": "the content of {}"}
    return {name: changed[text].format(name) if text in changed else text for name, text in files.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_first_start_fetches_all_that_is_needed_and_nothing_else(hub, asker, tmp_path, layout):
    wanted, others = (distinct(files) for files in LAYOUTS[layout])
    commit = hub.add("owner/name", {**wanted, **others, **LITTER})
    found = asker.find("owner/name", cache=str(tmp_path))
    assert found["path"].endswith(f"/snapshots/{commit}")
    assert files_below(found["path"]) == sorted(wanted)
    assert sorted(hub.fetched()) == sorted(wanted)
    hub.seen.clear()
    assert asker.find("owner/name", cache=str(tmp_path)) == found
    assert hub.fetched() == []


def test_a_name_without_an_owner_is_one_of_the_hub(hub, asker, tmp_path):
    hub.add("gpt2", {**CONFIG, **WEIGHTS})
    assert sorted(files_below(asker.find("gpt2", cache=str(tmp_path))["path"])) == sorted({**CONFIG, **WEIGHTS})


def test_the_description_alone_is_fetched_where_no_weights_are_needed(hub, asker, tmp_path):
    hub.add("owner/name", {**CONFIG, **TOKENIZER, **WEIGHTS})
    found = asker.find("owner/name", cache=str(tmp_path), weights=False)
    assert files_below(found["path"]) == sorted({**CONFIG, **TOKENIZER})
    asker.find("owner/name", cache=str(tmp_path), load_format="dummy")
    assert hub.fetched(".safetensors") == []


def test_pickled_weights_are_fetched_where_they_are_asked_for_and_refused_before_elsewhere(hub, asker, tmp_path):
    weights = {"pytorch_model-1.bin": "1", "pytorch_model-2.bin": "2"}
    hub.add("owner/pickled", {
        **CONFIG, **weights, "training_args.bin": "x", "optimizer.bin": "x",
        "pytorch_model.bin.index.json": index(a="pytorch_model-1.bin", b="pytorch_model-2.bin"),
    })  # fmt: skip
    refused = asker.find("owner/pickled", cache=str(tmp_path))
    assert "the repository owner/pickled has only pickled weights" in refused["error"]
    assert refused["setting"] == "load_format"
    assert hub.fetched(".bin") == []
    found = asker.find("owner/pickled", cache=str(tmp_path), load_format="pt")
    assert [name for name in files_below(found["path"]) if name.endswith(".bin")] == sorted(weights)


def test_ignored_files_are_not_fetched(hub, asker, tmp_path):
    hub.add("owner/name", {**CONFIG, **WEIGHTS, "extra.safetensors": "x"})
    found = asker.find("owner/name", cache=str(tmp_path), ignore_patterns=["extra*"])
    assert "extra.safetensors" not in files_below(found["path"])


def test_a_saved_state_of_ranks_is_fetched(hub, asker, tmp_path):
    state = {"model-rank-0-part-0.safetensors": "0", "model-rank-1-part-0.safetensors": "1"}
    hub.add("owner/state", {**CONFIG, **state})
    found = asker.find("owner/state", cache=str(tmp_path), load_format="sharded_state")
    assert files_below(found["path"]) == sorted({**CONFIG, **state})


def test_a_tokenizers_repository_gives_its_tokenizer_alone(hub, asker, tmp_path):
    hub.add("owner/tokens", {**CONFIG, **TOKENIZER, **WEIGHTS}, revision="v2")
    found = asker.find("owner/tokens", tokenizer=True, revision="v2", cache=str(tmp_path))
    assert files_below(found["path"]) == sorted({**CONFIG, **TOKENIZER})
    assert "tokenizer='owner/none'" in asker.find("owner/none", tokenizer=True, cache=str(tmp_path))["error"]


def test_an_index_that_names_files_which_are_not_there_is_told_before_anything_is_fetched(hub, asker, tmp_path):
    hub.add("owner/torn", {
        **CONFIG, "model.safetensors.index.json": index(a="a-1.safetensors", b="a-2.safetensors"), "a-1.safetensors": "1",
    })  # fmt: skip
    error = asker.find("owner/torn", cache=str(tmp_path))["error"]
    assert "repository owner/torn: model.safetensors.index.json names 1 of 2 files that are not there: a-2" in error
    assert hub.fetched(".safetensors") == []


def test_an_adapters_repository_names_its_base(hub, asker, tmp_path):
    hub.add("owner/lora", {
        "adapter_config.json": '{"base_model_name_or_path": "owner/base"}', "adapter_model.safetensors": "x", **TOKENIZER,
    })  # fmt: skip
    error = asker.find("owner/lora", cache=str(tmp_path))["error"]
    assert "is an adapter (LoRA) of owner/base" in error
    assert hub.fetched(".safetensors") == []


def test_a_repository_without_a_model_says_what_it_holds(hub, asker, tmp_path):
    hub.add("owner/data", {"README.md": "x", "rows.csv": "x"})
    assert "has no config.json (it holds README.md, rows.csv)" in asker.find("owner/data", cache=str(tmp_path))["error"]


# GGUF.

GGUF = {
    "name-Q4_K_M.gguf": "a", "name.q4_k.gguf": "b", "mmproj-Q4_K_M.gguf": "c", "name-IQ4_XS.gguf": "d", "tokenizer.json": "{}",
    "config.json": "{}", **{f"Q8_0/name-Q8_0-0000{i}-of-00002.gguf": f"e{i}" for i in (1, 2)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("owner/quants:Q4_K_M", ["name-Q4_K_M.gguf"]),
        ("owner/quants:q4_k_m", ["name-Q4_K_M.gguf"]),
        ("owner/quants:Q4_K", ["name.q4_k.gguf"]),
        ("owner/quants:Q8_0", [f"Q8_0/name-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]),
        ("owner/quants/name.q4_k.gguf", ["name.q4_k.gguf"]),
        ("owner/quants/Q8_0/name-Q8_0-00001-of-00002.gguf", [f"Q8_0/name-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)
def test_of_a_repositorys_gguf_files_the_named_one_is_fetched_with_all_its_parts(hub, asker, tmp_path, model, found):
    hub.add("owner/quants", GGUF)
    error = asker.find(model, cache=str(tmp_path))["error"]
    assert "GGUF" in error  # these files hold nothing, which is seen when they are here
    assert sorted(hub.fetched(".gguf")) == found
    assert hub.fetched("tokenizer.json") == ["tokenizer.json"]


def test_a_type_that_a_repository_lacks_or_has_twice_is_told(hub, asker, tmp_path):
    hub.add("owner/twice", {"a-Q4_0.gguf": "x", "b-Q4_0.gguf": "x", "a-Q8_0.gguf": "x"})
    error = asker.find("owner/twice:Q4_0", cache=str(tmp_path))["error"]
    assert "several such files (a-Q4_0.gguf, b-Q4_0.gguf): name one, as owner/twice/a-Q4_0.gguf" in error
    error = asker.find("owner/twice:Q2_K", cache=str(tmp_path))["error"]
    assert "model='owner/twice:Q2_K': the repository has no such file (it has Q4_0, Q8_0)" in error
    error = asker.find("owner/twice", cache=str(tmp_path))["error"]
    assert "holds 3 GGUF models (Q4_0, Q8_0): name one, as owner/twice:Q4_0" in error
    assert hub.fetched() == []


def test_a_gguf_file_that_is_larger_than_the_memory_is_refused_before_it_is_fetched(hub, asker, tmp_path):
    hub.add("owner/large", {"m-Q4_0.gguf": b"x" * 5000})
    error = asker.find("owner/large", cache=str(tmp_path), max_weight_bytes=4000)["error"]
    assert "m-Q4_0.gguf has 5.0 kB, and the memory 4.0 kB: choose a smaller type" in error
    assert hub.fetched() == []


# Revisions.


def test_all_files_are_of_one_commit_even_if_the_branch_moves_between(hub, asker, tmp_path):
    first = hub.add("owner/moving", {**CONFIG, **WEIGHTS})
    described = asker.find("owner/moving", cache=str(tmp_path), weights=False)["path"]
    hub.add("owner/moving", {**CONFIG, "model.safetensors": b"newer"})
    settings = HubSettings(cache=str(tmp_path))
    listing = Listing("owner/moving", first, described, ())
    assert Path(described).name == first
    asker.find("owner/moving", cache=str(tmp_path), revision=first)
    assert (Path(described) / "model.safetensors").read_bytes() == b"weights"
    assert HubModel(listing, (HubFile("model.safetensors"),)).missing() == ()
    assert settings.revision is None


@pytest.mark.parametrize("revision", ["v1", "refs/pr/3"])
def test_a_branch_or_pull_request_is_looked_up_under_its_name(hub, asker, tmp_path, revision):
    hub.add("owner/tags", {**CONFIG, **WEIGHTS})
    commit = hub.add("owner/tags", {**CONFIG, "model.safetensors": b"of the tag"}, revision=revision)
    found = asker.find("owner/tags", cache=str(tmp_path), revision=revision)
    assert Path(found["path"]).name == commit


def test_a_missing_revision_is_told_even_if_another_is_in_the_cache(hub, asker, tmp_path):
    hub.add("owner/tags", {**CONFIG, **WEIGHTS})
    asker.find("owner/tags", cache=str(tmp_path))
    error = asker.find("owner/tags", cache=str(tmp_path), revision="v9")["error"]
    assert "the repository has no revision 'v9'. To fix: check the setting revision" in error


# Access.


@pytest.mark.parametrize(
    ("access", "token", "told"),
    [
        (
            "gated",
            None,
            "only to those who accept its terms. What was fetched is kept. To fix: accept them at http://127",
        ),
        ("gated", GUEST_TOKEN, "with the token's account"),
        (
            "private",
            None,
            "no such model, or it is private. To fix: check the spelling; for a private model set HF_TOKEN",
        ),
        ("private", GUEST_TOKEN, "check the spelling, and that the token may read it"),
        ("public", "hf_wrong", "the hub refuses the token. To fix: check HF_TOKEN"),
    ],
)
def test_a_refused_access_is_one_line_that_says_what_to_do(hub, asker, tmp_path, access, token, told):
    hub.add(f"owner/{access}", {**CONFIG, **WEIGHTS}, access)
    error = asker.find(f"owner/{access}", cache=str(tmp_path), token=token)["error"]
    assert told in error
    assert "\n" not in error


@pytest.mark.parametrize("access", ["gated", "private"])
def test_a_token_opens_what_it_may_read_and_is_not_shown_to_the_storage(hub, asker, tmp_path, access):
    hub.add(f"owner/{access}", {**CONFIG, "model.safetensors": b"x" * (2 << 20)}, access)
    found = asker.find(f"owner/{access}", cache=str(tmp_path), token=TOKEN)
    assert "model.safetensors" in files_below(found["path"])
    assert all(not seen.has_token for seen in hub.seen if seen.path.startswith("/storage/"))
    assert all(seen.has_token for seen in hub.seen if f"/owner/{access}/" in seen.path and "/storage/" not in seen.path)


def test_the_token_of_the_environment_is_used(hub, tmp_path):
    hub.add("owner/private", {**CONFIG, **WEIGHTS}, "private")
    asker = Asker(hub.environment(tmp_path, HF_TOKEN=TOKEN))
    assert "path" in asker.find("owner/private")
    asker.kill()


def test_a_missing_repository_and_an_impossible_name_are_told(asker, tmp_path):
    assert "the hub has no such model, or it is private" in asker.find("owner/none", cache=str(tmp_path))["error"]
    error = asker.find("owner/na me!", cache=str(tmp_path))["error"]
    assert "that is not a valid hub id. To fix: give a local folder" in error


# Without a network.


def test_what_is_in_the_cache_needs_no_network(hub, asker, tmp_path):
    hub.add("owner/name", {**CONFIG, **TOKENIZER, **WEIGHTS})
    found = asker.find("owner/name", cache=str(tmp_path))
    offline = Asker(hub.environment(tmp_path / "home", HF_HUB_OFFLINE="1"))
    hub.seen.clear()
    assert offline.find("owner/name", cache=str(tmp_path)) == found
    assert hub.seen == []
    refused = offline.find("owner/other", cache=str(tmp_path))["error"]
    assert "it is not in the cache" in refused
    assert "unset HF_HUB_OFFLINE" in refused
    offline.kill()


def test_a_half_fetched_model_says_offline_what_is_missing(hub, asker, tmp_path):
    hub.add("owner/half", {
        **CONFIG, "model.safetensors.index.json": index(a="a-1.safetensors", b="a-2.safetensors"), "a-1.safetensors": "1",
        "a-2.safetensors": "2",
    })  # fmt: skip
    asker.find("owner/half", cache=str(tmp_path), weights=False)
    offline = Asker(hub.environment(tmp_path / "home", HF_HUB_OFFLINE="1"))
    assert "path" in offline.find("owner/half", cache=str(tmp_path), weights=False)
    error = offline.find("owner/half", cache=str(tmp_path))["error"]
    assert "the cached copy of owner/half: model.safetensors.index.json names 2 of 2 files that are not there" in error
    offline.kill()


@pytest.mark.parametrize("status", [503, 429])
def test_a_hub_that_does_not_answer_is_no_trouble_for_what_is_in_the_cache(hub, asker, tmp_path, status):
    hub.add("owner/name", {**CONFIG, **WEIGHTS})
    found = asker.find("owner/name", cache=str(tmp_path))
    hub.broken = status
    try:
        assert asker.find("owner/name", cache=str(tmp_path)) == found
        error = asker.find("owner/other", cache=str(tmp_path))["error"]
    finally:
        hub.broken = 0
    assert (
        "too many requests" in error if status == 429 else "an error of its own (503). To fix: try again later" in error
    )


def test_a_network_that_is_down_is_one_line(hub, tmp_path):
    asker = Asker({**hub.environment(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"})
    error = asker.find("owner/name")["error"]
    assert "http://127.0.0.1:9 cannot be reached (" in error
    assert "check the network and proxy (HF_ENDPOINT chooses a mirror)" in error
    asker.kill()


# Broken downloads.

LARGE = {"model.safetensors": os.urandom(1 << 20) * 25}


def test_a_connection_that_breaks_is_gone_on_with_where_it_stopped(hub, asker, tmp_path):
    hub.add("owner/breaking", {**CONFIG, **LARGE})
    hub.breaks["model.safetensors"] = [21 << 20, 100]
    found = asker.find("owner/breaking", cache=str(tmp_path))
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == LARGE["model.safetensors"]
    (first, *_), *_, (last, count) = hub.sent("model.safetensors")
    assert first == 0
    assert last >= 20 << 20
    assert last + count == 25 << 20


def test_a_connection_that_stays_broken_is_told_with_how_much_came(tmp_path, monkeypatch):
    def fetch(hub, listing, file):
        raise ConnectionResetError("reset by the peer")

    monkeypatch.setattr(HuggingFaceHub, "fetch", fetch)
    monkeypatch.setattr(HuggingFaceHub, "fetched_bytes", lambda hub, listing, file: 21 << 20)
    file = HubFile("model.safetensors", 25 << 20, "x")
    listing = Listing("owner/name", "1" * 40, str(tmp_path / "snapshot"), (file,))
    with pytest.raises(ConfigError) as caught:
        _fetch(HuggingFaceHub(HubSettings(cache=str(tmp_path))), listing, [file.name], "model")
    told = "the connection broke at 22.0 MB of 26.2 MB (reset by the peer). What was fetched is kept. To fix: check the network"
    assert f"{told}, and start it again: it goes on from there" in str(caught.value)


def test_a_killed_process_leaves_what_the_next_one_goes_on_with(hub, tmp_path):
    hub.add("owner/killed", {**CONFIG, "model.safetensors": os.urandom(1 << 20) * 42})
    hub.held["model.safetensors"] = threading.Event()
    hub.half_sent.clear()
    killed = Asker(hub.environment(tmp_path))
    killed.begin("owner/killed")
    assert hub.half_sent.wait(60)
    partial = None
    while partial is None or partial.stat().st_size < 20 << 20:  # what was sent is on its way to the disk
        partial = next((tmp_path / "hf").rglob("*.incomplete"), None)
    killed.kill()
    hub.held.pop("model.safetensors").set()
    hub.seen.clear()
    asker = Asker(hub.environment(tmp_path))
    found = asker.find("owner/killed")
    asker.kill()
    content = hub.repositories["owner/killed"].commits[Path(found["path"]).name]["model.safetensors"]
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == content
    assert all(first >= 20 << 20 for first, count in hub.sent("model.safetensors") if count)


def test_two_processes_that_start_at_once_fetch_each_file_once(hub, tmp_path):
    hub.add("owner/shared", {**CONFIG, **LARGE})
    askers = [Asker(hub.environment(tmp_path)) for _ in range(2)]
    for asker in askers:
        asker.begin("owner/shared")
    first, second = (asker.result() for asker in askers)
    assert first == second
    assert hub.fetched(".safetensors") == ["model.safetensors"]
    for asker in askers:
        asker.kill()


def test_a_disk_without_room_is_told_before_anything_is_fetched(tmp_path):
    source = HuggingFaceHub(HubSettings(cache=str(tmp_path)))
    listing = Listing("owner/name", "a" * 40, str(tmp_path / "snapshot"), ())
    with pytest.raises(ConfigError, match=r"owner/name needs 1000.0 TB more in .*: free space, or name another folder"):
        check_space(source, listing, (HubFile("model.safetensors", 10**15),))


@pytest.mark.parametrize(
    ("code", "told"), [(errno.ENOSPC, "is full; free space"), (errno.EROFS, "cannot be written; check its owner")]
)
def test_a_disk_that_fails_is_one_line(tmp_path, code, told):
    error = RuntimeError("some wrapper")
    error.__cause__ = OSError(code, os.strerror(code))
    found = explain("owner/name", "main", "https://hub", error, has_token=False, cache=tmp_path)
    assert told in f"{found.why}; {found.remedy}"


def test_weights_that_are_missing_without_a_hub_to_ask_are_named(tmp_path):
    listing = Listing("owner/name", "a" * 40, str(tmp_path), (), is_local=True)
    model = HubModel(listing, (HubFile("model-1.safetensors"), HubFile("model-2.safetensors")))
    with pytest.raises(
        ConfigError, match=r"of 2 files with weights, 2 are not in the cache .* \(model-1.safetensors, "
    ):
        fetch_weights(model, HubSettings(cache=str(tmp_path)))


# Other hubs.


def test_modelscope_is_asked_where_it_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_USE_MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="-m pip install modelscope"):
        find_model("owner/name")
    files = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights", "original/x.pth": "x"}

    class HubApi:
        def __init__(self, token):
            assert token == "a token"

        def get_model_files(self, name, revision, recursive):
            assert (name, revision, recursive) == ("owner/name", "v1", True)
            return [{"Path": path, "Size": len(text)} for path, text in files.items()]

    def snapshot_download(name, *, revision, cache_dir, local_files_only, allow_patterns, token):
        assert not local_files_only
        for path in allow_patterns:
            (Path(cache_dir) / path).write_text(files[path])
        return cache_dir

    client = types.ModuleType("modelscope")
    client.snapshot_download = snapshot_download
    api = types.ModuleType("modelscope.hub.api")
    api.HubApi = HubApi
    monkeypatch.setitem(sys.modules, "modelscope", client)
    monkeypatch.setitem(sys.modules, "modelscope.hub.api", api)
    settings = HubSettings(revision="v1", cache=str(tmp_path), token="a token")
    found = find_model("owner/name", settings)
    assert files_below(tmp_path) == ["config.json", "tokenizer.json"]
    fetch_weights(found.hub, settings)
    assert files_below(found.path) == ["config.json", "model.safetensors", "tokenizer.json"]


# What a user sees meanwhile.


def test_a_terminal_shows_one_bar_with_bytes_rate_and_time_left(hub, tmp_path):
    parts = {f"m-0000{i}-of-00003.safetensors": os.urandom(1 << 20) * 20 for i in (1, 2, 3)}
    names = {f"weight{i}": name for i, name in enumerate(parts)}
    hub.add("owner/shown", {**CONFIG, **parts, "model.safetensors.index.json": index(**names)})
    hub.held = {name: threading.Event() for name in parts}
    script = (
        "from quire.config.hub import fetch_weights, find_model\n"
        "from quire.config.hub.listing import HubSettings\n"
        "fetch_weights(find_model('owner/shown').hub, HubSettings())\n"
        "print('all here')\n"
    )
    environment = hub.environment(tmp_path, COLUMNS="120", HF_HUB_DISABLE_PROGRESS_BARS="")
    terminal = Terminal([sys.executable, "-c", script], **environment)
    terminal.wait_for("fetching 3 files of owner/shown at ")
    terminal.wait_for("Fetching owner/shown:  50%")
    terminal.wait_for("31.5M/62.9M [")
    terminal.wait_for("B/s]")
    for event in hub.held.values():
        event.set()
    terminal.wait_for("all here")
    hub.held = {}
    assert terminal.exit_code() == 0
    assert "m-00001" not in terminal.screen
