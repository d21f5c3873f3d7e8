"""Decoders with latent attention on Triton's kernels give Transformers' logprobs; its kernel compiles for Hopper without a GPU
and fits a multiprocessor."""

import os
import subprocess
import sys

import pytest
import torch
from tests.distributed.test_split_context import describe
from tests.kernels.triton.test_prefill_attention import interpreted, reference
from tests.oracles.model_driver import ModelDriver, Sequence, build_tiny
from tests.oracles.tiny_models import load_oracle, make_tiny_model

from quire.attention.interface import AttentionParams
from quire.kernels import ops, triton
from quire.kernels.triton.attention.latent_attention import latent_attention

TOKENS = [5, 99, 301, 17, 5, 44, 200, 81, 9, 150, 33, 7]

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from quire.kernels.triton.attention import latent_attention as module

kernel, heads, rank = module._latent_attention, 128, 512
tiles = module.choose_tiles(rank, heads, 2)
constants = dict(
    N=heads, PACK=min(heads, tiles.rows), R=rank, R_PAD=rank, E=64, E_PAD=64, PAGE=64, TILE_M=tiles.rows, TILE_S=tiles.keys,
    DECODE=True, SPLIT=False, PDL=True, CAUSAL=False, LSE=True,
)
types = {"q": "*bf16", "cache": "*bf16", "out": "*bf16", "parts_acc": "*fp32", "parts_softmax": "*fp32", "scale": "fp32"}
types |= {"lse": "*fp32"}
types |= {"v_scale": "fp32", **dict.fromkeys(("query_start", "seq_lens", "rows", "block_table"), "*i32")}
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
aligned = [name for name in signature if signature[name].startswith("*") or name.endswith("stride")]
source = ASTSource(
    kernel, signature, {places[name]: value for name, value in constants.items()},
    {places[name]: [["tt.divisibility", 16]] for name in aligned},
)
options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"))
"""


def test_it_compiles_for_hopper_and_fits_a_multiprocessor() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, products = map(int, done.stdout.split())
    assert shared <= 227 * 1024
    assert products > 0


@pytest.mark.parametrize("causal", [True, False])
def test_parts_of_contexts_come_with_the_logarithms_by_which_they_are_merged(causal: bool) -> None:
    device = torch.device("cpu" if interpreted() else "cuda")
    past, counts, size, heads, latent, tail = [9, 0, 30, 40], [1, 3, 2, 1], 8, 3, 16, 8
    tables = (torch.arange(24).view(4, 6) + 1).int()
    step = describe(size, past, counts, tables)
    if not causal:  # of what came before
        step.seq_lens.copy_(torch.tensor(past))
    cache = torch.randn(1, 25, 1, size, latent + tail, device=device).expand(2, -1, -1, -1, -1)
    params = AttentionParams(heads, 1, latent + tail, 0.3, latent=latent, causal=causal)
    q = torch.randn(sum(counts), heads * (latent + tail), device=device)
    given = [(torch.zeros(len(q), heads * latent), torch.full((len(q), heads), -torch.inf)) for _ in range(2)]
    latent_attention(q, cache, step, params, *given[0])
    has_past = torch.repeat_interleave(step.seq_lens > 0, torch.tensor(counts))
    reference(q, cache, step, params, *given[1])
    given[1][0][~has_past] = 0.0  # nothing was there: no logarithm weighs it
    for ours, theirs in zip(*given, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "is_fused"), [("DeepseekV3ForCausalLM", True), ("MiniCPM3ForCausalLM", False)]
)
def test_a_decoder_gives_transformers_logprobs(architecture, is_fused, tmp_path, monkeypatch, kept_selection):
    if torch.cuda.is_available():  # noqa: TID251
        pytest.skip("the driver's tensors live on the CPU, where only Triton's interpreter can run")
    triton.register()
    ops.select("cuda")
    path = make_tiny_model(architecture, tmp_path, tokenizer=False, num_hidden_layers=1, first_k_dense_replace=1)
    model = build_tiny(path)
    assert model._operations.is_fused is is_fused
    driver, sequence = ModelDriver(model), Sequence(list(TOKENS), row=0)
    logprobs = torch.cat([*driver.step([(sequence, 9)]), *driver.step([(sequence, 1)]), *driver.step([(sequence, 2)])])
    with torch.no_grad():
        expected = load_oracle(path)(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-3)
