"""Reading weights to a device that copies when it likes: every byte arrives, nothing is overwritten on its way."""

import random
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model_loader.test_loader import load, logprobs_of, oracle
from tests.oracles.tiny_models import make_tiny_model

from quire.errors import ConfigError
from quire.model_loader import device_reader
from quire.model_loader.device_reader import UploadedTensor, upload_tensors
from quire.model_loader.loader import _wanted_rows
from quire.model_loader.safetensors_reader import SafetensorsReader
from quire.platforms.cpu import CpuPlatform
from quire.platforms.interface import DeviceEvent, UploadStream

CPU = torch.device("cpu")


class LazyEvent(DeviceEvent):
    """A copy that happens no sooner than somebody waits for it."""

    def __init__(self, copy):
        self._copy, self._lock = copy, threading.Lock()

    def record(self):
        raise NotImplementedError

    def wait(self):
        with self._lock:
            if self._copy is not None:
                self._copy()
                self._copy = None

    def milliseconds_since(self, earlier):
        raise NotImplementedError


class LazyUploads(UploadStream):
    def __init__(self):
        self.staged = 0
        self.submitted = 0

    def staging(self, num_bytes):
        self.staged += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fence(self):
        pass

    def submit(self, target, source):
        self.submitted += target.numel()
        return LazyEvent(lambda: target.copy_(source))

    def join(self, event):
        event.wait()


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(device_reader, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(device_reader, "AHEAD_BYTES", 20 << 10)


@pytest.fixture
def checkpoint(tmp_path):
    source = torch.Generator().manual_seed(0)
    tensors = {
        "a.weight": torch.randn(40, 64, generator=source),
        "b.weight": torch.randn(128, 16, generator=source).bfloat16(),
        "norm": torch.randn(7, generator=source),
        "none": torch.empty(0, 4),
        "scale": torch.tensor(2.5),
        "fp8": torch.randn(16, 96, generator=source).to(torch.float8_e4m3fn),
    }
    save_file({name: tensors[name] for name in ("a.weight", "norm", "none")}, tmp_path / "one.safetensors")
    save_file({name: tensors[name] for name in ("b.weight", "scale", "fp8")}, tmp_path / "two.safetensors")
    return tmp_path, tensors


def whole(tensor):
    return [slice(0, tensor.shape[0])] if tensor.dim() else [slice(0, 1)]


def test_every_byte_arrives_through_a_ring_that_is_used_again(checkpoint, small_pieces):
    path, tensors = checkpoint
    uploads = LazyUploads()
    wanted = {name: whole(tensor) for name, tensor in tensors.items()}
    seen = dict(upload_tensors(SafetensorsReader(path), wanted, uploads, CPU))
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        got = seen[name][(slice(0, tensor.shape[0]),)] if tensor.dim() else seen[name]._stretches[0][1]
        assert got.dtype == tensor.dtype and torch.equal(got.float(), tensor.float()), name
    assert uploads.staged == device_reader.NUM_BUFFERS * device_reader.PIECE_BYTES
    assert uploads.submitted == sum(tensor.nbytes for tensor in tensors.values())


def test_the_order_is_the_disks(checkpoint):
    path, tensors = checkpoint
    reader = SafetensorsReader(path)
    names = [name for name, _ in upload_tensors(reader, {n: whole(t) for n, t in tensors.items()}, LazyUploads(), CPU)]
    assert names == sorted(names, key=lambda name: (reader.infos[name].file, reader.infos[name].offset))


def test_only_the_wanted_rows_are_read(checkpoint, small_pieces):
    path, tensors = checkpoint
    uploads = LazyUploads()
    wanted = {"b.weight": [slice(8, 24), slice(100, 128)]}
    ((_, got),) = upload_tensors(SafetensorsReader(path), wanted, uploads, CPU)
    assert uploads.submitted == (16 + 28) * 16 * 2
    assert torch.equal(got[slice(100, 128), slice(4, 9)], tensors["b.weight"][100:128, 4:9])
    assert torch.equal(got[slice(10, 12), slice(0, 16)], tensors["b.weight"][10:12])
    with pytest.raises(IndexError, match="rows 24 to 30 were not read"):
        got[slice(24, 30), slice(0, 16)]


def test_a_file_that_shrinks_is_refused(checkpoint):
    path, tensors = checkpoint
    reader = SafetensorsReader(path)
    data = (path / "two.safetensors").read_bytes()
    (path / "two.safetensors").write_bytes(data[:-100])
    with pytest.raises(ConfigError, match=r"two\.safetensors ends at byte"):
        list(upload_tensors(reader, {name: whole(tensor) for name, tensor in tensors.items()}, LazyUploads(), CPU))


def test_a_failing_copy_ends_the_reading(checkpoint):
    path, tensors = checkpoint

    class Broken(LazyUploads):
        def submit(self, target, source):
            raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="the device is gone"):
        list(upload_tensors(SafetensorsReader(path), {"a.weight": [slice(0, 40)]}, Broken(), CPU))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]
    assert tensors


def test_who_stops_early_leaves_no_thread(checkpoint, small_pieces):
    path, tensors = checkpoint
    stream = upload_tensors(
        SafetensorsReader(path), {name: whole(tensor) for name, tensor in tensors.items()}, LazyUploads(), CPU
    )
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights-")]


def test_stretches_are_found_by_the_whole_tensors_rows():
    tensor = torch.arange(60).view(20, 3)
    parts = UploadedTensor([(slice(2, 8), tensor[2:8]), (slice(12, 20), tensor[12:20])])
    assert torch.equal(parts[slice(13, 15), slice(0, 3)], tensor[13:15])


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "GPT2LMHeadModel"])
def test_a_model_that_was_uploaded_computes_the_same(architecture, tmp_path, small_pieces, monkeypatch):
    path = make_tiny_model(architecture, tmp_path)
    monkeypatch.setattr(CpuPlatform, "upload_stream", lambda self, device: LazyUploads())
    loaded = load(path)
    torch.testing.assert_close(logprobs_of(loaded), oracle(path), rtol=0, atol=1e-3)


def test_scales_of_a_float8_cache_are_uploaded_too(tmp_path, small_pieces):
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    tensors = load_file(path / "model.safetensors")
    scales = {"1.self_attn.k_scale": torch.tensor(0.5), "2.self_attn.v_scale": torch.tensor([2.0])}
    save_file(tensors | {f"model.layers.{name}": scale for name, scale in scales.items()}, path / "model.safetensors")
    model, reader = load(path).model, SafetensorsReader(path)
    weights = dict(model.assemble(upload_tensors(reader, _wanted_rows(model, reader), LazyUploads(), CPU)))
    assert weights["layers.1.k_scale"] == 0.5
    assert weights["layers.2.v_scale"].tolist() == [2.0]


def test_many_tensors_in_any_sizes_arrive(tmp_path, small_pieces):
    source = random.Random(5)
    tensors = {f"t{i}": torch.full((source.randint(1, 3000),), float(i)) for i in range(200)}
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = {name: whole(tensor) for name, tensor in tensors.items()}
    for name, got in upload_tensors(SafetensorsReader(tmp_path), wanted, LazyUploads(), CPU):
        assert torch.equal(got[(slice(0, tensors[name].shape[0]),)], load_file(tmp_path / "model.safetensors")[name])
