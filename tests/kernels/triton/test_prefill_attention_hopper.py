"""Hopper's kernel for prompts: it compiles without a GPU, and agrees with the reference where there is one."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from quire.kernels.triton import prefill_attention_hopper as module

kernel = module._prefill_kernel
pointers = {"qkv": "bf16", "out": "bf16", "query_start": "i32", "seq_lens": "i32", "rows": "i32", "block_table": "i32"}
floats = ("scale", "soft_cap", "v_scale")
constants = dict(
    NUM_KV_HEADS=8, GROUP=4, PACK=4, HEAD_DIM=HEAD, PAGE=16, WINDOW=WIN, SOFT_CAP=False, SINKS=False,
    TILE_S=module.tile_keys(HEAD), STAGES=module.num_stages(HEAD), PDL=True,
)
layout = module.gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
signature = {}
for name in kernel.arg_names:
    if name in constants:
        signature[name] = "constexpr"
    elif name == "kv_desc":
        signature[name] = f"tensordesc<bf16[16, 64],{layout!r}>"
    elif name in pointers or name == "sinks":
        signature[name] = "*" + pointers.get(name, "bf16")
    else:
        signature[name] = "fp32" if name in floats else "i32"
source = GluonASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})
print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


@pytest.mark.parametrize(("head_dim", "window"), [(128, 0), (64, 100)])
def test_it_compiles_for_hopper_and_fits_a_multiprocessor(head_dim: int, window: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = COMPILE.replace("HEAD,", f"{head_dim},").replace("(HEAD)", f"({head_dim})").replace("WIN,", f"{window},")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert products > 0
