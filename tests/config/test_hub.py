"""Where a model's files are: folders, ids, and one clear error for everything else. No test here reaches a network."""

import sys
import types

import pytest

from quire.config import hub
from quire.config.hub import resolve_config_path, resolve_model_path
from quire.errors import ConfigError


@pytest.fixture
def offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_a_folder_is_its_own_path(tmp_path):
    assert resolve_model_path(str(tmp_path)) == str(tmp_path.resolve())


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c", "trailing/"])
def test_a_missing_folder_names_the_setting_and_what_was_looked_for(name):
    with pytest.raises(ConfigError, match=r"model=.*no such folder \(looked for") as caught:
        resolve_model_path(name)
    assert caught.value.setting == "model"


def test_an_empty_name_is_refused():
    with pytest.raises(ConfigError, match="model=''"):
        resolve_model_path("")


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        resolve_model_path(str(file))


def test_an_id_that_is_not_cached_is_refused_offline_with_the_way_out(tmp_path, offline):
    with pytest.raises(ConfigError, match=r"tokenizer='owner/name'.*HF_HUB_OFFLINE.*To fix: unset") as caught:
        resolve_model_path("owner/name", download_dir=str(tmp_path), setting="tokenizer")
    assert caught.value.setting == "tokenizer"


def test_a_cached_id_is_found_offline_with_its_revision(tmp_path, offline):
    commit = "a" * 40
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(commit)
    found = resolve_config_path("owner/name", revision="v1", download_dir=str(tmp_path))
    assert found == str(snapshot)


def test_an_impossible_id_is_called_so(tmp_path, offline):
    with pytest.raises(ConfigError, match="not a valid hub id"):
        resolve_model_path("owner/na me!", download_dir=str(tmp_path))


def test_a_folder_without_a_configuration_says_what_it_holds(tmp_path):
    (tmp_path / "notes.md").write_text("hello")
    with pytest.raises(ConfigError, match=r"has no config.json \(it holds notes.md\)"):
        resolve_config_path(str(tmp_path))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository's files by name; what is downloaded of them lies in a folder."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    names: list[str] = []

    def snapshot_download(model, *, revision, cache_dir, allow_patterns, ignore_patterns):
        for name in filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{model} {revision}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return names


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("owner/name:Q4_K_M", "name-Q4_K_M.gguf"),
        ("owner/name:q4_k_m", "name-Q4_K_M.gguf"),
        ("owner/name:Q4_K", "name.q4_k.gguf"),
        ("owner/name:Q8_0", "Q8_0/name-Q8_0-00001-of-00002.gguf"),
        ("owner/name/name.q4_k.gguf", "name.q4_k.gguf"),
        ("owner/name/Q8_0/name-Q8_0-00001-of-00002.gguf", "Q8_0/name-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_a_repositorys_gguf_file_is_found_by_its_type_or_name(repository, tmp_path, monkeypatch, model, found):
    repository += [
        "name-Q4_K_M.gguf", "name.q4_k.gguf", "mmproj-Q4_K_M.gguf", "name-IQ4_XS.gguf", "tokenizer.json", "config.json",
        *(f"Q8_0/name-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)),
    ]  # fmt: skip
    monkeypatch.setattr(hub, "gguf_folder", str)
    assert resolve_config_path(model, revision="main") == str(tmp_path / found)
    assert (tmp_path / "tokenizer.json").read_text() == "owner/name main"
    assert not (tmp_path / "name-IQ4_XS.gguf").exists()
    assert ("Q8_0" in found) == (tmp_path / "Q8_0/name-Q8_0-00002-of-00002.gguf").exists()


def test_a_type_that_a_repository_lacks_or_has_twice_is_told(repository):
    repository += ["a-Q4_0.gguf", "b-Q4_0.gguf"]
    with pytest.raises(
        ConfigError, match=r"several such files \(a-Q4_0.gguf, b-Q4_0.gguf\): name one, as owner/name/a-"
    ):
        resolve_config_path("owner/name:Q4_0")
    with pytest.raises(ConfigError, match=r"has no such file \(downloaded earlier: a-Q4_0.gguf, b-Q4_0.gguf\)"):
        resolve_config_path("owner/name:Q2_K")


def test_modelscope_is_asked_where_it_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_USE_MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ConfigError, match="pip install modelscope"):
        resolve_model_path("owner/name")
    client = types.SimpleNamespace(snapshot_download=lambda model, **settings: f"/{model}/{settings['revision']}")
    monkeypatch.setitem(sys.modules, "modelscope", client)
    assert resolve_model_path("owner/name", revision="v1") == "/owner/name/v1"
