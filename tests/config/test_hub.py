"""Where a model's files are: folders, ids, and one clear error for everything else. No test here reaches a network."""

import pytest

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
