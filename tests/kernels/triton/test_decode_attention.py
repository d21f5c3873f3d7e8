"""Decode attention against the plain PyTorch reference: every kind of layer, ragged lengths, several programs a head."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.oracles.drawn_cases import expected

from quire.conformance.cases.batches import Batch, make_batch
from quire.kernels.triton.attention import decode as decode_attention
from quire.kernels.triton.attention.decode import Shape, _launch
from quire.kernels.triton.attention.paged_attention import paged_attention

drawn = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
TOLERANCE = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
    torch.float16: {"atol": 3e-3, "rtol": 3e-3},
}


def assert_equals_the_reference(batch: Batch, fused: bool, **choices) -> None:
    """Rows of requests with one token equal the reference; others are not written."""
    prepared = batch.prepared()
    expected_TC = expected(prepared)
    given_batch = batch if fused else prepared
    before_TC = given_batch.qkv_TC.clone()
    out_TC = batch.new_out()
    norms = (batch.q_norm_H, batch.k_norm_H, batch.eps) if fused else (None, None, 0.0)
    rope = batch.rope if fused else None
    _launch(
        given_batch.qkv_TC, given_batch.kv_cache, batch.metadata, batch.params, out_TC, fused, rope, *norms, **choices
    )
    starts = batch.metadata.query_start
    is_single_T = torch.zeros(len(out_TC), dtype=torch.bool)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        is_single_T[start:end] = end - start == 1
    is_fp8 = batch.kv_cache.dtype == torch.float8_e4m3fn
    tolerance = TOLERANCE[batch.qkv_TC.dtype]
    if is_fp8 and batch.qkv_TC.dtype == torch.float32:  # Multiplied in float16.
        tolerance = TOLERANCE[torch.float16]
    torch.testing.assert_close(
        out_TC[is_single_T].float(), expected_TC[is_single_T].to(out_TC.dtype).float(), **tolerance
    )
    assert out_TC[~is_single_T].isnan().all(), "wrote rows of other requests"
    assert torch.equal(before_TC, given_batch.qkv_TC)
    if is_fp8:  # One step of the type, also among its smallest values.
        tolerance = {"atol": 0.01, "rtol": 0.13}
    if fused:
        torch.testing.assert_close(given_batch.plain_pages(), prepared.plain_pages(), equal_nan=True, **tolerance)


@drawn
@given(data=st.data())
def test_any_layer_and_any_batch(data):
    draw = data.draw
    kv_heads, group = draw(st.sampled_from([(1, 4), (2, 1), (2, 2), (3, 3), (1, 17)]))
    head_dim = draw(st.sampled_from([8, 16, 24, 64, 80]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    kv_dtype = draw(st.sampled_from([dtype, dtype, torch.float8_e4m3fn]))
    batch = make_batch(
        draw(st.lists(st.integers(1, 200), min_size=1, max_size=4)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page=draw(st.sampled_from([16, 32])),
        dtype=dtype,
        kv_dtype=kv_dtype,
        rotary_dim=draw(st.sampled_from([None, 8, head_dim])),
        interleaved=draw(st.booleans()),
        has_norm=draw(st.booleans()),
        has_alibi=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
        padding=draw(st.integers(0, 2)),
        window=draw(st.sampled_from([0, 0, 1, 5, 40, 500])),
        soft_cap=draw(st.sampled_from([0.0, 5.0])),
        k_scale=draw(st.sampled_from([1.0, 0.5])),
        v_scale=draw(st.sampled_from([1.0, 2.0])),
        seed=draw(st.integers(0, 1000)),
    )
    assert_equals_the_reference(batch, fused=draw(st.booleans()), shape=Shape(draw(st.sampled_from([16, 32]))))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("min_share", [1, 2, 100])
def test_a_head_is_put_together_from_many_programs(fused, min_share):
    batch = make_batch([300, 16, 17, 1, 129], rotary_dim=16, has_norm=True, has_sinks=True)
    assert_equals_the_reference(batch, fused, shape=Shape(16), min_share=min_share)


def test_one_long_request_is_shared_by_all_programs():
    assert_equals_the_reference(make_batch([500], num_kv_heads=1, dtype=torch.float16), False, shape=Shape(16))


def test_parts_meet_anew_in_every_launch():
    batch = make_batch([150, 40], dtype=torch.float16).prepared()
    outs = [batch.new_out() for _ in range(3)]
    for out_TC in outs:
        _launch(
            batch.qkv_TC,
            batch.kv_cache,
            batch.metadata,
            batch.params,
            out_TC,
            False,
            None,
            None,
            None,
            0.0,
            shape=Shape(16),
        )
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_requests_that_compute_several_tokens_are_left_alone():
    batch = make_batch([40, 70, 33, 5], [1, 6, 1, 5], padding=2)
    assert_equals_the_reference(batch, fused=False, shape=Shape(16))


SHORT_BATCH = ([2300, 70, 2090, 2200, 2051], [17, 6, 1, 40, 3])
"""Contexts and queries: two short queries behind long contexts, one behind a short one, a decode, and a long query."""


@pytest.mark.parametrize(
    "layer",
    [
        {"num_heads": 4, "num_kv_heads": 2, "has_sinks": True},
        {"num_heads": 3, "num_kv_heads": 1, "window": 300, "dtype": torch.bfloat16},
        {"num_heads": 2, "num_kv_heads": 2, "has_alibi": True, "soft_cap": 5.0},
        {"num_heads": 2, "num_kv_heads": 1, "kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16, "k_scale": 0.5},
    ],
)
def test_short_queries_behind_long_contexts_are_split_over_their_keys(layer):
    batch = make_batch(*SHORT_BATCH, padding=1, head_dim=16, **layer).prepared()
    batch.metadata.short_tokens = 32
    out_TC = batch.new_out()
    decode_attention.short_query_attention(batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, out_TC)
    starts = batch.metadata.query_start.tolist()
    is_short_T = torch.zeros(len(out_TC), dtype=torch.bool)
    for request in (0, 4):
        is_short_T[starts[request] : starts[request + 1]] = True
    expected_TC = expected(batch).to(out_TC.dtype)
    tolerance = TOLERANCE[batch.qkv_TC.dtype]
    torch.testing.assert_close(out_TC[is_short_T].float(), expected_TC[is_short_T].float(), **tolerance)
    assert out_TC[~is_short_T].isnan().all(), "wrote rows of other requests"


def test_a_step_of_short_and_other_queries_is_divided_among_the_kernels():
    batch = make_batch(*SHORT_BATCH, padding=1, head_dim=16).prepared()
    batch.metadata.short_tokens = 32
    out_TC = batch.new_out()
    paged_attention(batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, out_TC)
    real = sum(SHORT_BATCH[1])
    torch.testing.assert_close(out_TC[:real], expected(batch)[:real].to(out_TC.dtype), **TOLERANCE[out_TC.dtype])


def test_a_batch_of_nothing_but_padding_writes_nothing():
    batch = make_batch([5], padding=3)
    batch.metadata.query_start.zero_()
    batch.metadata.seq_lens.zero_()
    before = batch.kv_cache.clone()
    out_TC = batch.new_out()
    _launch(batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, out_TC, True, None, None, None, 0.0)
    assert out_TC.isnan().all()
    assert torch.equal(before.nan_to_num(), batch.kv_cache.nan_to_num())


def test_values_beyond_fp8_are_saturated():
    batch = make_batch([20, 3], kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, k_scale=0.5, v_scale=0.25)
    batch.qkv_TC *= 400
    assert_equals_the_reference(batch, fused=True)
    assert batch.plain_pages()[1].nan_to_num().max() == 448 * 0.25


@pytest.mark.parametrize("requests", [1, 16, 17, 256, 1024, 1025])
def test_the_padded_number_of_requests_holds_them(requests):
    padded = decode_attention.requests_padded(requests)
    assert padded >= requests
    assert padded & (padded - 1) == 0


def test_any_head_has_a_shape():
    for head_dim, group, itemsize in itertools.product((8, 64, 80, 128, 256), (1, 4, 17, 128), (1, 2, 4)):
        shape = decode_attention.choose_shape(head_dim, group, itemsize)
        assert shape.tile >= 16
        assert shape.tile & (shape.tile - 1) == 0
