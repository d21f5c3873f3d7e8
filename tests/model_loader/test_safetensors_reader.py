"""Reading safetensors: one file, shards, and every way in which a folder can be wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import ConfigError
from quire.model_loader import safetensors_reader
from quire.model_loader.safetensors_reader import INDEX_NAME, SafetensorsReader

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4, dtype=torch.bfloat16), "c": torch.ones(5, 1)}


def write_shards(path, weight_map):
    for file in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in TENSORS if weight_map.get(name) == file}, path / file)
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SHARDED = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}


def read_all(reader):
    return {name: lazy[:].clone() for name, lazy in reader.stream()}


def assert_same(read):
    assert set(read) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(read[name], tensor)


def test_a_single_file_gives_its_tensors(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert {name: info.shape for name, info in reader.infos.items()} == {"a": (2, 3), "b": (4,), "c": (5, 1)}
    assert_same(read_all(reader))


def test_shards_with_an_index_give_their_tensors(tmp_path):
    write_shards(tmp_path, SHARDED)
    assert_same(read_all(SafetensorsReader(tmp_path)))


def test_shards_without_an_index_give_their_tensors(tmp_path):
    write_shards(tmp_path, SHARDED)
    (tmp_path / INDEX_NAME).unlink()
    assert_same(read_all(SafetensorsReader(tmp_path)))


def test_tensors_come_in_the_order_of_the_disk(tmp_path):
    tensors = {f"t{i}": torch.zeros(4) for i in (3, 1, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    offsets = [reader.infos[name].offset for name, _ in reader.stream()]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("span", [1, 17, 25, 1000])
def test_a_file_that_is_mapped_in_spans_gives_every_tensor_once_in_order(tmp_path, monkeypatch, span):
    monkeypatch.setattr(safetensors_reader, "SPAN_BYTES", span)
    save_file(TENSORS, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    names = [name for name, _ in reader.stream()]
    assert names == sorted(TENSORS, key=lambda name: reader.infos[name].offset)
    assert_same(read_all(reader))


def test_a_slice_is_read_lazily(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    (lazy,) = [lazy[1:2, 0:2].clone() for name, lazy in SafetensorsReader(tmp_path).stream() if name == "a"]
    assert lazy.tolist() == [[3.0, 4.0]]


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, SHARDED)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names 1 of 2 files that are not there: model-2\.safetensors"):
        SafetensorsReader(tmp_path)


def test_a_tensor_that_the_index_promises_must_be_in_its_file(tmp_path):
    write_shards(tmp_path, SHARDED)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {**SHARDED, "d": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match="names 1 tensors that are not in their files, first 'd'"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_named(tmp_path, text):
    write_shards(tmp_path, SHARDED)
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(ConfigError, match=r"index\.json"):
        SafetensorsReader(tmp_path)


def test_an_index_cannot_reach_out_of_its_folder(tmp_path):
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ConfigError, match="outside its folder"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_a_cut_off_file_is_named(tmp_path, keep):
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32"}}',
        b"\xff\xff",
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b"{" + b", ".join([b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'] * 2) + b"}",
    ],
)
def test_a_senseless_header_is_named(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        SafetensorsReader(tmp_path)


def test_one_name_in_two_files_is_refused_unless_one_is_ignored(tmp_path):
    save_file(TENSORS, tmp_path / "one.safetensors")
    save_file(TENSORS, tmp_path / "two.safetensors")
    with pytest.raises(ConfigError, match=r"'a' is in both one\.safetensors and two\.safetensors"):
        SafetensorsReader(tmp_path)
    assert_same(read_all(SafetensorsReader(tmp_path, ignore_patterns=["two.*"])))


def test_a_second_copy_in_another_layout_is_left_alone(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert_same(read_all(SafetensorsReader(tmp_path)))


def test_pickled_weights_are_refused_with_the_reason(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(
        ConfigError, match=r"only pickled weights \(pytorch_model\.bin\); Quire reads safetensors unless"
    ):
        SafetensorsReader(tmp_path)


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors \(it holds config\.json\)"):
        SafetensorsReader(tmp_path)
