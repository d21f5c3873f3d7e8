"""What the CPU platform sees of its host, refuses, and derives."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.tiny_models import make_tiny_model

from quire.config import EngineConfig
from quire.engine.arg_utils import EngineArgs
from quire.errors import ConfigError
from quire.platforms.cpu import CpuPlatform
from quire.platforms.host import usable_cpus, usable_memory

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


def make_config(model: Path, **engine_args: Any) -> EngineConfig:
    settings: dict[str, Any] = {"model": str(model), "max_model_len": 64, "skip_tokenizer_init": True}
    return EngineArgs(**(settings | engine_args)).create_engine_config()


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_memory_is_what_the_host_has_available(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n")
    assert usable_memory(tmp_path, tmp_path / "none") == (4 * GIB, 8 * GIB)


def test_a_control_groups_limit_cuts_memory_and_its_page_cache_counts_as_free(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal: 8388608 kB\nMemAvailable: 8388608 kB\n")
    write(
        tmp_path / "cgroup",
        memory_dot_max=f"{2 * GIB}\n",
        memory_dot_current=f"{3 * GIB // 2}\n",
        memory_dot_stat=f"anon 5\ninactive_file {GIB // 4}\n",
    )
    assert usable_memory(tmp_path, tmp_path / "cgroup") == (3 * GIB // 4, 2 * GIB)


def test_an_unlimited_control_group_cuts_nothing(tmp_path: Path) -> None:
    write(tmp_path, meminfo="MemTotal: 1024 kB\nMemAvailable: 512 kB\n")
    write(tmp_path / "cgroup", memory_dot_max="max\n", memory_dot_current="5\n", cpu_dot_max="max 100000\n")
    assert usable_memory(tmp_path, tmp_path / "cgroup") == (512 * 1024, 1024 * 1024)
    assert usable_cpus(tmp_path / "cgroup") == len(os.sched_getaffinity(0))


def test_a_cpu_quota_is_rounded_up_and_never_below_one(tmp_path: Path) -> None:
    write(tmp_path, cpu_dot_max="20000 100000\n")
    assert usable_cpus(tmp_path) == 1


def test_capabilities_are_known_without_torch() -> None:
    code = (
        "import sys; from quire.platforms import current_platform; current_platform('cpu').capabilities();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_copies_of_the_model_are_refused_with_an_executor_that_starts_processes_elsewhere(model: Path) -> None:
    assert make_config(model, data_parallel_size=2).parallel.num_devices == 2
    with pytest.raises(ConfigError, match=r"data_parallel_size=2 does not go with .*'ray'"):
        make_config(model, data_parallel_size=2, distributed_executor_backend="ray")


def test_memory_that_the_host_does_not_have_is_refused_with_the_numbers(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes asks for .* GiB") as caught:
        make_config(model, kv_cache_memory_bytes=1 << 50)
    assert caught.value.setting == "kv_cache_memory_bytes"


def test_threads_are_every_usable_core_unless_fewer_are_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CPU_THREADS")
    config = make_config(model)
    assert config.device.cpu_threads == usable_cpus()
    assert "cores" in config.provenance["device.cpu_threads"]
    assert make_config(model, cpu_threads=1).device.cpu_threads == 1
    assert make_config(model, cpu_threads=4096).device.cpu_threads == usable_cpus()


def test_the_runtime_reports_memory_and_its_peak(model: Path) -> None:
    runtime = CpuPlatform().runtime(make_config(model, cpu_threads=1))
    free, total = runtime.memory_info()
    assert 0 < free <= total
    assert runtime.peak_memory() > 10 << 20
    assert runtime.device().type == "cpu"


def test_the_environment_sets_threads_where_the_setting_does_not(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CPU_THREADS", "1")
    config = make_config(model)
    assert config.device.cpu_threads == 1
    assert config.provenance["device.cpu_threads"] == "QUIRE_CPU_THREADS=1"


def test_deterministic_is_refused_without_compiled_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.platforms.cpu.has_native_kernels", lambda: True)
    assert make_config(model, device="cpu", deterministic=True).model.deterministic
    monkeypatch.setattr("quire.platforms.cpu.has_native_kernels", lambda: False)
    with pytest.raises(ConfigError, match=r"deterministic=True cannot run on the cpu platform \(the compiled kernels"):
        make_config(model, device="cpu", deterministic=True)
