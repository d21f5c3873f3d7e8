"""What happens beside the imports of a start, and what a start must not import."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.worker import startup

ROOT = Path(__file__).resolve().parent.parent.parent


def test_libraries_are_found_without_importing_them_and_read_whole(tmp_path):
    library = tmp_path / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(bytes(3 << 20))
    (library.parent / "libother.so").write_bytes(b"not needed")
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    code = (
        f"import sys, json; sys.path.insert(0, {str(tmp_path)!r}); sys.path.append({str(ROOT / 'src')!r})\n"
        "from quire.worker import startup\n"
        "files = [str(f) for f in startup._library_files() if 'torch' in f.parts]\n"
        "print(json.dumps([files, startup.read_ahead() >= 3 << 20, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[str(library)], True, False]


def test_a_machine_without_a_driver_is_left_to_torch(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(startup.ctypes, "CDLL", missing)
    assert startup.create_context(0) is False


@pytest.mark.parametrize("fails", [None, "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_context_is_made_or_not_but_never_an_error(monkeypatch, fails):
    called = []

    class Driver:
        def __getattr__(self, name):
            return lambda *arguments: (called.append(name), 100 if name == fails else 0)[1]

    monkeypatch.setattr(startup.ctypes, "CDLL", lambda name: Driver())
    assert startup.create_context(0) is (fails is None)
    order = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert called == order[: order.index(fails) + 1 if fails else 3]


def test_a_start_does_not_import_torchs_compilers_or_transformers():
    code = (
        "import sys, json\nfrom quire import LLM\nimport quire.worker.worker, quire.worker.device_runner\n"
        "from quire.kernels import triton\ntriton.register()\n"
        "print(json.dumps([m for m in ('torch._dynamo', 'torch._inductor', 'sympy', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
