"""Kernels are imported and named the same without torch as with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.triton.runtime import variants

ROOT = Path(__file__).resolve().parent.parent.parent.parent
KEYS = """
import importlib, json, sys
sys.path[:0] = [{src!r}, {root!r}, {extra!r}]
from quire.kernels.triton.runtime import without_torch
from quire.kernels.triton import MODULES
if {stand_in}:
    without_torch.install()
for module in MODULES:
    importlib.import_module(f"quire.kernels.triton.{{module}}")
from triton.runtime.jit import JITFunction
kernels = {{
    f"{{name}}:{{key}}": value.cache_key
    for name, module in list(sys.modules.items()) if name.startswith("quire.")
    for key, value in list(vars(module).items()) if isinstance(value, JITFunction)
}}
print(json.dumps([kernels, hasattr(sys.modules.get("torch"), "__version__")]))
"""


def run(code):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def keys(stand_in, extra=""):
    return run(KEYS.format(src=str(ROOT / "src"), root=str(ROOT), extra=extra, stand_in=stand_in))


def test_every_kernel_has_the_same_key_without_torch():
    without, is_real = keys(True)
    assert not is_real
    with_torch, is_real = keys(False)
    assert is_real
    assert len(without) > 30 and without == with_torch


@pytest.mark.parametrize("stand_in", [True, False])
def test_a_module_that_needs_the_real_torch_gets_it(tmp_path, stand_in):
    (tmp_path / "needy").mkdir()
    (tmp_path / "needy" / "__init__.py").write_text(
        "import torch, torch.nn.functional as F\nfrom torch import Tensor\n"
        "x: Tensor | None = None\n@torch.no_grad()\ndef f(): return 3\nassert f() == 3\n"
        "class C(torch.nn.Module): pass\nSIZES = {torch.int8: 1, torch.int32: 4}\nassert len(SIZES) == 2\n"
        "BITS = torch.finfo(torch.float16).bits + 0\n"
    )
    code = f"""
import json, sys
sys.path[:0] = [{str(ROOT / "src")!r}, {str(tmp_path)!r}]
from quire.kernels.triton.runtime import without_torch
if {stand_in}:
    without_torch.install()
try:
    import needy
    failed = False
except TypeError:
    failed = True
    removed = without_torch.remove(("needy.",))
    import needy
print(json.dumps([failed, needy.BITS, without_torch.remove(())]))
"""
    assert run(code) == [stand_in, 16, False]


@pytest.mark.parametrize(
    "name", ["quire.kernels.triton.norm.norms:nothing", "quire.no.such.module:kernel", "quire.envs:VARIABLES"]
)
def test_a_kernel_that_is_gone_is_no_reason_to_import_torch(name):
    with pytest.raises(variants.StaleVariant):
        variants.find_kernel(name)


def test_a_list_names_kernels_of_known_packages_only():
    with pytest.raises(LookupError, match="os:getcwd is in none of the packages"):
        variants.find_kernel("os:getcwd")
