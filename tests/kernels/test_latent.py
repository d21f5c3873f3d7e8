"""Latent attention's own operations: the native kernels, and Triton's in its interpreter, against the references."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention.test_modes import drawn
from tests.kernels.triton.conftest import repaired_interpreter  # noqa: F401
from tests.oracles.dense_attention import draw_step

import quire.kernels.ops  # noqa: F401
from quire.attention.interface import AttentionParams
from quire.kernels import cpu, registry, triton
from quire.kernels.triton.launch import interpreted
from quire.kernels.types import HeadWeight, Rope

pytestmark = pytest.mark.skipif(not interpreted(), reason="tensors are on the host")

TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def entries(op: str, platform: str) -> list[registry.Kernel]:
    cpu.register()
    triton.register()
    if platform == "cpu" and not cpu.library_status()[0]:
        pytest.skip("the native kernels are not built here")
    return [entry for entry in registry.implementations(op) if entry.platform == platform]


def apart(x_TNK: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """The same values within wider heads and rows."""
    tokens, heads, size = x_TNK.shape
    wide = torch.full((tokens, heads, before + size + after), float("nan"), dtype=x_TNK.dtype)
    wide[..., before : before + size] = x_TNK
    return wide[..., before : before + size]


@drawn
@given(
    platform=st.sampled_from(["cpu", "cuda"]),
    tokens=st.sampled_from([1, 2, 7, 13, 40, 100]),
    heads=st.sampled_from([1, 3, 5]),
    outputs=st.sampled_from([1, 7, 16, 24, 70, 130]),
    inputs=st.sampled_from([1, 9, 16, 48, 130]),
    dtype=st.sampled_from(list(TOLERANCE)),
    before=st.integers(0, 3),
    threads=st.integers(1, 4),
)
def test_each_head_has_its_matrix(platform, tokens, heads, outputs, inputs, dtype, before, threads):
    cpu.set_num_threads(threads)
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(heads, outputs, inputs, generator=generator).to(dtype) / inputs**0.5
    x_type = torch.float32 if platform == "cpu" else dtype
    x = apart(torch.randn(tokens, heads, inputs, generator=generator).to(x_type), before, 2)
    expected = torch.einsum("tnk,nmk->tnm", x.float(), weight.float())
    for entry in entries("head_linear", platform):
        pack = (entries("pack_heads", platform) or entries("pack_heads", "any"))[0].function
        packed: HeadWeight = pack(weight.clone())
        out = apart(torch.zeros(tokens, heads, outputs, dtype=x_type), 1, before)
        entry.function(x, packed, out)
        torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        whole = out.as_strided((tokens, heads, outputs + 1 + before), out.stride(), 0)
        assert whole[..., 0].isnan().all() and whole[..., outputs + 1 :].isnan().all(), "wrote beside its columns"


@settings(drawn, max_examples=24)
@given(
    platform=st.sampled_from(["cpu", "cuda"]),
    lengths=st.lists(
        st.integers(1, 20).flatmap(lambda new: st.tuples(st.just(new), st.integers(new, 40))), max_size=3, min_size=1
    ),
    heads=st.sampled_from([1, 5, 20]),
    rank=st.sampled_from([16, 19, 64]),
    rotary=st.sampled_from([2, 8, 24]),
    interleaved=st.booleans(),
    dtype=st.sampled_from([*TOLERANCE, torch.float8_e4m3fn]),
)
def test_rotated_heads_and_latents_go_where_they_belong(platform, lengths, heads, rank, rotary, interleaved, dtype):
    is_fp8 = dtype == torch.float8_e4m3fn
    if is_fp8 and platform == "cpu":
        return
    params = AttentionParams(heads, 1, rank + rotary, 1.0, latent=rank)
    step = draw_step(lengths, params, layout="latent", writes=True, dtype=torch.float32)
    tokens = step.metadata.num_tokens
    step.metadata.slot_mapping[1::4] = -1
    rope = Rope(torch.randn(64, rotary), rotary, interleaved)
    latent, norm = torch.randn(tokens, rank + rotary), torch.rand(rank) + 0.5
    q = apart(torch.randn(tokens, heads, rotary), 3, 0)
    results = []
    for function in (entries("latent_and_cache", platform)[0].function, entries("latent_and_cache", "any")[0].function):
        cache = torch.full(step.kv_cache.shape[1:], 0.0, dtype=dtype).expand(2, -1, -1, -1, -1)
        out = apart(torch.zeros(tokens, heads, rotary), rank, 0)
        function(q, latent, norm, 1e-6, rope, cache, step.metadata, out, 0.5 if is_fp8 else 1.0)
        results.append((out, cache.float()))
    torch.testing.assert_close(results[0][0], results[1][0], atol=2e-5, rtol=2e-5)
    step_of_type = 0.13 if is_fp8 else TOLERANCE[dtype]
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-2 if is_fp8 else step_of_type, rtol=step_of_type)
    assert results[1][1].any()


@settings(drawn, max_examples=14)
@given(
    platform=st.sampled_from(["any", "cpu", "cuda", "cuda"]),
    lengths=st.lists(
        st.one_of(
            st.tuples(st.just(1), st.integers(1, 90)),
            st.integers(1, 40).flatmap(lambda new: st.tuples(st.just(new), st.integers(new, 90))),
        ),
        min_size=1,
        max_size=3,
    ),
    heads=st.sampled_from([1, 5, 16, 20]),
    rank=st.sampled_from([16, 19, 64]),
    tail=st.sampled_from([2, 8]),
    deterministic=st.booleans(),
)
def test_values_are_the_first_columns_of_keys(platform, lengths, heads, rank, tail, deterministic):
    params = AttentionParams(heads, 1, rank + tail, 0.2, latent=rank, deterministic=deterministic)
    step = draw_step(lengths, params, layout="latent")
    out = torch.full((step.metadata.num_tokens, heads * rank), float("nan"))
    entries("paged_attention", platform)[0].function(step.qkv_TC, step.kv_cache, step.metadata, params, out)
    expected = step.expected().unflatten(1, (heads, -1))[..., :rank].flatten(1)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", [[(1, 200), (1, 3)], [(30, 70), (1, 90), (9, 9)]])
def test_half_precision_and_padded_graphs(dtype, lengths):
    """A graph's sizes exceed the step's: rows of no request are left alone."""
    params = AttentionParams(5, 1, 72, 0.1, latent=64)
    step = draw_step(lengths, params, layout="latent", dtype=dtype)
    metadata, tokens = step.metadata, step.metadata.num_tokens
    end = torch.full((3,), tokens, dtype=torch.int32)
    metadata.query_start, metadata.seq_lens = (
        torch.cat((metadata.query_start, end)),
        torch.cat((metadata.seq_lens, end * 0)),
    )
    metadata.rows = torch.cat((metadata.rows, end * 0))
    metadata.num_requests, metadata.num_tokens, metadata.max_seq_len = metadata.num_requests + 3, tokens + 4, 512
    q = torch.cat((step.qkv_TC, step.qkv_TC[:1].expand(4, -1)))
    out = torch.full((tokens + 4, 5 * 64), 7.0, dtype=dtype)
    entries("paged_attention", "cuda")[0].function(q, step.kv_cache, metadata, params, out)
    expected = step.expected().float().unflatten(1, (5, -1))[..., :64].flatten(1)
    torch.testing.assert_close(out[:tokens].float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert (out[tokens:] == 7.0).all()


def test_latents_in_fp8_are_scaled_back():
    params = AttentionParams(5, 1, 72, 0.1, latent=64)
    step = draw_step([(9, 30), (1, 70)], params, layout="latent")
    rounded = (step.kv_cache[0] / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    plain = (rounded.float() * 0.5).expand(2, -1, -1, -1, -1)
    expected, out = torch.zeros(10, 5 * 64), torch.zeros(10, 5 * 64)
    entries("paged_attention", "any")[0].function(step.qkv_TC, plain, step.metadata, params, expected)
    pages, scaled = rounded.expand(2, -1, -1, -1, -1), dataclasses.replace(params, k_scale=0.5)
    entries("paged_attention", "cuda")[0].function(step.qkv_TC, pages, step.metadata, scaled, out)
    torch.testing.assert_close(out, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_deterministic_token_has_the_same_bits_alone_and_at_the_end_of_a_chunk(platform):
    params = AttentionParams(5, 1, 40, 0.2, latent=32, deterministic=True)
    function = entries("paged_attention", platform)[0].function
    whole = draw_step([(33, 70), (2, 9)], params, layout="latent")
    expected = whole.new_out()[:, : 5 * 32].contiguous()
    function(whole.qkv_TC, whole.kv_cache, whole.metadata, params, expected)
    for new in (1, 7, 20):
        metadata = dataclasses.replace(
            whole.metadata,
            query_start=torch.tensor([0, new], dtype=torch.int32),
            seq_lens=whole.metadata.seq_lens[:1],
            rows=whole.metadata.rows[:1],
            shape=torch.tensor([new, 1, new, 70]),
            num_tokens=new,
            num_requests=1,
            max_query_len=new,
        )
        out = torch.zeros(new, 5 * 32)
        function(whole.qkv_TC[33 - new : 33].contiguous(), whole.kv_cache, metadata, params, out)
        assert torch.equal(out, expected[33 - new : 33])
