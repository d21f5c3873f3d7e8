"""Norms of heads, rotation and writing to pages against the plain PyTorch reference."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from quire.conformance.cases.batches import make_batch
from quire.kernels.triton.attention.rope import rope_and_cache

drawn = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def run(batch):
    params = batch.params
    heads = (params.num_heads, params.num_kv_heads, params.head_dim)
    norms = (batch.q_norm_H, batch.k_norm_H, batch.eps)
    scales = (params.k_scale, params.v_scale)
    rope_and_cache(batch.qkv_TC, batch.kv_cache, batch.metadata, *heads, batch.rope, *norms, *scales)


@drawn
@given(data=st.data())
def test_equals_the_reference(data):
    draw = data.draw
    kv_heads, group = draw(st.sampled_from([(1, 4), (2, 1), (3, 3), (2, 7)]))
    head_dim = draw(st.sampled_from([8, 16, 40, 64, 80, 128]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    batch = make_batch(
        [30, 5, 17],
        draw(st.sampled_from([[1, 1, 1], [20, 5, 1]])),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page=draw(st.sampled_from([16, 64])),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from([dtype, torch.float8_e4m3fn])),
        rotary_dim=draw(st.sampled_from([None, 8, head_dim])),
        interleaved=draw(st.booleans()),
        has_norm=draw(st.booleans()),
        padding=draw(st.integers(0, 2)),
        k_scale=draw(st.sampled_from([1.0, 0.5])),
        v_scale=draw(st.sampled_from([1.0, 2.0])),
        seed=draw(st.integers(0, 1000)),
    )
    expected = batch.prepared()
    run(batch)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1e-2}
    torch.testing.assert_close(batch.qkv_TC, expected.qkv_TC, **tolerance)
    if batch.kv_cache.dtype == torch.float8_e4m3fn:  # One step of the type, also among its smallest values.
        tolerance = {"atol": 0.01, "rtol": 0.13}
    torch.testing.assert_close(batch.plain_pages(), expected.plain_pages(), equal_nan=True, **tolerance)


def test_keys_and_values_stay_as_they_were_in_the_projection():
    batch = make_batch([9, 4], [9, 4], rotary_dim=16, has_norm=True)
    before_TC = batch.qkv_TC.clone()
    run(batch)
    queries = batch.params.num_heads * batch.params.head_dim
    assert torch.equal(batch.qkv_TC[:, queries:], before_TC[:, queries:])
    assert not torch.equal(batch.qkv_TC[:, :queries], before_TC[:, :queries])


def test_tokens_without_a_slot_are_written_nowhere():
    batch = make_batch([9, 4], [9, 4])
    batch.metadata.slot_mapping.fill_(-1)
    run(batch)
    assert batch.kv_cache.isnan().all()


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_values_beyond_fp8_are_saturated(scale):
    batch = make_batch([9, 4], [9, 4], kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, k_scale=scale, v_scale=scale)
    batch.qkv_TC *= 1000
    run(batch)
    assert batch.plain_pages().nan_to_num().abs().max() == 448 * scale
