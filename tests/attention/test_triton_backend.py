"""The Triton backend: what it serves, how a step is divided, and its pages."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from tests.kernels.triton.conftest import repaired_interpreter  # noqa: F401
from tests.oracles.drawn_cases import expected
from tests.oracles.interpreter import cuda_kernels
from tests.oracles.tiny_models import make_tiny_model
from tests.worker.test_device_runner import make_engine
from tests.worker.test_end_to_end import greedy_requests, make_prompts, run

from quire.attention.interface import AttentionRequest
from quire.attention.reference import ReferenceBackend
from quire.attention.triton import TritonBackend
from quire.config.kv_spec import KVCacheSpec, KVKind
from quire.conformance.cases.batches import Batch, make_batch
from quire.kernels.triton.attention import decode as decode_attention
from quire.kernels.triton.attention import paged_attention as paged_attention

LATENT = {"kind": "mla", "num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "latent": 512}
REQUEST = AttentionRequest(num_heads=4, num_kv_heads=2, head_dim=64, kv_dtype=torch.bfloat16, block_size=16)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with cuda_kernels():
        yield


def attend(batch: Batch) -> torch.Tensor:
    out_TC = batch.new_out()
    norms = (batch.q_norm_H, batch.k_norm_H, batch.eps)
    TritonBackend().attend(batch.qkv_TC, batch.kv_cache, batch.metadata, batch.params, out_TC, batch.rope, *norms)
    return out_TC


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [1, 9, 1, 20], [5, 9, 2, 20]])
def test_any_step_equals_the_reference(query_lens, deterministic):
    layer = {"rotary_dim": 16, "has_norm": True, "window": 30, "has_sinks": True, "soft_cap": 8.0}
    batch = make_batch([40, 33, 5, 90], query_lens, padding=2, deterministic=deterministic, **layer)
    prepared = batch.prepared()
    out_TC = attend(batch)
    tokens = sum(query_lens)
    torch.testing.assert_close(out_TC[:tokens], expected(prepared)[:tokens], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch.kv_cache, prepared.kv_cache, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_table_with_a_row_for_each_token_is_read_at_the_tokens():
    """As of models whose positions have several axes."""
    batch = make_batch([40, 33, 5, 90], [1, 1, 1, 1], rotary_dim=16, has_norm=True)
    assert batch.rope is not None
    batch.rope = dataclasses.replace(batch.rope, is_by_token=True)
    batch.metadata.positions[:4] = torch.arange(4)
    prepared = batch.prepared()
    torch.testing.assert_close(attend(batch)[:4], expected(prepared)[:4], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch.kv_cache, prepared.kv_cache, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_deterministic_token_has_the_same_bits_in_any_batch_and_any_chunk():
    """The last token of the first request: alone, beside others, and as the end of a chunk."""
    lengths, whole = [70, 30, 18], make_batch([70, 30, 18], [70, 30, 18], rotary_dim=16, deterministic=True)
    expected_TC = attend(whole.copy())
    for first_lens in ([1], [9], [1, 1, 1], [40, 3, 18]):
        count = len(first_lens)
        batch = make_batch(lengths[:count], first_lens, rotary_dim=16, deterministic=True)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        wanted = torch.cat([torch.arange(starts[b + 1] - n, starts[b + 1]) for b, n in enumerate(first_lens)])
        cache = whole.copy()
        attend(cache)
        metadata = dataclasses.replace(
            batch.metadata,
            rows=whole.metadata.rows[:count],
            block_table=whole.metadata.block_table,
            slot_mapping=whole.metadata.slot_mapping[wanted],
        )
        step = dataclasses.replace(
            batch, qkv_TC=whole.qkv_TC[wanted].clone(), kv_cache=cache.kv_cache, metadata=metadata, rope=whole.rope
        )
        assert torch.equal(attend(step), expected_TC[wanted]), first_lens


def test_a_step_that_only_decodes_is_one_kernel(monkeypatch):
    launches = []
    run = decode_attention._launch
    monkeypatch.setattr(decode_attention, "_launch", lambda *a, **k: (launches.append(a[5]), run(*a, **k)))
    attend(make_batch([20, 3]))
    assert launches == [True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_kv_heads": 3}, "4 heads do not share 3 KV heads evenly"),
        ({"num_heads": 512}, "256 query heads share a KV head; the kernels take at most 128"),
        ({"head_dim": 512}, "head_dim 512 is not a multiple of 8 up to 256"),
        ({"head_dim": 20}, "head_dim 20 is not a multiple of 8 up to 256"),
        ({"block_size": 8}, "pages of 8 tokens: use a power of two from 16"),
        ({"block_size": 48}, "pages of 48 tokens: use a power of two from 16"),
        ({"kv_dtype": torch.int8}, r"pages of torch\.int8 are none of bfloat16, float16, float32, float8_e4m3fn"),
        ({"kind": "cross"}, "attention of kind 'cross' has no kernel"),
        ({"kind": "mla", "num_kv_heads": 1, "latent": 640}, "a latent of 640 values; the kernel takes at most 512"),
        ({"kind": "mla", "num_kv_heads": 1, "latent": 512, "window": 8}, "only attended causally, without windows"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(change, why):
    answer = TritonBackend.supports(dataclasses.replace(REQUEST, **change))
    assert not answer.yes
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(answer.why)


def test_what_it_serves():
    for change in ({}, {"kv_dtype": torch.float8_e4m3fn}, {"window": 8}, {"head_dim": 80}, {"num_kv_heads": 1}, LATENT):
        assert TritonBackend.supports(dataclasses.replace(REQUEST, **change)).yes


def test_pages_may_be_fp8():
    spec = KVCacheSpec(KVKind.FULL, 16, 256, num_kv_heads=2, head_dim=64, dtype="float8_e4m3fn")
    pages = TritonBackend().allocate(spec, 5, torch.device("cpu"))
    assert pages.shape == (2, 5, 2, 16, 64)
    assert pages.dtype == torch.float8_e4m3fn


def test_a_step_without_decoding_launches_no_decode_kernel(monkeypatch):
    asked = []
    monkeypatch.setattr(paged_attention, "decode_attention", lambda *step: asked.append(step))
    batch = make_batch([20, 3], [4, 2])
    prepared = batch.prepared()
    metadata = dataclasses.replace(batch.metadata, decodes=False)
    out_TC = batch.new_out()
    TritonBackend().forward(prepared.qkv_TC, prepared.kv_cache, metadata, batch.params, out_TC)
    torch.testing.assert_close(out_TC, expected(prepared), atol=1e-4, rtol=1e-4)
    assert asked == []


class Watching(ReferenceBackend):
    """Notes what steps are said to hold, and what they hold."""

    name = "watching"
    seen: ClassVar[list[tuple[bool, bool]]] = []

    def begin_step(self, metadata):
        lengths = metadata.query_start[: int(metadata.shape[1]) + 1].diff()
        self.seen.append((metadata.decodes, bool((lengths == 1).any())))


def test_a_runner_says_of_eager_steps_whether_requests_decode(monkeypatch, tmp_path):
    Watching.seen.clear()
    path = make_tiny_model("LlamaForCausalLM", tmp_path)
    backend = f"{__name__}:Watching"
    engine = make_engine(monkeypatch, path, enforce_eager=True, max_num_batched_tokens=16, attention_backend=backend)
    Watching.seen.clear()
    run(engine, greedy_requests(make_prompts((5, 20))))
    assert {(True, True), (False, False)} <= set(Watching.seen)
    assert all(decodes or not holds for decodes, holds in Watching.seen)
