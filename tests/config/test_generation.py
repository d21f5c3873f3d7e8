"""generation_config.json: sampling defaults and eos ids."""

import json
from pathlib import Path

import pytest

from quire.config import HFConfig
from quire.config.generation import default_sampling, eos_token_ids, load_generation_config
from quire.errors import ConfigError

VALUES = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 99,
    "do_sample": True, "pad_token_id": 0, "eos_token_id": [1, 2],
}  # fmt: skip


def write(folder: Path, values: object = VALUES) -> str:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


def test_the_models_defaults_come_under_the_names_of_sampling_params(tmp_path: Path) -> None:
    generation = load_generation_config("auto", write(tmp_path))
    assert default_sampling(generation, "auto", {}) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 99,
    }  # fmt: skip


def test_what_the_operator_overrides_wins(tmp_path: Path) -> None:
    generation = load_generation_config("auto", write(tmp_path))
    assert default_sampling(generation, "auto", {"temperature": 0.2, "max_tokens": 5})["temperature"] == 0.2
    assert default_sampling(generation, "auto", {"max_tokens": 5})["max_tokens"] == 5


@pytest.mark.parametrize("setting", ["quire", "vllm"])
def test_the_models_defaults_can_be_ignored_but_its_eos_ids_stay(tmp_path: Path, setting: str) -> None:
    generation = load_generation_config(setting, write(tmp_path))
    assert default_sampling(generation, setting, {"top_k": 3}) == {"top_k": 3}
    assert eos_token_ids(HFConfig({}), generation) == (1, 2)


def test_another_folder_may_be_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", {"temperature": 0.1})
    assert load_generation_config(str(tmp_path / "other"), str(tmp_path)) == {"temperature": 0.1}
    with pytest.raises(ConfigError, match=r"generation_config='/nowhere'.*'auto'"):
        load_generation_config("/nowhere", str(tmp_path))


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert load_generation_config("auto", str(tmp_path)) == {}


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": -7}, {"max_new_tokens": 0}])
def test_defaults_that_no_request_could_use_are_refused_at_start(values: dict) -> None:
    with pytest.raises(ConfigError, match="sampling defaults cannot be used") as error:
        default_sampling(values, "auto", {})
    assert error.value.setting == "generation_config"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        (7, [8, 7, 9], (7, 8, 9)),
        ([7, 8], 8, (7, 8)),
        (None, None, ()),
        (None, [5, None], (5,)),
        (0, None, (0,)),
    ],
)
def test_every_eos_id_of_both_files_counts_once(config: object, generation: object, expected: tuple) -> None:
    assert eos_token_ids(HFConfig({"eos_token_id": config}), {"eos_token_id": generation}) == expected


@pytest.mark.parametrize("wrong", ["</s>", 1.5, True, -1, ["x"]])
def test_an_eos_id_that_is_no_id_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(HFConfig({}), {"eos_token_id": wrong})


def test_an_override_is_checked_under_its_own_name() -> None:
    with pytest.raises(
        ConfigError, match=r"override_generation_config: its sampling defaults cannot be used.*temperature"
    ):
        default_sampling({}, "auto", {"temperature": "hot"})
    with pytest.raises(
        ConfigError,
        match=r"override_generation_config has 'temprature', which is not known; did you mean 'temperature'",
    ):
        default_sampling({}, "auto", {"temprature": 1.0})
