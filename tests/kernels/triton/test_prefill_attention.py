"""Attention of prompts over pages, in Triton's interpreter (or on a GPU, if there is one), against the reference."""

import dataclasses
import math

import pytest
import torch

pytest.importorskip("triton")

from tests.oracles.operations import attention as plain

from quire.attention.interface import AttentionMetadata, AttentionParams
from quire.kernels.triton.attention.prefill import Tiles, choose_tiles, prefill_attention
from quire.kernels.triton.launch import interpreted

reference = plain.paged_attention

DEVICE = torch.device("cpu" if interpreted() else "cuda")
SMALL = Tiles(rows=16, keys=32, num_warps=4, num_stages=2)


@dataclasses.dataclass
class Batch:
    """Requests as (tokens of this step, length of the context with them), drawn keys and values in shuffled pages."""

    qkv: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    params: AttentionParams

    def run(self, min_query_len: int = 2, tiles: Tiles | None = SMALL, lse: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.full_like(self.qkv[:, : self.params.num_heads * self.params.head_dim], 7.0)
        prefill_attention(self.qkv, self.kv_cache, self.metadata, self.params, out, min_query_len, tiles, lse)
        return out

    def expected(self) -> torch.Tensor:
        out = torch.full_like(self.qkv[:, : self.params.num_heads * self.params.head_dim], 7.0)
        reference(self.qkv, self.kv_cache, self.metadata, self.params, out)
        return out


def make_batch(
    requests: list[tuple[int, int]],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    padding_requests: int = 0,
    padding_tokens: int = 0,
    **params: object,
) -> Batch:
    generator = torch.Generator().manual_seed(len(requests) * 7919 + head_dim)
    kv_dtype = kv_dtype or dtype
    lengths = [length for _, length in requests]
    table_width = max(math.ceil(length / block_size) for length in lengths) + 1
    num_pages = table_width * len(requests) + 1
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
    block_table = torch.zeros(len(requests) + 1, table_width, dtype=torch.int32)
    rows = torch.randperm(len(requests) + 1, generator=generator)[: len(requests)].to(torch.int32)
    for b, length in enumerate(lengths):
        pages = math.ceil(length / block_size)
        block_table[rows[b], :pages] = order[b * table_width : b * table_width + pages]
    # A page beyond a request's end, and its slots beyond the end, hold what nobody may use.
    kv_cache = torch.full((2, num_pages, num_kv_heads, block_size, head_dim), float("nan")).to(kv_dtype)
    for b, length in enumerate(lengths):
        for t in range(length):
            page = int(block_table[rows[b], t // block_size])
            drawn = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            kv_cache[:, page, :, t % block_size] = drawn.to(kv_dtype)
    query_lens = torch.tensor([n for n, _ in requests] + [0] * padding_requests)
    num_tokens = int(query_lens.sum())
    query_start = torch.cat((torch.zeros(1, dtype=torch.long), query_lens.cumsum(0))).to(torch.int32)
    seq_lens = torch.tensor(lengths + [0] * padding_requests, dtype=torch.int32)
    rows = torch.cat((rows, torch.zeros(padding_requests, dtype=torch.int32)))
    bound = num_tokens + padding_tokens
    qkv = torch.randn(bound, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    longest = int(query_lens.max())
    metadata = AttentionMetadata(
        block_size=block_size,
        query_start=query_start.to(DEVICE),
        seq_lens=seq_lens.to(DEVICE),
        rows=rows.to(DEVICE),
        block_table=block_table.to(DEVICE),
        slot_mapping=torch.full((bound,), -1, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(bound, dtype=torch.int32, device=DEVICE),
        shape=torch.tensor([num_tokens, len(requests), longest, max(lengths)], device=DEVICE),
        num_tokens=bound,
        num_requests=len(requests) + padding_requests,
        max_query_len=longest,
        max_seq_len=max(lengths),
    )
    whole = AttentionParams(num_heads, num_kv_heads, head_dim, head_dim**-0.5)
    return Batch(qkv.to(DEVICE), kv_cache.to(DEVICE), metadata, dataclasses.replace(whole, **params))  # type: ignore[arg-type]


def assert_close(batch: Batch, tolerance: float = 2e-5, **run: object) -> None:
    torch.testing.assert_close(batch.run(**run), batch.expected(), atol=tolerance, rtol=tolerance)  # type: ignore[arg-type]


RAGGED = [(5, 5), (2, 40), (33, 70), (17, 17), (9, 96)]


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_ragged_batches_with_and_without_a_prefix_agree(block_size: int, head_dim: int) -> None:
    assert_close(make_batch(RAGGED, block_size=block_size, head_dim=head_dim))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 2), (8, 2), (7, 1), (40, 2)])
def test_any_number_of_heads_shares_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    assert_close(make_batch(RAGGED, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("window", [1, 7, 32, 45, 200])
def test_a_window_hides_what_is_older(window: int) -> None:
    assert_close(make_batch([*RAGGED, (70, 150)], window=window))


def test_pages_that_a_window_has_passed_may_hold_anything() -> None:
    batch = make_batch([(20, 150)], window=24)
    batch.metadata.block_table[:, : (150 - 20 - 24) // 16] = 0  # the null page, which holds no numbers
    assert_close(batch)


def test_soft_cap() -> None:
    assert_close(make_batch(RAGGED, soft_cap=1.5))


def test_sinks_take_part_of_the_weight() -> None:
    assert_close(make_batch(RAGGED, sinks=torch.linspace(-2.0, 3.0, 4, device=DEVICE)))


def test_sinks_with_a_window() -> None:
    assert_close(make_batch(RAGGED, window=20, sinks=torch.linspace(-2.0, 3.0, 4, device=DEVICE)))


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_alibi_slopes(soft_cap: float) -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
    assert_close(make_batch(RAGGED, alibi_slopes=slopes, soft_cap=soft_cap))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    assert_close(make_batch(RAGGED, dtype=dtype, head_dim=128), tolerance=2e-2)


def test_pages_in_fp8_are_scaled_back() -> None:
    batch = make_batch(RAGGED, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0)
    plain = dataclasses.replace(batch.params, k_scale=1.0, v_scale=1.0, scale=batch.params.scale * 0.5)
    expected = dataclasses.replace(batch, params=plain).expected() * 2.0
    expected[expected == 14.0] = 7.0
    torch.testing.assert_close(batch.run(), expected, atol=4e-2, rtol=2e-2)


def test_padding_and_short_queries_are_left_alone() -> None:
    batch = make_batch([(1, 30), (6, 6), (1, 1), (3, 20), (1, 99)], padding_requests=3, padding_tokens=21, head_dim=64)
    out, expected = batch.run(), batch.expected()
    expected[[0, 7, 11]] = 7.0
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    assert (out[[0, 7, 11]] == 7.0).all()
    assert (out[12:] == 7.0).all()


def test_single_tokens_are_served_where_asked() -> None:
    assert_close(make_batch([(1, 30), (6, 6), (1, 1), (1, 99)]), min_query_len=1)


def test_a_step_of_padding_only_changes_nothing() -> None:
    batch = make_batch([(4, 4)])
    batch.metadata.query_start.zero_()
    batch.metadata.seq_lens.zero_()
    assert (batch.run() == 7.0).all()


def test_deterministic_bits_do_not_depend_on_chunks_or_neighbours() -> None:
    """One prompt whole; in chunks beside others; and its last token alone."""
    whole = make_batch([(90, 90)], dtype=torch.bfloat16, deterministic=True, window=50)
    expected = whole.run(min_query_len=1)
    for chunk_begin, chunk_end in ((0, 37), (37, 89), (89, 90)):
        length = chunk_end - chunk_begin
        part = make_batch([(5, 60), (length, chunk_end), (3, 3)], dtype=torch.bfloat16, deterministic=True, window=50)
        pages = math.ceil(chunk_end / 16)
        mine = part.metadata.block_table[int(part.metadata.rows[1]), :pages].long()
        theirs = whole.metadata.block_table[int(whole.metadata.rows[0]), :pages].long()
        part.kv_cache[:, mine] = whole.kv_cache[:, theirs]
        part.qkv[5 : 5 + length] = whole.qkv[chunk_begin:chunk_end]
        assert torch.equal(part.run(min_query_len=1)[5 : 5 + length], expected[chunk_begin:chunk_end])


def test_deterministic_tiles_depend_on_the_layer_alone() -> None:
    batch = make_batch([(3, 3)], deterministic=True)
    chosen = choose_tiles(batch.params.head_dim, torch.bfloat16, None)
    assert chosen.rows >= 16 and chosen.keys >= 32
    assert choose_tiles(128, torch.bfloat16, 8) != choose_tiles(128, torch.bfloat16, None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
def test_logarithms_of_denominators_agree_and_those_of_empty_contexts_are_minus_infinity(
    causal: bool, soft_cap: float
) -> None:
    requests = [*RAGGED, (1, 1), *([] if causal else [(3, 0), (2, 1)])]  # parts of contexts may be shorter than queries
    batch = make_batch(requests, causal=causal, soft_cap=soft_cap)
    given_TN, expected_TN = torch.zeros(2, len(batch.qkv), batch.params.num_heads, device=DEVICE)
    expected = torch.full_like(given := batch.run(1, None, given_TN), 7.0)
    reference(batch.qkv, batch.kv_cache, batch.metadata, batch.params, expected, expected_TN)
    torch.testing.assert_close(given_TN, expected_TN, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(given, expected, atol=2e-5, rtol=2e-5)
    assert causal or given_TN.isinf().any()
