"""From a checkpoint's files to facts: dtype, length, architecture, overrides."""

import json
import struct
from pathlib import Path

import pytest

from quire.config import HFConfig
from quire.config.resolve import (
    load_hf_config,
    model_length,
    resolve_architecture,
    resolve_dtype,
    resolve_max_model_len,
)
from quire.errors import ConfigError
from quire.platforms.interface import Explained

ALL = Explained(("bfloat16", "float16", "float32"), "a test says so")


def write_config(folder: Path, **values: object) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


# --- config.json ---


def test_overrides_replace_values_and_merge_objects(tmp_path: Path) -> None:
    path = write_config(tmp_path, a=1, rope={"factor": 2, "type": "linear"})
    config = load_hf_config(path, {"a": 2, "rope": {"factor": 4}, "new": [1]})
    assert config.to_dict() == {"a": 2, "rope": {"factor": 4, "type": "linear"}, "new": [1]}


def test_a_function_may_override(tmp_path: Path) -> None:
    path = write_config(tmp_path, a=1)
    assert load_hf_config(path, lambda values: {**values, "b": values["a"] + 1}).b == 2
    with pytest.raises(ConfigError, match="hf_overrides must return"):
        load_hf_config(path, lambda values: None)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "not valid JSON"), ("[1]", "must hold a JSON object"), ("[" * 100_000, "not valid JSON"), (b"\xff", "JSON")],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str | bytes, problem: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        load_hf_config(str(tmp_path), {})
    assert problem in str(error.value) and str(file) in str(error.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json.*No such file"):
        load_hf_config(str(tmp_path), {})


def test_the_architecture_is_the_first_one() -> None:
    assert resolve_architecture(HFConfig({"architectures": ["A", "B"]})) == "A"
    for values in ({}, {"architectures": []}, {"architectures": "A"}, {"architectures": [1]}):
        with pytest.raises(ConfigError, match="names no architecture"):
            resolve_architecture(HFConfig(values))


# --- dtype ---


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("half", "float16"),
        ("float16", "float16"),
        ("float", "float32"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("torch.float16", "float16"),
    ],
)
def test_every_spelling_of_a_dtype_is_known(tmp_path: Path, asked: str, expected: str) -> None:
    assert resolve_dtype(asked, HFConfig({}), str(tmp_path), ALL).value == expected


def test_an_unknown_or_unsupported_dtype_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype='int3'.*auto, half"):
        resolve_dtype("int3", HFConfig({}), str(tmp_path), ALL)
    with pytest.raises(ConfigError, match=r"dtype='float16'.*float32 \(old\)"):
        resolve_dtype("float16", HFConfig({}), str(tmp_path), Explained(("float32",), "old"))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_auto_takes_the_checkpoints_type(tmp_path: Path, key: str) -> None:
    found = resolve_dtype("auto", HFConfig({key: "float16"}), str(tmp_path), ALL)
    assert found.value == "float16" and key in found.why


def test_auto_takes_the_platforms_best_where_it_has_not_the_checkpoints(tmp_path: Path) -> None:
    found = resolve_dtype("auto", HFConfig({"dtype": "bfloat16"}), str(tmp_path), Explained(("float32",), "no halves"))
    assert found.value == "float32" and "bfloat16" in found.why and "no halves" in found.why


@pytest.mark.parametrize(
    ("config", "pools", "expected"),
    [
        ({"dtype": "float32"}, False, "bfloat16"),
        ({}, False, "bfloat16"),
        ({"dtype": "float32", "model_type": "bert"}, True, "float16"),
        ({"dtype": "float32", "model_type": "gemma3_text"}, True, "bfloat16"),
        ({"dtype": "float16"}, False, "float16"),
    ],
)
def test_auto_narrows_float32_where_the_platform_has_no_units_for_it(tmp_path: Path, config, pools, expected) -> None:
    narrows, hf = Explained(True, "it is slow here"), HFConfig(config)
    found = resolve_dtype("auto", hf, str(tmp_path), ALL, narrows=narrows, pools=pools)
    assert found.value == expected and ("it is slow here" in found.why) == (expected != config.get("dtype"))
    assert resolve_dtype("float32", hf, str(tmp_path), ALL, narrows=narrows, pools=pools).value == "float32"


def test_auto_reads_the_weights_header_where_the_config_is_silent(tmp_path: Path) -> None:
    header = json.dumps(
        {"__metadata__": {}, "a": {"dtype": "F16"}, "b": {"dtype": "F16"}, "c": {"dtype": "F32"}}
    ).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert resolve_dtype("auto", HFConfig({}), str(tmp_path), ALL).value == "float16"


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"[1]]"])
def test_a_broken_weights_file_is_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert resolve_dtype("auto", HFConfig({}), str(tmp_path), ALL).value == "float32"


# --- length ---


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 8192),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, 131072),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"text_config": {"max_position_embeddings": 777}}, 777),
        ({}, None),
        ({"max_position_embeddings": "many"}, None),
    ],
)
def test_the_length_counts_rope_scaling_as_the_checkpoint_means_it(values: dict, expected: int | None) -> None:
    assert model_length(HFConfig(values)).limit == expected


def test_the_users_length_wins_up_to_the_models() -> None:
    config = HFConfig({"max_position_embeddings": 4096})
    assert resolve_max_model_len(128, config, None) == Explained(128, "as asked")
    assert resolve_max_model_len(None, config, None).value == 4096
    with pytest.raises(
        ConfigError, match=r"max_model_len=4097 is more than the model's 4096 \(max_position_embeddings\)"
    ):
        resolve_max_model_len(4097, config, None)


def test_a_dynamic_rope_is_stretched_only_where_more_is_asked_for() -> None:
    config = HFConfig({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert resolve_max_model_len(None, config, None).value == 4096
    assert resolve_max_model_len(8192, config, None).value == 8192
    with pytest.raises(ConfigError, match="more than the model's 8192"):
        resolve_max_model_len(8193, config, None)


def test_the_environment_may_allow_more_but_not_past_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve_max_model_len(9999, HFConfig({"max_position_embeddings": 4096}), None).value == 9999
    with pytest.raises(ConfigError, match=r"use at most 1024$"):
        resolve_max_model_len(9999, HFConfig({"n_positions": 1024}), None)


def test_a_tokenizers_length_counts_where_the_user_gives_none(tmp_path: Path) -> None:
    config = HFConfig({"max_position_embeddings": 4096})
    file = tmp_path / "tokenizer_config.json"
    file.write_text('{"model_max_length": 512}')
    assert resolve_max_model_len(None, config, str(tmp_path)).value == 512
    assert resolve_max_model_len(2000, config, str(tmp_path)).value == 2000
    file.write_text('{"model_max_length": 1e30}')
    assert resolve_max_model_len(None, config, str(tmp_path)).value == 4096


def test_without_any_length_a_common_one_is_taken() -> None:
    assert resolve_max_model_len(None, HFConfig({}), None).value == 2048
    assert resolve_max_model_len(5000, HFConfig({}), None).value == 5000


def test_a_window_that_is_turned_off_bounds_the_length() -> None:
    config = HFConfig({"max_position_embeddings": 4096, "sliding_window": 512})
    assert resolve_max_model_len(None, config, None, disable_sliding_window=True).value == 512
    with pytest.raises(ConfigError, match="sliding_window"):
        resolve_max_model_len(1024, config, None, disable_sliding_window=True)
