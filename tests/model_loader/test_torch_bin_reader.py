"""Pickled weights: read when asked, and nothing in them is run."""

import os
import pickle  # noqa: TID251  # the harm that must not be done
import sys
import types

import pytest
import torch
from safetensors.torch import load_file
from tests.oracles.quantized_models import WEIGHT_ONLY, store
from tests.oracles.tiny_models import make_tiny_model

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.model_loader.torch_bin_reader import TorchBinReader

SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "num_gpu_blocks_override": 20, "skip_tokenizer_init": True}


class Harmful:
    def __reduce__(self):
        return (os.mkdir, (os.environ["QUIRE_TEST_FOLDER"],))


@pytest.fixture
def pickled(tmp_path):
    """The same model twice: as safetensors, and as one .bin file."""
    plain = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", tokenizer=False)
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((plain / "config.json").read_bytes())
    torch.save(load_file(plain / "model.safetensors"), folder / "pytorch_model.bin")
    return plain, folder


def tokens(path, **settings):
    llm = LLM(model=str(path), **(SETTINGS | settings))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [7, 8, 9, 10]}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_it_loads_when_asked_and_not_before(pickled):
    plain, folder = pickled
    with pytest.raises(ConfigError, match="load_format='pt'"):
        tokens(folder)
    assert tokens(folder, load_format="pt") == tokens(plain)


def test_shards_are_read_by_their_index_or_without(pickled):
    plain, folder = pickled
    tensors = load_file(plain / "model.safetensors")
    names = sorted(tensors)
    (folder / "pytorch_model.bin").unlink()
    for number, part in enumerate((names[::2], names[1::2])):
        torch.save({name: tensors[name] for name in part}, folder / f"pytorch_model-{number}.bin")
    reader = TorchBinReader(folder)
    assert sorted(reader.infos) == names
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in reader.stream())
    torch.save({names[0]: tensors[names[0]]}, folder / "extra.bin")
    with pytest.raises(ConfigError, match="is in both"):
        TorchBinReader(folder)
    assert sorted(TorchBinReader(folder, ["extra*"]).infos) == names


@pytest.mark.parametrize("content", [b"no pickle", pickle.dumps({"a": 1}), pickle.dumps([torch.zeros(1)])])
def test_other_content_is_refused(content, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin (holds something else than tensors|is not a table)"):
        TorchBinReader(tmp_path)


def test_nothing_of_it_is_run(tmp_path, monkeypatch):
    target = tmp_path / "made by a pickle"
    monkeypatch.setenv("QUIRE_TEST_FOLDER", str(target))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Harmful()}))
    with pytest.raises(ConfigError, match="holds something else than tensors"):
        TorchBinReader(tmp_path)
    torch.save({"a": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="holds something else than tensors"):
        TorchBinReader(tmp_path)
    assert not target.exists()


def test_a_folder_without_such_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no \*\.bin"):
        TorchBinReader(tmp_path)


class Int8Tensor(torch.Tensor):
    """As torchao has them: no data of its own, all of it in attributes."""

    __module__ = "torchao"
    __torch_dispatch__ = classmethod(lambda cls, *_: None)


class Int4TilePackedTo4dTensor(Int8Tensor):
    __module__ = "torchao"


class PerRow:
    __module__ = "torchao"


def save_library_tensors(folder, kind, monkeypatch):
    """A folder's tensors as torchao pickles them, without the library."""
    module = types.ModuleType("torchao")
    for own in (Int8Tensor, Int4TilePackedTo4dTensor, PerRow):
        own.__qualname__ = own.__name__
        setattr(module, own.__name__, own)
    tensors, found = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        before, is_part, part = name.partition("_weight_")
        if not is_part:
            found[name] = tensor
            continue
        if before + "weight" not in found:
            found[before + "weight"] = torch.Tensor._make_wrapper_subclass(kind, (1,))
            found[before + "weight"].granularity = PerRow()
        setattr(found[before + "weight"], part, tensor)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchao", module)
        torch.save(found, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def test_torchaos_tensors_are_read_without_the_library(tmp_path, monkeypatch):
    plain = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", tokenizer=False)
    for name in ("safetensors", "pickled"):
        store(plain, tmp_path / name, WEIGHT_ONLY["torchao int8, groups"])
    save_library_tensors(tmp_path / "pickled", Int8Tensor, monkeypatch)
    assert tokens(tmp_path / "pickled", load_format="pt") == tokens(tmp_path / "safetensors")


def test_torchaos_tensors_in_one_kernels_packing_are_refused(tmp_path, monkeypatch):
    plain = make_tiny_model("LlamaForCausalLM", tmp_path / "plain", tokenizer=False)
    store(plain, tmp_path, WEIGHT_ONLY["torchao int8, groups"])
    save_library_tensors(tmp_path, Int4TilePackedTo4dTensor, monkeypatch)
    with pytest.raises(ConfigError, match=r"type torchao\.Int4TilePackedTo4dTensor, .*Int8Tensor"):
        TorchBinReader(tmp_path)
