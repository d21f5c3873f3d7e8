"""The build of the native kernels, and life without them."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from quire.kernels.cpu import build

WITHOUT_LIBRARY = """
import pathlib, quire.kernels.cpu.library as library
library.LIBRARY = "_absent.so"
import torch
from quire.kernels import cpu, ops
from quire.kernels.cpu import recording
from tests.oracles.operations import ASYNCHRONOUS, COMPOSED, PLAIN, QUANTIZED
cpu.register()
ops.select("cpu")
available, isa, reason = cpu.library_status()
assert not available and isa == "" and "is not built" in reason, (available, isa, reason)
for op, choice in ops.choices().items():
    assert choice.chosen.platform == "any", op
    is_left_out = op in COMPOSED + PLAIN + ASYNCHRONOUS + QUANTIZED or op.startswith("fp8_")
    assert is_left_out or any("is not built" in why for _, why in choice.passed_over), op
cpu.set_num_threads(2)
weight = ops.pack_linear(torch.eye(4))
out = torch.empty(2, 4)
ops.linear(torch.ones(2, 4), weight, out)
assert (out == 1).all()
assert recording.record(lambda: ops.linear(torch.ones(2, 4), weight, out), 2, 1) is None
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_without_the_library_the_references_serve_and_the_log_says_so_once():
    done = run_python(WITHOUT_LIBRARY)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("The plain PyTorch kernels serve instead") == 1


def test_a_missing_compiler_is_a_build_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match="install g\\+\\+"):
        build.build(tmp_path)


def test_a_compiler_that_fails_leaves_no_library_and_shows_its_complaint(tmp_path, monkeypatch):
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho no such option >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="no such option"):
        build.build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_an_instruction_set_unknown_to_the_compiler_is_left_out(tmp_path, monkeypatch):
    real = shutil.which("g++") or shutil.which("clang++")
    if real is None or "avx2" not in build.instruction_sets(os.uname().machine):
        pytest.skip("needs a compiler for x86")
    compiler = tmp_path / "old-c++"
    # Knows nothing but the plain instruction set, and does no work for the others.
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-mavx*) echo unrecognized -mavx >&2; exit 1;; esac\nexec {real} -O0 "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    path, built, failed = build.build(tmp_path / "out")
    assert path.exists() and built == ["generic"]
    assert set(failed) == {"avx2", "avx512", "avx512_vnni", "avx512_bf16"} and "unrecognized" in failed["avx2"]


def test_the_override_of_the_instruction_set_is_obeyed_or_refused_by_name():
    if not pathlib.Path(build.FOLDER / build.LIBRARY).exists():
        pytest.skip("no library")
    show = "from quire.kernels import cpu; print(cpu.library_status())"
    if "generic" in build.instruction_sets(os.uname().machine):
        assert "(True, 'generic', '')" in run_python(show, QUIRE_CPU_ISA="generic").stdout
    done = run_python(show, QUIRE_CPU_ISA="mmx")
    assert done.returncode != 0 and "QUIRE_CPU_ISA is 'mmx', but this machine and build can run" in done.stderr


EMULATED = """
import functools, pathlib, sys
import pytest
import quire.kernels.cpu.library as library
loaded = library.Library(pathlib.Path(sys.argv[1]), None)
library.load = functools.cache(lambda: (loaded, ""))
library.library = lambda: loaded
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[2]]))
"""


@pytest.mark.exhaustive
def test_the_code_for_avx512_bf16_is_right_also_where_its_instructions_are_emulated(tmp_path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++: the emulation is written in its vector extensions")
    sources, flags = build.FOLDER / "csrc", ["-std=c++17", "-O2", "-fPIC", "-pthread", "-w", "-fvisibility=hidden"]
    kernels, linked = tmp_path / "kernels.o", tmp_path / "emulated.so"
    emulate = ["-DQUIRE_ISA=generic", "-DQUIRE_EMULATE_AVX512_BF16"]
    made_of = f'-DQUIRE_SOURCES="{build.source_hash()}"'
    subprocess.run([compiler, *flags, *emulate, "-c", sources / "kernels.cpp", "-o", kernels], check=True)
    subprocess.run(
        [compiler, *flags, "-DQUIRE_HAVE_GENERIC", made_of, "-shared", sources / "pool.cpp", kernels, "-o", linked],
        check=True,
    )
    test_module = pathlib.Path(__file__).with_name("test_cpu_kernels.py")
    done = subprocess.run(
        [sys.executable, "-c", EMULATED, linked, test_module], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_library_from_other_sources_is_not_used(monkeypatch):
    from quire.kernels.cpu import library

    monkeypatch.setattr(library, "source_hash", lambda: "other sources")
    found, why = library.load.__wrapped__()
    assert found is None
    assert "was built from other sources" in why or "is not built" in why
