"""Hopper's kernel for prompts compiles without a GPU and fits a multiprocessor (`tools/gpu/prefill.py` checks what it
computes), and says which layers it does not serve."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.attention.interface import AttentionParams
from quire.kernels.triton.attention.hopper import QUERY_LAYOUT, _describe, unavailable

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from quire.kernels.triton.attention import hopper as module

kernel = module.prefill_kernel
integers = ("query_start", "seq_lens", "rows", "block_table", "tickets")
floats = ("scale", "soft_cap", "v_scale")
constants = dict(
    NUM_KV_HEADS=8, GROUP=4, PACK=4, HEAD_DIM=128, PAGE=16, WINDOW=100, SOFT_CAP=False, SINKS=False,
    TILE_S=module.tile_keys(128), STAGES=module.num_stages(128), SLOTS=2, COPY_QUERIES=True, PDL=True,
)
layout, q_layout = module.PAGE_LAYOUT, module.QUERY_LAYOUT
signature = {}
for name in kernel.arg_names:
    if name in constants:
        signature[name] = "constexpr"
    elif name == "kv_desc":
        signature[name] = f"tensordesc<bf16[16, 64],{layout!r}>"
    elif name == "q_desc":
        signature[name] = f"tensordesc<bf16[16, 4, 64],{q_layout!r}>"
    elif name in integers:
        signature[name] = "*i32"
    elif name in ("qkv", "out", "sinks"):
        signature[name] = "*bf16"
    else:
        signature[name] = "fp32" if name in floats else "i32"
source = GluonASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})
print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


def test_it_compiles_for_hopper_and_fits_a_multiprocessor() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert products > 0


def test_what_the_copy_engine_is_told_equals_what_the_constructor_would_say() -> None:
    qkv = torch.zeros(8, 12 * 64, dtype=torch.bfloat16)
    told = _describe(qkv, [8, 12, 64], [768, 64, 1], [4, 4, 64], QUERY_LAYOUT)
    built = TensorDescriptor(qkv, [8, 12, 64], [768, 64, 1], [4, 4, 64], QUERY_LAYOUT)
    assert vars(told).keys() == vars(built).keys()
    assert all(vars(told)[name] is vars(built)[name] for name in ("base", "layout"))
    assert (told.shape, told.strides, told.block_shape, told.padding) == ([8, 12, 64], [768, 64, 1], [4, 4, 64], "zero")
    assert built.padding == "zero"


PARAMS = AttentionParams(num_heads=8, num_kv_heads=2, head_dim=128, scale=0.1)


@pytest.mark.parametrize(
    ("params", "dtype", "kv_dtype", "page_size", "reason"),
    [
        ({}, torch.bfloat16, torch.bfloat16, 16, None),
        ({"window": 64, "soft_cap": 2.0}, torch.float16, torch.float16, 128, None),
        ({"head_dim": 80}, torch.bfloat16, torch.bfloat16, 16, "head size 80"),
        ({}, torch.float32, torch.float32, 16, "16-bit"),
        ({}, torch.bfloat16, torch.float8_e4m3fn, 16, "16-bit"),
        ({"alibi_slopes": torch.ones(8)}, torch.bfloat16, torch.bfloat16, 16, "ALiBi"),
        ({}, torch.bfloat16, torch.bfloat16, 48, "pages of 48"),
        ({"causal": False}, torch.bfloat16, torch.bfloat16, 16, "not causal"),
        ({"chunk": 64}, torch.bfloat16, torch.bfloat16, 16, "in chunks"),
    ],
)
def test_it_says_which_layers_it_serves(
    params: dict[str, object], dtype: torch.dtype, kv_dtype: torch.dtype, page_size: int, reason: str | None
) -> None:
    layer = dataclasses.replace(PARAMS, **params)  # type: ignore[arg-type]
    answer = unavailable(torch.empty(1, dtype=dtype), torch.empty(1, dtype=kv_dtype), layer, page_size)
    assert answer is None if reason is None else answer is not None and reason in answer


def test_pages_that_share_their_memory_are_left_to_the_portable_kernel() -> None:
    pages = torch.empty(3, 4096, dtype=torch.bfloat16).as_strided((2, 3, 1, 16, 128), (2048, 4096, 2048, 128, 1))
    assert "share their memory" in str(unavailable(torch.empty(1, dtype=torch.bfloat16), pages, PARAMS, 16))
