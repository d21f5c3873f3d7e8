"""The platforms that were written without their hardware: made-up facts of devices, a made-up torch module, compiled kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire import platforms
from quire.errors import ConfigError
from quire.kernels import registry
from quire.platforms import current_platform, mps, rocm, sysfs_gpus, torch_gpu, untested, xpu
from quire.platforms.sysfs_gpus import SysfsGpu, amd_gpus, intel_gpus

ROOT = Path(__file__).resolve().parents[2]
CONFIG: Any = SimpleNamespace(
    model=SimpleNamespace(dtype="bfloat16"), parallel=SimpleNamespace(rank=0, tensor_parallel_size=1)
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# --- facts from the kernel's files ---


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A processor, two MI300X and one MI250."""
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for node, version in enumerate((0, 90402, 90402, 90010)):
        write(tmp_path / str(node) / "properties", f"cpu_cores_count 4\ngfx_target_version {version}\nlocation name\n")
        write(
            tmp_path / str(node) / "mem_banks" / "0" / "properties", f"heap_type 1\nsize_in_bytes {(node + 1) << 36}\n"
        )
    return tmp_path


def test_amd_gpus_are_those_with_an_instruction_set(nodes: Path) -> None:
    assert amd_gpus(nodes) == [SysfsGpu("gfx942", 2 << 36), SysfsGpu("gfx942", 3 << 36), SysfsGpu("gfx90a", 4 << 36)]
    assert amd_gpus(nodes / "nowhere") == []


def test_hips_variables_choose_among_them(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,1")
    assert [gpu.name for gpu in amd_gpus(nodes)] == ["gfx90a", "gfx942"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,7")
    assert amd_gpus(nodes) == [SysfsGpu("gfx942", 3 << 36)]


def test_intel_gpus_are_the_cards_of_that_vendor(tmp_path: Path) -> None:
    for card, vendor in (("card0", "0x8086"), ("card1", "0x10de"), ("card0-DP-1", "0x8086")):
        write(tmp_path / card / "device" / "vendor", vendor + "\n")
        write(tmp_path / card / "device" / "device", "0x0bd5\n")
    assert intel_gpus(tmp_path) == [SysfsGpu("Intel GPU 0x0bd5")]


# --- what a platform says of a machine ---

MI300 = SysfsGpu("gfx942", 192 << 30)


@pytest.mark.parametrize(
    "build, gpus, why",
    [
        ("2.13.0+cpu", [MI300], "was not built for ROCm"),
        ("2.13.0+rocm7.0", [], "no AMD GPU is visible"),
        ("2.13.0+rocm7.0", [SysfsGpu("gfx1030")], "gfx1030 is none of gfx90a, gfx942"),
        ("2.13.0+rocm7.0", [MI300], None),
    ],
)
def test_rocm_tells_why_a_machine_cannot_run_it(monkeypatch, build: str, gpus: list[SysfsGpu], why: str | None) -> None:
    monkeypatch.setattr(rocm, "torch_build", lambda: build)
    monkeypatch.setattr(rocm, "amd_gpus", lambda: gpus)
    platform = rocm.RocmPlatform()
    if why is None:
        assert platform.check_config(CONFIG) is CONFIG
        assert platform.memory_bytes() == 192 << 30 and platform.device_count() == 1
    else:
        with pytest.raises(ConfigError, match=why):
            platform.check_config(CONFIG)


def test_xpu_and_mps_tell_why_a_machine_cannot_run_them(monkeypatch) -> None:
    monkeypatch.setattr(xpu, "torch_build", lambda: "2.13.0+xpu")
    monkeypatch.setattr(xpu, "intel_gpus", list)
    with pytest.raises(ConfigError, match="no Intel GPU is visible"):
        xpu.XpuPlatform().check_config(CONFIG)
    monkeypatch.setattr(xpu, "intel_gpus", lambda: [SysfsGpu("Intel GPU 0x0bd5")])
    assert xpu.XpuPlatform().check_config(CONFIG) is CONFIG
    monkeypatch.setattr(mps, "sys", SimpleNamespace(platform="linux"))
    with pytest.raises(ConfigError, match="no Mac with Apple's own processor"):
        mps.MpsPlatform().check_config(CONFIG)
    monkeypatch.setattr(mps, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(mps, "machine", SimpleNamespace(machine=lambda: "arm64"))
    assert mps.MpsPlatform().check_config(CONFIG) is CONFIG


@pytest.mark.parametrize("name", sorted(platforms.UNTESTED))
def test_each_says_that_it_has_never_run(name: str, monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(untested.logger, "warning_once", lambda text, *words: said.append(text % words))
    platform = current_platform(name)
    assert isinstance(platform, untested.UntestedPlatform) and platform.name == name
    monkeypatch.setattr(type(platform), "why_unusable", lambda self: None)
    platform.check_config(CONFIG)
    assert len(said) == 1 and f"The platform {name} has never run on its hardware" in said[0]


def test_none_of_them_is_chosen_unless_it_is_named(monkeypatch) -> None:
    monkeypatch.delenv("QUIRE_PLATFORM", raising=False)
    monkeypatch.setattr(rocm, "torch_build", lambda: "2.13.0+rocm7.0")
    monkeypatch.setattr(rocm, "amd_gpus", lambda: [MI300])
    assert current_platform().name not in platforms.UNTESTED


@pytest.mark.parametrize("name", sorted(platforms.UNTESTED))
def test_what_was_not_tried_is_not_claimed(name: str) -> None:
    claimed = current_platform(name).capabilities()
    assert not claimed.fp8.value and not claimed.sleep.value
    assert claimed.graphs.value == ("whole_step" if name == "rocm" else "none")
    assert claimed.tensor_parallel.value == (name == "rocm")
    assert claimed.async_output.value == ("DeviceRunner" in current_platform(name).runner_class())


# --- the runtime that NVIDIA's, AMD's and Intel's share ---


class FakeGpu:
    """A module of torch, which notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(name)
            return FakeStream(self)

        return call

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 10, 100

    def memory_reserved(self, device: torch.device) -> int:
        return 40

    def memory_allocated(self, device: torch.device) -> int:
        return 15


class FakeStream:
    """A stream, an event or a context of a stream."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._gpu.calls.append(name)

    def elapsed_time(self, later: Any) -> float:
        return 2.5

    def __enter__(self) -> None:
        self._gpu.calls.append("enter")

    def __exit__(self, *error: object) -> None:
        self._gpu.calls.append("exit")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(torch_gpu, "torch_module", lambda kind: fake)
    return fake


def test_a_runtime_works_on_a_stream_of_its_own_and_counts_cached_memory_as_free(gpu: FakeGpu) -> None:
    runtime = xpu.XpuRuntime(1)
    assert gpu.calls == ["set_device", "Stream", "set_stream"] and str(runtime.device()) == "xpu:1"
    assert runtime.memory_info() == (35, 100)
    assert runtime.memory_stats() | {"peak": 0} == {
        "free": 35,
        "total": 100,
        "peak": 0,
        "reserved": 40,
        "allocated": 15,
    }
    assert runtime.capture(lambda: gpu.calls.append("run")) is None and "run" not in gpu.calls


def test_events_are_recorded_waited_for_and_compared(gpu: FakeGpu) -> None:
    runtime = xpu.XpuRuntime()
    begin, end = runtime.event(), runtime.event()
    gpu.calls.clear()
    begin.record()
    end.wait()
    assert gpu.calls == ["record", "synchronize"] and end.milliseconds_since(begin) == 2.5


def test_an_upload_runs_on_a_stream_beside_the_workers_and_is_joined_by_an_event(gpu: FakeGpu) -> None:
    stream = torch_gpu.TorchUploads(torch.device("xpu", 0))
    target, source = torch.zeros(4), torch.arange(4.0)
    gpu.calls.clear()
    event = stream.submit(target, source)
    assert target.tolist() == [0, 1, 2, 3]
    assert gpu.calls == ["stream", "enter", "Event", "record", "exit"]
    stream.join(event)
    stream.fence()
    assert gpu.calls[-2:] == ["wait_event", "wait_stream"]


# --- kernels ---


def test_shared_kernels_are_chosen_after_own_ones_and_where_they_say_that_they_can(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_kernels", {})
    for platform, priority, why in (
        ("any", 0, None),
        ("first", 10, None),
        ("first", 20, "no unit"),
        ("second", 10, None),
    ):
        registry.kernel("op", platform=platform, priority=priority, unavailable=lambda why=why: why)(print)
    assert registry.choose("op", "third").chosen.platform == "any"
    shared = registry.choose("op", "third", shares=("first",))
    assert (shared.chosen.platform, shared.chosen.priority) == ("first", 10) and shared.passed_over[0][1] == "no unit"
    assert registry.choose("op", "second", shares=("first",)).chosen.platform == "second"


NVIDIA_WORDS = (
    "inline_asm_elementwise(",
    "experimental.gluon",
    "experimental import gluon",
    "TensorDescriptor",
    "libcuda",
)


def test_every_file_with_something_of_nvidias_alone_is_in_the_list() -> None:
    pytest.importorskip("triton")
    from quire.kernels.triton.nvidia_only import PARTS

    listed = {name for part in PARTS for name in part.files}
    assert all((ROOT / "src/quire" / name).exists() for name in listed)
    for path in (ROOT / "src" / "quire").rglob("*.py"):
        name = path.relative_to(ROOT / "src/quire").as_posix()
        if any(word in path.read_text() for word in NVIDIA_WORDS) and name != "kernels/triton/nvidia_only.py":
            assert any(name == one or name.startswith(f"{one}/") for one in listed), f"{name} is NVIDIA's alone"


ON_AMD = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from quire.entrypoints.cli.explain_platform import explain_platform
from quire.kernels.triton.runtime import variants

told = explain_platform("rocm")
chosen, compiled = set(sys.argv[2].split(",")), {}
for variant in json.loads(open(sys.argv[1]).read())["variants"]:
    name = variant["kernel"].split(":")[1]
    if ("all" in chosen or name in chosen) and name not in compiled and "hopper" not in variant["kernel"]:
        variant["constants"] |= {flag: False for flag in ("PDL", "FAST", "ASSEMBLY") if flag in variant["constants"]}
        own = {key: variants._decode(value) for key, value in variant["options"].items() if key not in ("launch_pdl", "maxnreg")}
        made = triton.compile(variants.source_of(variant), target=GPUTarget("hip", "gfx942", 64), options=own)
        compiled[name] = [len(made.asm["hsaco"]), "s_endpgm" in made.asm["amdgcn"]]
print(json.dumps({"told": told, "compiled": compiled}))
"""


def on_amd(tmp_path: Path, kernels: str) -> dict[str, Any]:
    pytest.importorskip("triton")
    (lists,) = (ROOT / "src/quire/kernels/triton/lists").glob("Qwen3ForCausalLM-bfloat16-sm90-*.json")
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ON_AMD, str(lists), kernels], env=env, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rocm_takes_the_triton_kernels_without_nvidias_and_they_compile_for_gfx942(tmp_path: Path) -> None:
    """Compiled with Triton's AMD back end; nobody has run them."""
    found = on_amd(tmp_path, "_keep,gemv_kernel,tile_scores_kernel")
    kernels = found["told"]["kernels"]
    assert kernels["rms_norm"]["chosen"] == kernels["paged_attention"]["chosen"] == "cuda"
    assert kernels["fp8_linear"]["chosen"] == "any"
    assert {each["why"] for each in kernels["fp8_linear"]["passed_over"]} == {"written in NVIDIA's assembly (PTX)"}
    assert {part["here"] for part in found["told"]["only on NVIDIA"]} == {"not used"}
    assert "never run on its hardware" in found["told"]["platform"]["here"]
    assert len(found["compiled"]) == 3 and all(size and is_code for size, is_code in found["compiled"].values())


@pytest.mark.exhaustive
def test_every_kernel_of_a_dense_model_compiles_for_gfx942(tmp_path: Path) -> None:
    assert len(on_amd(tmp_path, "all")["compiled"]) > 20


def test_explain_tells_about_a_platform_without_triton_and_without_the_device(capsys) -> None:
    from quire.entrypoints.cli.main import main

    before = registry.choices()
    try:
        assert main(["explain", "--platform", "mps"]) == 0
        text = capsys.readouterr().out
    finally:
        registry.use(before)
    assert "this platform has never run on its hardware" in text and "only on NVIDIA" not in text
    assert "quire.kernels.norm.rms_norm" in text
    assert sysfs_gpus.INTEL not in text
